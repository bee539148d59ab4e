"""The command: runs the groups, prints the table, fails when anything was lost."""

import argparse
import importlib
import logging
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import date
from pathlib import Path

from faults.harness import Lab, Row
from xpmir_uform.checkpoints import provenance

GROUPS = {
    "saving": "killed while saving and at random moments",
    "damage": "every file of a checkpoint damaged in many ways",
    "disk": "a disk that is full, read-only, or fails",
    "stopping": "signals",
    "races": "two processes in one folder",
    "changes": "another configuration, code, data, loader, number of ranks",
    "numbers": "losses and gradients that are not finite",
    "lost": "loader workers and ranks that die, hang, fail, come late",
    "surroundings": "clocks, stray files, links",
    "hostile": "files made to do harm",
}
WORDS = {"done": "went on", "again": "left to be run again", "cancelled": "left at once", "killed": "killed"}


def run(names: Sequence[str], quick: bool, root: Path) -> dict[str, list[Row]]:
    """The rows of each group."""
    lab = Lab(root, quick)
    found = {}
    for name in names:
        start, found[name] = time.monotonic(), []
        for row in importlib.import_module(f"faults.{name}").rows(lab):
            found[name].append(row)
            print(f"{name}: {line(row)}", file=sys.stderr, flush=True)
            for lost in row.lost:
                print(f"    LOST {lost}", file=sys.stderr, flush=True)
        print(f"{name}: {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
    return found


def line(row: Row) -> str:
    """A row of the table."""
    outcomes = ", ".join(f"{WORDS.get(name, name)} {count}" for name, count in row.outcomes.most_common())
    lost = f"**{len(row.lost)} checks fail**" if row.lost else "nothing"
    return f"| {row.fault} | {row.outcomes.total()} | {outcomes} | {lost} |"


def table(found: dict[str, list[Row]]) -> str:
    """The whole table, in Markdown."""
    lines = ["| fault | times | the run with it | lost after running the task again |", "| --- | --- | --- | --- |"]
    for name, rows in found.items():
        lines += [f"| **{GROUPS[name]}** | | | |", *map(line, rows)]
    return "\n".join(lines)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(prog="python tests/harness/faults", description=__doc__)
    parser.add_argument("groups", nargs="*", choices=[*GROUPS, []], help="all, if none is named")
    parser.add_argument("--quick", action="store_true", help="a spread of each group")
    parser.add_argument("--keep", type=Path, help="a folder to work in, which is kept")
    arguments = parser.parse_args()
    # What is read of trials is warned of there.
    logging.disable(logging.WARNING)
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as root:
        found = run(arguments.groups or list(GROUPS), arguments.quick, arguments.keep or Path(root).resolve())
    rows = [row for group in found.values() for row in group]
    count = sum(row.outcomes.total() for row in rows)
    versions = provenance.versions()
    print(table(found))
    print(
        f"\n{date.today()}, {count} faults in {(time.monotonic() - start) / 60:.0f} minutes, CPU; "
        + ", ".join(f"{name} {versions[name]}" for name in ("python", "torch", "xpm-torch", "experimaestro"))
    )
    sys.exit(1 if any(row.lost or not row.outcomes for row in rows) else 0)
