"""Freezing: what a pattern names stays as it is, bit for bit, without a number in the optimizer."""

import pytest
import torch
from torch import nn

from xpmir_uform.learner.freezing import count_parameters, freeze


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
    assert count_parameters(model) == (26, 26 - sum(counts.values()))


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
