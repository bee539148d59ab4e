"""Where the time of a step goes."""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

import torch


class Watch:
    """Seconds by the name of a part; calling it gives a context that adds to one.

    On a GPU, whose work runs behind that of the host, the device's own clock is read once, by :meth:`seconds`.

    Args:
        device: where the work runs.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._spans: dict[str, list[tuple]] = defaultdict(list)

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = self._now()
        try:
            yield
        finally:
            self._spans[name].append((start, self._now()))

    def _now(self) -> "float | torch.cuda.Event":
        if not self._on_gpu:
            return perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self) -> dict[str, float]:
        """What each part took in all; waits for the device."""
        if not self._on_gpu:
            return {name: sum(stop - start for start, stop in spans) for name, spans in self._spans.items()}
        torch.cuda.synchronize()
        return {
            name: sum(start.elapsed_time(stop) for start, stop in spans) / 1000 for name, spans in self._spans.items()
        }
