"""Metrics for TensorBoard, which training does not need."""

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from xpm_torch.metrics import MetricsLogger

logger = logging.getLogger(__name__)


class Curves(MetricsLogger):
    """Passes metrics on until they cannot be written; then warns once, and training goes on without them.

    TensorBoard writes in a thread of its own and answers every later call with the error that ended it.

    Args:
        make: answers what writes them; called when there is something to write.
        path: where.
    """

    def __init__(self, make: Callable[[], MetricsLogger], path: Path) -> None:
        self.make = make
        self.path = path
        self.inner: MetricsLogger | None = None
        self.failed = False

    @property
    def writer(self) -> Any:
        """TensorBoard's own, once something was written."""
        return getattr(self.inner, "writer", None)

    def log_scalar(self, tag: str, value: float, step: int) -> None:
        """One number."""
        self._attempt("log_scalar", tag, value, step)

    def log_histogram(self, tag: str, values: object, step: int) -> None:
        """Many numbers."""
        self._attempt("log_histogram", tag, values, step)

    def log_hparams(self, hparams: Mapping[str, object], metrics: Mapping[str, float]) -> None:
        """Settings and what they led to."""
        self._attempt("log_hparams", hparams, metrics)

    def flush(self) -> None:
        """Writes what is waiting."""
        self._attempt("flush")

    def close(self) -> None:
        """Ends the writing."""
        self._attempt("close")

    def _attempt(self, name: str, *arguments: Any) -> None:
        if self.failed:
            return
        try:
            self.inner = self.inner or self.make()
            getattr(self.inner, name)(*arguments)
        except OSError as error:
            self.failed = True
            logger.warning("metrics cannot be written to %s, training goes on without them: %s", self.path, error)
