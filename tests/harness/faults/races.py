"""Two processes begin in one folder at the same moment."""

import os
import time
from collections.abc import Iterator

from faults import checker
from faults.harness import Lab, Row, Trial, before

RACES = 50
PATIENCE_SECONDS = 30


def rows(lab: Lab) -> Iterator[Row]:
    """One wins and ends as if it had been alone; the other leaves with a message and has touched nothing."""
    row = Row("two processes at once")
    for number in range(4 if lab.quick else RACES):
        # Every other race is for a job that has checkpoints.
        trial = lab.trial(8 * (number % 2))
        race(trial)
        first, second = trial.attempts[-1].endings
        lost = [] if (first.status, second.kind) == ("done", "Occupied") else [f"they ended {first} and {second}"]
        row.add("one went on, the other left", [*lost, *lab.check(trial)])
    yield row


def race(trial: Trial) -> None:
    """Starts two, and holds the winner at its first step until the other has ended."""
    before_it = checker.shelf(trial.checkpoints)
    for folder in (trial.folder, trial.job):
        folder.mkdir(parents=True, exist_ok=True)
    (trial.folder / "seen.jsonl").write_bytes(b"")
    ready, go = os.pipe()

    def setup(runner: int) -> None:
        os.close(go)
        os.read(ready, 1)
        first = max(before_it.committed, default=0) + 1
        before(first, lambda: wait_for(trial, 1 - runner), runner)(runner)

    children = [trial.fork(runner, 1, 0, setup, {}) for runner in range(2)]
    os.close(ready)
    os.close(go)
    trial.wait(children)
    attempt = trial.finish(before_it, 2)
    endings = sorted(attempt.endings, key=lambda ending: ending.status != "done")
    trial.attempts[-1] = checker.Attempt(attempt.before, attempt.after, endings, attempt.steps)


def wait_for(trial: Trial, runner: int) -> None:
    """Until the other has ended."""
    limit = time.monotonic() + PATIENCE_SECONDS
    while trial.ending(runner)["status"] == "killed" and time.monotonic() < limit:
        time.sleep(0.01)
