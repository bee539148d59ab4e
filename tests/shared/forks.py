"""Work in a process of its own."""

import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path

from experimaestro.locking import EventLoopThread
from experimaestro.scheduler.base import Scheduler


def fork(work: Callable[[], object], log: Path) -> int:
    """The exit status of ``work`` in a process forked from this one; what it prints goes to ``log``."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    # What an earlier test left: a scheduler whose threads a fork does not have, and which would be waited for for ever.
    EventLoopThread._instance = Scheduler._instance = None
    status = 99
    try:
        sys.stdout = sys.stderr = log.open("a")
        logging.basicConfig(force=True, stream=sys.stderr)
        work()
        status = 0
    except SystemExit as ended:
        status = int(ended.code or 0)
    finally:
        sys.stdout.flush()
        os._exit(status)
