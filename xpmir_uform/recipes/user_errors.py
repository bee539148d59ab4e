"""What a person can mend, in one line."""

import re
from difflib import get_close_matches
from traceback import extract_tb
from typing import Any

from experimaestro import Config
from experimaestro.scheduler.experiment import FailedExperiment

UNKNOWN = re.compile(r"(\w+) is not an argument for Type\(([\w.-]+)\)")
CALLED = re.compile(r"(\w+)\(\) takes no arguments|Module\.__init__\(\) got an unexpected keyword argument.*")
INSTANCE = "Configuration (and not objects) should be used"
CALL = re.compile(r"(?<![\w.])([A-Z]\w*)\(")
"""A class that is called, other than by ``.C``"""


class Refused(FailedExperiment):
    """The plan cannot be carried out as it is; experimaestro's command prints the message and ends with status 1."""


def refusal(error: Exception) -> str | None:
    """One line about an error that a person can mend; None: it is a fault of the program."""
    text = _one_line(str(error))
    if match := UNKNOWN.fullmatch(text):
        return _unknown_field(*match.groups())
    if isinstance(error, (TypeError, AttributeError)):
        if not CALLED.fullmatch(text) and not text.startswith(INSTANCE):
            return None
        line = extract_tb(error.__traceback__)[-1 if CALLED.fullmatch(text) else 0].line or ""
        names = " or ".join(dict.fromkeys(CALL.findall(line))) or "a configuration"
        return f"{names} was called without .C: configurations are made by .C(...), as UFormEncoder.C(depth=2)"
    return text if isinstance(error, (ValueError, OSError)) else None


def _one_line(text: str) -> str:
    """A message of pydantic without its links, in one line; others as they are."""
    if "validation error" not in text:
        return text
    lines = [line.strip() for line in text.splitlines() if "https://" not in line]
    return re.sub(r" \[type=.*?\]$", "", " ".join(lines))


def _unknown_field(field: str, identifier: str) -> str:
    """What may have been meant by a field that a configuration lacks."""
    kind = next((kind for kind in _configurations(Config) if str(kind.__getxpmtype__().identifier) == identifier), None)
    if kind is None:
        return f"{field} is no field of {identifier}"
    names = list(kind.__getxpmtype__().arguments)
    near = get_close_matches(field, names, 1)
    return f"{field} is no field of {kind.__name__}" + (
        f": did you mean {near[0]}?" if near else f", expected some of {', '.join(names)}"
    )


def _configurations(kind: type) -> list[Any]:
    """All classes below ``kind``."""
    below: list[Any] = kind.__subclasses__()
    return [*below, *(deeper for each in below for deeper in _configurations(each))]
