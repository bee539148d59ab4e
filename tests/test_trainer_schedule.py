"""The learning rate of every step."""

import math

import pytest
import torch

from xpmir_uform.trainer.schedule import CosineSchedule, cosine_rate


def schedule(**params):
    return CosineSchedule.C(**{"learning_rate": 0.8, "min_learning_rate": 0.2, "warmup_steps": 4, **params}).instance()


@pytest.mark.parametrize(
    ("step", "rate"),
    [
        (0, 0.0),
        (1, 0.2),
        (4, 0.8),
        (8, 0.5),  # the middle of the cosine: halfway between 0.8 and 0.2
        (6, 0.2 + 0.6 * (1 + math.cos(math.pi / 4)) / 2),
        (12, 0.2),
        (500, 0.2),
    ],
)
def test_exact_rates(step, rate):
    assert cosine_rate(step, warmup=4, steps=12, peak=0.8, floor=0.2) == pytest.approx(rate, abs=1e-15)


def test_no_warmup_begins_at_the_peak():
    assert cosine_rate(0, warmup=0, steps=10, peak=1.0, floor=0.0) == 1.0


def rates(made, optimizer_count, total, start=0):
    """The rate of each step from ``start`` on, as an optimizer sees it."""
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=123.0)
    scheduler = made(optimizer, total, last_epoch=start - 1)
    seen = []
    for _ in range(optimizer_count):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return seen


def test_optimizer_sees_the_rates_and_not_its_own():
    assert rates(schedule(), 13, 12) == [
        cosine_rate(step, warmup=4, steps=12, peak=0.8, floor=0.2) for step in range(13)
    ]


def test_rates_after_a_resume_are_the_same():
    whole = rates(schedule(), 12, 12)
    for stop in range(1, 12):
        assert rates(schedule(), 12 - stop, 12, start=stop) == whole[stop:]


def test_own_horizon_wins_over_the_learners():
    assert rates(schedule(steps=6), 8, 100)[6:] == [0.2, 0.2]


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"min_learning_rate": 0.9}, "min_learning_rate is 0.9, expected 0 to learning_rate"),
        ({"min_learning_rate": -0.1}, "^min_learning_rate is -0.1"),
        ({"learning_rate": -0.2}, "^learning_rate is -0.2, expected at least 0"),
        ({"learning_rate": float("nan")}, "^learning_rate is nan, expected at least 0"),
        ({"steps": 4}, "warmup_steps is 4 and steps is 4"),
        ({"warmup_steps": -1}, "warmup_steps is -1"),
    ],
)
def test_impossible_schedules_are_refused(params, message):
    with pytest.raises(ValueError, match=message):
        schedule(**params).__validate__()
