"""Requests to stop: the step is finished and saved, then the task leaves so that it is run again."""

import logging
import os
import signal
import threading
from collections.abc import Callable
from time import monotonic
from types import FrameType
from typing import Any

from experimaestro import GracefulTimeout, TaskCancelled

from xpmir_uform.trainer.loader_workers import PASSED_OVER

logger = logging.getLogger(__name__)

SIGNALS = PASSED_OVER
"""Those that loader workers pass over: what asks one process of a job to end asks all of them."""

POLL_SECONDS = 10.0
"""Between two questions to the launcher, which may have to run a command for its answer."""


class Interruptions:
    """Within ``with``, a first signal is noted, and a second one ends what is under way.

    SIGHUP stays ignored where it is (``nohup``).

    Args:
        remaining: the seconds that are left, None if nobody knows.
        margin: with fewer than these left, it is time to leave.
    """

    def __init__(self, remaining: Callable[[], float | None] = lambda: None, margin: float = 0.0) -> None:
        self.remaining = remaining
        self.margin = margin
        self.reason: str | None = None
        self._asked = -POLL_SECONDS
        self._process = os.getpid()
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "Interruptions":
        if threading.current_thread() is threading.main_thread():
            ignored = {number for number in (signal.SIGHUP,) if signal.getsignal(number) == signal.SIG_IGN}
            self._before = {number: signal.signal(number, self._receive) for number in SIGNALS if number not in ignored}
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        if self.reason and isinstance(error, RuntimeError):
            # The loader's workers and the other ranks are asked to stop too, and what they leave undone fails here.
            raise GracefulTimeout(
                f"{self.reason}, and the step under way was lost ({type(error).__name__}: {error}): run the task again "
                "to go on from the last checkpoint"
            ) from error

    def _receive(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if os.getpid() != self._process:
            # A process forked from this one, which nobody asked to save anything.
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        elif self.reason is None:
            self.reason = f"{name} was received"
            logger.warning("%s: the step is finished and saved; a second signal ends at once", name)
        elif number != signal.SIGXCPU:
            # The kernel sends that one every second.
            self._cancel(frame)
            raise TaskCancelled(f"{name} was received after {self.reason}: nothing more is saved")

    def _cancel(self, frame: FrameType | None) -> None:
        """Lets experimaestro, whose handler of SIGTERM this one stands before, mark the job as cancelled."""
        handler = self._before.get(signal.SIGTERM)
        if callable(handler):
            handler(signal.SIGTERM, frame)

    def due(self) -> bool:
        """Whether it is time to leave, as far as this process knows."""
        if self.reason is None and monotonic() - self._asked >= POLL_SECONDS:
            self._asked = monotonic()
            left = self.remaining()
            if left is not None and left < self.margin:
                self.reason = f"{left:.0f} s are left, less than {self.margin:.0f}"
        return self.reason is not None
