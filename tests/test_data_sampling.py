"""Sampling: the bags of step t are a function of (seed, t) alone."""

from collections import Counter
from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest

from xpmir_uform.base.keyed_random import Purpose, generator
from xpmir_uform.data.items import Bag, Item
from xpmir_uform.data.sampling import BagSampler, BagSource, places
from xpmir_uform.trainer.loader import StepDataset, iterate_steps


class Numbers(BagSource):
    """Bag i holds the texts ``i`` and a number drawn anew each epoch."""

    __xpmid__ = "test.numbers"

    def __len__(self):
        return 10

    def bag(self, index, seed, epoch):
        drawn = generator(seed, Purpose.BAG, epoch, index).integers(1000)
        return Bag.alike([Item.text(f"{index}"), Item.text(f"{index}:{drawn}")])


def sampler(seed=0):
    made = BagSampler.C(source=Numbers.C()).instance()
    made.initialize(np.random.RandomState(seed))
    return made


def contents(steps):
    return [[bytes(step.batch.contents[i]) for i in range(len(step.batch.contents))] for step in steps]


def read(start, count, workers, batch_size=4):
    steps = iterate_steps(StepDataset(sampler(), batch_size, {}), start, workers)
    return contents(next(steps) for _ in range(count))


def test_each_epoch_holds_every_bag_once():
    drawn = [place for step in range(15) for place in places(5, step, 4, 10)]
    by_epoch = Counter(epoch for epoch, _ in drawn)
    assert by_epoch == dict.fromkeys(range(6), 10)
    for epoch in range(6):
        assert sorted(index for e, index in drawn if e == epoch) == list(range(10))


def test_batch_size_changes_the_cuts_and_not_the_order():
    one, other = ([p for step in range(n) for p in places(5, step, size, 10)] for n, size in ((12, 5), (20, 3)))
    assert one == other


@pytest.mark.parametrize("workers", [1, 2])
def test_order_over_three_epochs_is_the_same_for_any_workers(workers):
    assert read(0, 8, workers) == read(0, 8, 0)


def test_a_bag_of_two_epochs_in_one_batch_is_one_bag():
    """Ten bags in steps of seven: a step that ends one epoch and begins the next holds some of them twice."""
    twice = 0
    for step in range(20):
        batch = StepDataset(sampler(), 7, {})[step].batch
        names = [bytes(content).split(b":")[0] for content in batch.contents]
        ignored = set(zip(batch.ignore.anchors().tolist(), batch.ignore.ids.tolist(), strict=True))
        same = {(i, j) for i, j in permutations(range(14), 2) if names[i] == names[j] and i // 2 != j // 2}
        assert ignored == same
        twice += len(same) // 8
    assert twice > 5


def test_a_bag_keeps_a_key_of_its_own():
    made = sampler()
    given = Bag((Item.text("a"),), key=2**64 - 1)
    made.source.bag = lambda index, seed, epoch: given if index else replace(given, key=None)
    assert sorted(bag.key for bag in made.bags(0, 10)) == [0] + [2**64 - 1] * 9


def test_stopping_at_any_step_and_going_on_changes_nothing():
    whole = read(0, 8, 0)
    for stop in range(8):
        assert read(0, stop, 0) + read(stop, 8 - stop, 0) == whole


def test_stopping_with_workers_that_prefetch_changes_nothing():
    assert read(0, 3, 2) + read(3, 5, 2) == read(0, 8, 0)


def test_another_seed_gives_another_order_and_other_draws():
    first, second = sampler(0), sampler(1)
    assert [b.items[0].content for b in first.bags(0, 10)] != [b.items[0].content for b in second.bags(0, 10)]
    assert {b.items[1].content for b in first.bags(0, 10)} != {b.items[1].content for b in second.bags(0, 10)}


def test_epochs_draw_anew():
    first, second = ({b.items[1].content for b in sampler().bags(step, 10)} for step in (0, 1))
    assert first != second


def test_global_random_state_is_left_alone():
    import torch

    before = torch.random.get_rng_state(), np.random.get_state()[1].copy()
    read(0, 2, 1)
    assert torch.equal(before[0], torch.random.get_rng_state())
    assert np.array_equal(before[1], np.random.get_state()[1])


@pytest.mark.parametrize("batch_size", [0, 11])
def test_a_step_takes_no_bag_twice(batch_size):
    with pytest.raises(ValueError, match=f"batch_size is {batch_size}, expected 1 to 10"):
        sampler().bags(0, batch_size)
