"""The console script ``xpmir-uform``.

Each subcommand is a module here of the same name, with a docstring whose first line is its help, ``configure(parser)``
and ``run(arguments) -> int``, the exit status. They are imported when any subcommand is used: what is slow to import is
imported inside ``run``.
"""

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

from xpmir_uform.base.atomic_files import Occupied
from xpmir_uform.base.checked_files import printable

NAMES = ("checkpoint", "report", "index", "search")
"""The subcommands; a new one is a module and its name here."""


def parser() -> argparse.ArgumentParser:
    """The parser of all subcommands."""
    top = argparse.ArgumentParser(prog="xpmir-uform", description="Look at and use what xpmir-uform trained.")
    subparsers = top.add_subparsers(required=True, metavar="COMMAND")
    for name in NAMES:
        module = import_module(f"{__name__}.{name}")
        text = (module.__doc__ or "").strip()
        sub = subparsers.add_parser(
            name,
            help=text.partition("\n")[0],
            description=text,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.configure(sub)
        sub.set_defaults(run=module.run)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one subcommand; answers its exit status. What the user can repair is said in one line, with status 1."""
    chosen = parser().parse_args(arguments)
    try:
        return chosen.run(chosen)
    except (ValueError, OSError, Occupied) as error:
        print(f"xpmir-uform: {printable(error)}", file=sys.stderr)
        return 1
