"""What is on the screen: bars, tables and what a person has to know. Log lines go to a file."""

import logging
import os
from logging.handlers import MemoryHandler
from pathlib import Path

from experimaestro.scheduler.experiment import experiment

logger = logging.getLogger(__name__)

HELD = 100_000
"""Lines that are held at most until there is a file for them"""

NOISE = (
    "Failed to serialize action",  # Its weights are not there yet: an action is listed before the training has run.
    "In a future version, directory will be cleaned up",
    "Job %s cannot start: dependency failed",  # These three are told by the helper.
    "Job %s failed, check the log file",
    "Experiment Failed",
)


def no_carbon_banner() -> None:
    """Passes over the banner about codecarbon, and its pause, where that is not installed.

    ``run-experiment`` has no option for the argument, so its default is changed.
    """
    try:
        from experimaestro.carbon import is_available

        missing = not is_available()
    except ImportError:
        missing = True
    if missing:
        (experiment.__init__.__kwdefaults__ or {})["no_environmental_impact"] = True


def leave_quietly(xp: experiment) -> None:
    """Lets an experiment be left on a full disk: what it cannot write of its end would hide why it ends."""
    finalize = xp._finalize_run

    def attempt(status: str) -> None:
        try:
            finalize(status)
        except OSError as error:
            logger.info("the end of the experiment is not written: %s", error)

    xp._finalize_run = attempt  # type: ignore[method-assign]


def matters(record: logging.LogRecord) -> bool:
    """Whether a log line is for the screen: a warning or worse that nothing else tells of.

    Lines with a traceback are of errors that are raised too.
    """
    return record.levelno >= logging.WARNING and not record.exc_info and not str(record.msg).startswith(NOISE)


class Screen:
    """Keeps what does not matter from the screen, for the log file of the run.

    Args:
        everything: also show it.
    """

    def __init__(self, everything: bool) -> None:
        self.held = MemoryHandler(HELD, flushLevel=logging.CRITICAL + 1)
        self.path = Path(os.devnull)
        # A disk that is full is told of once, at the end, and not at each line of each log.
        logging.raiseExceptions = False
        root = logging.getLogger()
        if not everything and root.level > logging.DEBUG:
            for handler in root.handlers:
                handler.addFilter(matters)
        root.addHandler(self.held)

    def keep(self, path: Path) -> None:
        """Writes what was held, and all that follows, to the file at ``path``."""
        file = logging.FileHandler(path)
        file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        logging.getLogger().addHandler(file)
        self.held.setTarget(file)
        self.held.close()
        logging.getLogger().removeHandler(self.held)
        self.path = path
