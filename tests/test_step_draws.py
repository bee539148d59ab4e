"""What a model draws from the global generators: the same in both passes, another at each step, gone after a resume."""

import random
from contextlib import contextmanager
from math import prod
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn.functional import dropout

from xpmir_uform import Bag, BagSampler, BagSource, Batch, ContrastiveLoss, Item, PooledHead, UFormEncoder, UFormTrainer
from xpmir_uform.data.decoding.registry import decode
from xpmir_uform.losses.base import Encoded
from xpmir_uform.model.packing import pack
from xpmir_uform.trainer.loader import LoadedStep, StepDataset, sizes
from xpmir_uform.trainer.step.exact import Engine, Microbatch, Share, exact_step, gather

WORDS = ["ant", "bee", "cat", "dog", "elk", "fox"]


class Words(BagSource):
    """Each word and its reverse."""

    __xpmid__ = "test.reversed-words"

    def __len__(self):
        return len(WORDS)

    def bag(self, index, seed, epoch):
        return Bag.alike([Item.text(WORDS[index]), Item.text(WORDS[index][::-1] + "!")])


@pytest.fixture(scope="module")
def trainer():
    torch.set_default_dtype(torch.float64)
    sampler = BagSampler.C(source=Words.C())
    made = UFormTrainer.C(sampler=sampler, losses=[ContrastiveLoss.C()], batch_size=6).instance()
    made.sampler.initialize(np.random.RandomState(0))
    model = UFormEncoder.C(depth=1, hidden=128, pooled=PooledHead.C(width=12)).instance()
    model.initialize()
    made.model = made._fabric_model = model.double()
    made.context = SimpleNamespace(state=SimpleNamespace(optimizer=SimpleNamespace(scale=lambda x: x)))
    yield made
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def loaded(trainer):
    return StepDataset(trainer.sampler, 6, {})[0]


DRAWS = {
    "torch": lambda shape: dropout(torch.ones(shape), 0.5),
    "numpy": lambda shape: torch.from_numpy(np.random.rand(*shape)),
    "python": lambda shape: torch.tensor([random.random() for _ in range(prod(shape))]).reshape(shape),
}
"""What a module may draw from, each from a generator of its own"""


@contextmanager
def dropping(trainer, draw, masks):
    """Within it the model's embeddings are multiplied by what it draws, which goes to ``masks``."""

    def drop(module, inputs, outputs):
        masks.append(DRAWS[draw](outputs.embeddings.shape))
        return outputs._replace(embeddings=outputs.embeddings * masks[-1])

    handle = trainer.model.register_forward_hook(drop)
    yield Engine(trainer.forward, torch.Tensor.backward)
    handle.remove()


def states():
    numpy = np.random.get_state()
    return torch.get_rng_state().tolist(), (*numpy[:1], numpy[1].tolist(), *numpy[2:]), random.getstate()


def parts(trainer, loaded, size):
    return [trainer.microbatch(loaded, loaded.bags[start : start + size]) for start in range(0, 6, size)]


@pytest.mark.parametrize("draw", DRAWS)
def test_both_passes_draw_the_same_and_move_no_global_generator(trainer, loaded, draw):
    masks, before = [], states()
    share = Share(loaded.batch, loaded.shares, parts(trainer, loaded, 2))
    with dropping(trainer, draw, masks) as engine:
        exact_step(engine, share, trainer.losses)
    # Three microbatches: two without graph, the last once with its graph, and the first two again.
    assert len(masks) == 5
    assert torch.equal(masks[0], masks[3])
    assert torch.equal(masks[1], masks[4])
    assert len({tuple(mask.flatten().tolist()) for mask in masks}) == 3
    assert states() == before


@pytest.mark.parametrize("draw", DRAWS)
def test_gradient_is_that_of_one_pass_with_the_same_draws(trainer, loaded, draw):
    microbatches = parts(trainer, loaded, 2)
    share = Share(loaded.batch, loaded.shares, microbatches)
    trainer.model.zero_grad()
    with dropping(trainer, draw, []) as engine:
        exact_step(engine, share, trainer.losses)
        found = {name: parameter.grad.clone() for name, parameter in trainer.model.named_parameters()}
        trainer.model.zero_grad()
        outputs = [trainer.forward(microbatch) for microbatch in microbatches]
    whole = Encoded(torch.cat([o.embeddings for o in outputs]), outputs[-1].inverse_temperature, outputs[-1].bias)
    rows = range(len(loaded.batch))
    loss = trainer.losses[0]
    loss.compute(whole, loaded.batch, rows, loss.counts(loaded.batch, rows)).value.backward()
    for name, parameter in trainer.model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-10, atol=1e-14)


def test_steps_and_bags_draw_differently_and_each_always_the_same(trainer, loaded):
    later = StepDataset(trainer.sampler, 6, {})[1]
    seeds = [trainer.microbatch(step, step.bags[start:]).seed for step in (loaded, later) for start in (0, 1, 2)]
    assert len(set(seeds)) == 6
    assert seeds[0] == trainer.microbatch(loaded, loaded.bags[0:1]).seed


def test_ranks_see_the_same_global_batch_and_take_disjoint_parts_of_it(trainer):
    whole = StepDataset(trainer.sampler, 6, {})[3]
    for ranks in (2, 3, 8):
        steps = [StepDataset(trainer.sampler, 6, {}, rank=rank, ranks=ranks)[3] for rank in range(ranks)]
        assert all(np.array_equal(step.batch.keys, steps[0].batch.keys) for step in steps)
        assert sorted(steps[0].batch.keys.tolist()) == sorted(whole.batch.keys.tolist())
        taken = [number for step in steps for bag in step.bags for number in bag.items]
        assert taken == list(range(len(whole.batch)))
        assert [len(step.segments) for step in steps] == [len(share) for share in steps[0].shares]
        tokens = [sum(segment.tokens for segment in step.segments) for step in steps]
        assert max(tokens) <= max(-(-sum(tokens) // ranks) + 7, 7)


def test_a_rank_that_ran_out_of_memory_sends_zeros(trainer, loaded):
    closing = Microbatch(pack([decode(Item.text("x"), {})]), torch.zeros(0, dtype=torch.int64))
    share = Share(loaded.batch, loaded.shares, [], closing)
    encoded = gather(Engine(trainer.forward, torch.Tensor.backward), share, None)
    assert encoded.embeddings.shape == (12, 12)
    assert not encoded.embeddings.any()
    assert encoded.inverse_temperature.item() == pytest.approx(10.0)


def test_sizes_name_a_bag_by_its_first_item_and_count_tokens():
    bags = [Bag((Item.text("ab", 5), Item.text("", 6))), Bag((Item.text("xyz", 7),))]
    segments = [decode(item, {}) for bag in bags for item in bag.items]
    first, second = sizes(bags, segments, first=10)
    assert (first.items, first.lengths, first.key) == (range(10, 12), (2, 1), 5)
    assert (second.items, second.lengths, second.key) == (range(12, 13), (3,), 7)
    step = LoadedStep(0, Batch.of(bags), [range(10, 13)], [first, second], segments)
    assert step.collect([12, 10]) == [segments[2], segments[0]]
