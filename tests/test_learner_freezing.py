"""Freezing: what a pattern names stays as it is, bit for bit, without a number in the optimizer."""

import shutil

import pytest
import torch
from invariance import job, run_here, run_ranks
from safetensors.torch import load_file
from torch import nn
from xpm_torch import Random
from xpm_torch.configuration import FabricConfiguration

from xpmir_uform import (
    Bag,
    BagSampler,
    BagSource,
    ContrastiveLoss,
    CosineSchedule,
    Item,
    PooledHead,
    UFormEncoder,
    UFormLearner,
    UFormTrainer,
    adamw,
)
from xpmir_uform.learner.freezing import count_parameters, freeze
from xpmir_uform.monitoring.telemetry import read_telemetry


class Model(nn.Module):
    """Two layers and a head that shares its weight with the first."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
        self.head = nn.Linear(3, 3, bias=False)
        self.head.weight = self.layers[0].weight
        self.scale = nn.Parameter(torch.ones(2))


def frozen(model):
    return {name for name, parameter in model.named_parameters() if not parameter.requires_grad}


@pytest.mark.parametrize(
    ("patterns", "names", "counts"),
    [
        ([], set(), {}),
        (["layers.1"], {"layers.1.weight", "layers.1.bias"}, {"layers.1": 12}),
        ([r".*\.bias"], {"layers.0.bias", "layers.1.bias"}, {r".*\.bias": 6}),
        (["head"], {"layers.0.weight"}, {"head": 9}),
        (["layers", "layers.1", "scale$"], {"layers.0.weight", "layers.0.bias", "layers.1.weight", "layers.1.bias",
                                            "scale"}, None),
    ],
    ids=["nothing", "prefix", "expression", "tied", "all"],
)  # fmt: skip
def test_what_patterns_name(patterns, names, counts):
    model = Model()
    if counts is None:
        with pytest.raises(ValueError, match="freezes every parameter"):
            freeze(model, patterns)
        return
    assert freeze(model, patterns) == counts
    assert frozen(model) == names
    optimizer = torch.optim.SGD(model.parameters())
    assert count_parameters(model, [optimizer]) == (26, 26 - sum(counts.values()))
    assert count_parameters(model, []) == (26, 0)


def test_what_is_frozen_twice_is_counted_once():
    assert freeze(Model(), ["layers.1.weight", "layers"]) == {"layers.1.weight": 9, "layers": 15}


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("weight", "frozen has 'weight', which matches no parameter: their names are scale, layers.0.weight"),
        ("(", r"frozen has '\(', expected a regular expression or a prefix"),
    ],
)
def test_patterns_that_mean_nothing_are_refused(pattern, message):
    with pytest.raises(ValueError, match=message):
        freeze(Model(), [pattern])


# --- Whole runs

STEPS = 4
WORDS = ["ant", "bee", "cat", "dog", "elk", "fox", "gnu", "hen"]
FROZEN = ["encoder.bytes", r"encoder\.blocks\.0\..*norm", "pooling.bias"]


class Words(BagSource):
    """A word and its reverse."""

    __xpmid__ = "test.freezing-words"

    def __len__(self):
        return len(WORDS)

    def bag(self, index, seed, epoch):
        return Bag.alike([Item.text(WORDS[index]), Item.text(WORDS[index][::-1] + "?")])


def config(devices=1, precision="32-true", **params):
    return UFormLearner.C(
        random=Random.C(seed=3),
        model=UFormEncoder.C(depth=1, hidden=128, pooled=PooledHead.C(width=16), seed=3),
        trainer=UFormTrainer.C(sampler=BagSampler.C(source=Words.C()), batch_size=4, losses=[ContrastiveLoss.C()]),
        max_epochs=1,
        steps_per_epoch=STEPS,
        optimizers=adamw(CosineSchedule.C(learning_rate=1e-2), weight_decay=0.1),
        listeners=[],
        keep=100,
        fabric_config=FabricConfiguration.C(accelerator="cpu", devices=str(devices), precision=precision),
        **params,
    )


def checkpoint(folder, name, file="model"):
    return load_file(job(folder) / "checkpoints" / name / f"{file}.safetensors")


def unchanged(folder):
    first, last = checkpoint(folder, "step-00000000"), checkpoint(folder, "last")
    return {name for name in first if torch.equal(first[name], last[name])}


STILL = {
    "encoder.bytes.weight",
    "encoder.blocks.0.attention_norm.weight",
    "encoder.blocks.0.feed_forward_norm.weight",
    "pooling.bias",
}


def check(folder):
    """Frozen parameters kept every bit, weight decay notwithstanding, and the optimizers know nothing of them."""
    assert unchanged(folder) == STILL
    entries = checkpoint(folder, "last", "optimizer")
    trained = checkpoint(folder, "last").keys() - STILL
    assert len({name.rsplit("/", 1)[0] for name in entries}) == len(trained)
    line = list(read_telemetry(job(folder)))[-1]
    sizes = {name: tensor.numel() for name, tensor in checkpoint(folder, "last").items()}
    assert line["parameters"] == {
        "total": sum(sizes.values()),
        "trainable": sum(sizes[name] for name in trained),
        "frozen": {FROZEN[0]: 259 * 128, FROZEN[1]: 256, FROZEN[2]: 1},
    }


def test_frozen_parameters_keep_every_bit(execute, tmp_path):
    execute(config(frozen=FROZEN), tmp_path)
    check(tmp_path)


def test_an_interrupted_run_ends_the_same(execute, tmp_path):
    execute(config(frozen=FROZEN), tmp_path / "whole")
    execute(config(frozen=FROZEN, checkpoint_steps=1), tmp_path / "cut")
    checkpoints = job(tmp_path / "cut") / "checkpoints"
    for step in (3, 4):
        shutil.rmtree(checkpoints / f"step-{step:08d}")
    (checkpoints / "last").unlink()
    execute(config(frozen=FROZEN), tmp_path / "cut")
    for file in ("model", "optimizer"):
        cut, whole = (checkpoint(tmp_path / name, "last", file) for name in ("cut", "whole"))
        assert cut.keys() == whole.keys()
        assert all(torch.equal(cut[name], whole[name]) for name in whole)


def test_negative_control_without_freezing_they_move(execute, tmp_path):
    execute(config(), tmp_path)
    assert unchanged(tmp_path) == set()


def test_a_whole_optimizer_may_be_frozen(execute, tmp_path):
    """Every parameter that decays, so that the first optimizer has nothing to do."""
    execute(config(frozen=[r".*(input|output|projection|bytes)\.weight"]), tmp_path)
    assert {name for name in unchanged(tmp_path) if "norm" in name or "pooling.b" in name} == set()
    assert not any(name.startswith("0/") for name in checkpoint(tmp_path, "last", "optimizer"))


def test_a_pattern_that_matches_nothing_stops_the_task(execute, tmp_path):
    with pytest.raises(ValueError, match=r"frozen has 'encoder\.byte_embedding', which matches no parameter"):
        execute(config(frozen=["encoder.byte_embedding"]), tmp_path)


def test_two_ranks_freeze_alike(execute, tmp_path):
    params = {"precision": "64-true", "frozen": FROZEN}
    run_ranks(2, lambda rank, folder: run_here(config(devices=2, **params), folder), tmp_path / "two")
    check(tmp_path / "two")
    execute(config(**params), tmp_path / "one")
    two, one = checkpoint(tmp_path / "two", "last"), checkpoint(tmp_path / "one", "last")
    assert all(torch.allclose(two[name], one[name], rtol=0.0, atol=1e-10) for name in one)
