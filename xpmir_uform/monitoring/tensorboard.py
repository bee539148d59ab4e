"""Metrics for TensorBoard, which training does not need."""

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from xpm_torch.loggers import TensorboardLogger
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
        self._attempt(lambda inner: inner.log_scalar(tag, value, step))

    def log_histogram(self, tag: str, values: object, step: int) -> None:
        """Many numbers."""
        self._attempt(lambda inner: inner.log_histogram(tag, values, step))

    def log_hparams(self, hparams: Mapping[str, object], metrics: Mapping[str, float]) -> None:
        """Settings, and the names of the scalars that they led to."""
        self._attempt(lambda inner: log_settings(inner, hparams, metrics))

    def flush(self) -> None:
        """Writes what is waiting."""
        self._attempt(lambda inner: inner.flush())

    def close(self) -> None:
        """Ends the writing."""
        self._attempt(lambda inner: inner.close())

    def open(self) -> None:
        """Begins to write at the current step: TensorBoard leaves out what earlier runs wrote from there on."""
        self._attempt(lambda inner: None)

    def _attempt(self, write: Callable[[MetricsLogger], None]) -> None:
        if self.failed:
            return
        try:
            self.inner = self.inner or self.make()
            write(self.inner)
        except OSError as error:
            self.failed = True
            logger.warning("metrics cannot be written to %s, training goes on without them: %s", self.path, error)


def log_settings(inner: MetricsLogger, hparams: Mapping[str, object], metrics: Mapping[str, float]) -> None:
    """Settings as part of the run that the scalars belong to; torch's ``add_hparams`` would begin a second run."""
    if not isinstance(inner, TensorboardLogger):
        inner.log_hparams(hparams, metrics)
        return
    from torch.utils.tensorboard.summary import hparams as summaries

    for summary in summaries(dict(hparams), dict(metrics)):
        inner.writer.file_writer.add_summary(summary)
