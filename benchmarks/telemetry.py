"""What telemetry costs: its share of the quickstart's step, in one process.

    python benchmarks/telemetry.py [--quick]

Trains the quickstart's model on its data for some steps. In each it times the check of loss and gradient, and the line
of telemetry with its alerts. Prints the median share of each in the time of the step (without the wait for its batch)
and fails if both together take more than 2 %. Needs the packages of the extra ``demo``. On two cores it takes about
half a minute.
"""

import argparse
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from experimaestro import taskglobals
from experimaestro.xpmutils import DirectoryContext

from xpmir_uform import Augmentation, ContrastiveLoss, RankedForm
from xpmir_uform.datasets import EmojiBags, EmojiCollection
from xpmir_uform.learner import nonfinite
from xpmir_uform.learner.step_recorder import Observer
from xpmir_uform.monitoring.telemetry import read_telemetry
from xpmir_uform.recipes import ModelSettings, TrainingSettings
from xpmir_uform.reports.tables import table

TARGET = 0.02
WARM = 5
"""Steps that are left out of the medians"""


class Timer:
    """Adds up, by step, what some functions take."""

    def __init__(self) -> None:
        self.seconds: list[dict[str, float]] = [{}]

    def around(self, name: str, function: Callable) -> Callable:
        """``function``, timed under ``name``."""

        def timed(*args, **kwargs):
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds[-1][name] = self.seconds[-1].get(name, 0.0) + time.perf_counter() - start

        return timed

    def next(self, function: Callable) -> Callable:
        """``function``, whose call begins a step."""

        def begun(*args, **kwargs):
            self.seconds.append({})
            return function(*args, **kwargs)

        return begun


def run(steps: int, folder: Path) -> tuple[list[dict[str, float]], list[float]]:
    """Of each step: what its parts took, and what it took."""
    training = TrainingSettings(epochs=1, steps_per_epoch=steps, warmup_steps=2, weight_decay=1.0, workers=1)
    learner = training.learner(
        ModelSettings().config(seed=1),
        EmojiBags.C(collection=EmojiCollection.installed(held_out=300)),
        [ContrastiveLoss.C(form=RankedForm.C())],
        seed=1,
        augmentation=Augmentation.C(noise=8.0, drop=0.1),
    )
    timer = Timer()
    Observer.begin = timer.next(timer.around("line", Observer.begin))  # type: ignore[method-assign]
    Observer.end = timer.around("line", Observer.end)  # type: ignore[method-assign]
    nonfinite.judge = timer.around("check", nonfinite.judge)
    taskglobals.Env.instance().taskpath = folder
    learner.instance(context=DirectoryContext(folder)).execute()
    return timer.seconds[1:], [line["seconds"]["step"] for line in read_telemetry(folder)]


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer steps")
    steps = 25 if parser.parse_args().quick else 60
    torch.set_num_threads(2)
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root) / "jobs" / "task" / "job"
        folder.mkdir(parents=True)
        parts, whole = run(steps, folder)
    rows = list(zip(parts, whole, strict=True))[WARM:]
    shares = {name: median(part[name] / step for part, step in rows) for name in ("check", "line")}
    total = median((part["check"] + part["line"]) / step for part, step in rows)
    print(f"{platform.processor() or platform.machine()}, torch {torch.__version__}, 2 threads, {len(rows)} steps")
    what = {"check": "checking loss and gradient, the norm", "line": "the line of telemetry, windows, alerts"}
    print(
        table(
            ["part", "milliseconds", "of the step"],
            [[what[n], f"{1e3 * median(p[n] for p, _ in rows):.2f}", f"{share:.2%}"] for n, share in shares.items()]
            + [["the whole step", f"{1e3 * median(whole[WARM:]):.1f}", "100%"]],
        )
    )
    print(f"together {total:.2%}, at most {TARGET:.0%}")
    sys.exit(0 if total <= TARGET else 1)


if __name__ == "__main__":
    main()
