"""Something is another when the job is submitted again: it is refused, or nothing depends on it."""

from collections.abc import Iterator

from faults.harness import Lab, Row, nothing
from faults.training import EPOCHS
from xpmir_uform.checkpoints import provenance

STEP = 8
OTHER = {
    "another learning rate": {"rate": 3e-2},
    "another batch size": {"batch_size": 3},
    "another length": {"epochs": EPOCHS + 1},
    "another clipping": {"clip_norm": 0.5},
    "a wider head": {"width": 24},
    "other data": {"version": 2},
}
ROUNDING = 1e-4
"""Bound of the difference of tensors in float32 after 4 steps on another number of ranks, relative"""


def rows(lab: Lab) -> Iterator[Row]:
    """What is refused, then what may change."""
    row = Row("configuration or data changed, then restored")
    for name, params in OTHER.items():
        trial = lab.trial(STEP)
        attempt = trial.attempt(**params)
        lost = [] if attempt.ending.status == "stopped" and attempt.before == attempt.after else ["it was not refused"]
        trial.attempt()
        row.add(attempt.ending.status, [*lost, *lab.check(trial)], name)
    yield row
    row = Row("another version of packages and code")
    trial = lab.trial(STEP)
    trial.attempt(other_versions)
    row.add(trial.attempts[-1].ending.status, lab.check(trial))
    yield row
    row = Row("0, 1, 2, 3 loader workers")
    for workers in (1, 2, 3):
        trial = lab.trial(STEP)
        trial.attempt(workers=workers)
        row.add(trial.attempts[-1].ending.status, lab.check(trial), f"{workers} workers")
    yield row
    row = Row("1 rank, then 2 or 3, to float32 rounding")
    for ranks in lab.spread((2, 3), 1):
        trial = lab.trial(STEP)
        trial.attempt(nothing, ranks)
        row.add(trial.attempts[-1].ending.status, lab.check(trial, tolerance=ROUNDING), f"{ranks} ranks")
    yield row


def other_versions(rank: int) -> None:
    """What the manifest says of versions and code."""
    versions = {**provenance.versions(), "torch": "9.9.9"}
    provenance.versions = lambda: versions
    provenance.git = lambda: {"commit": "0" * 40, "dirty": True}
