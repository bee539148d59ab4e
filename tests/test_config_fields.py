"""Every field of every public configuration: a bad value is refused before submission, in one line that names it."""

import inspect
import math
from pathlib import Path

import pytest
import xpm_torch.optim as optim
from experimaestro import Config
from xpm_torch import Random
from xpm_torch.configuration import FabricConfiguration
from xpm_torch.schedulers import LinearWithWarmup

import xpmir_uform as uform
from xpmir_uform import datasets
from xpmir_uform.base.configuration import validate
from xpmir_uform.learner.upstream_settings import FOREIGN

SOURCE = datasets.EmojiCollection.C(
    sha256="0" * 64, emoji_version="2.16.0", openmoji_version="17.0.0", languages=["en", "fr", "de"]
)
PAIRS = datasets.PackagePairs.C(sha256="0" * 64, path=Path("packages"))
JUDGEMENTS = {"collection": PAIRS, "path": Path("judgements"), "sha256": "0" * 64}
EMOJI = {
    "collection": SOURCE,
    "speech_sha256": "1" * 64,
    "speech_version": "0.2.4",
    "video_version": "18.1.0",
    "voices": ["en-us"],
    "speeds": [175],
}
MODEL = {"depth": 1, "hidden": 128, "pooled": uform.PooledHead.C(width=16)}
LEARNER = {
    "random": Random.C(),
    "model": uform.UFormEncoder.C(**MODEL),
    "trainer": uform.UFormTrainer.C(
        sampler=uform.BagSampler.C(source=datasets.EmojiBags.C(collection=SOURCE)), losses=[uform.ContrastiveLoss.C()]
    ),
    "max_epochs": 2,
    "steps_per_epoch": 5,
    "optimizers": uform.adamw(uform.CosineSchedule.C(learning_rate=1e-3)),
    "listeners": [],
    "fabric_config": FabricConfiguration.C(),
}

GIVEN = {
    "BagSampler": {"source": datasets.EmojiBags.C(collection=SOURCE)},
    "Checkpoint": {"path": Path("job"), "sha256": "0" * 64},
    "ChoicesEvaluation": {"model": uform.UFormEncoder.C(**MODEL), "problems": {}},
    "CosineSchedule": {"learning_rate": 1e-3},
    "EmojiBags": {"collection": SOURCE},
    "EmojiCollection": {
        "sha256": "0" * 64, "emoji_version": "2.16.0", "openmoji_version": "17.0.0", "languages": ["en", "fr"]
    },
    "EmojiRetrieval": {"collection": SOURCE, "direction": "text-text"},
    "ImageShape": {"patch_side": 8, "max_side": 32},
    "VideoShape": {"patch_side": 8, "tube_frames": 2, "max_side": 32, "max_frames": 4},
    "AudioShape": {"chunk_samples": 400, "sample_rate": 16_000, "max_seconds": 1.0},
    "LexicalEvaluation": {"retrievals": {}},
    "MultimodalBags": {"emoji": datasets.MultimodalEmoji.C(**EMOJI)},
    "MultimodalEmoji": EMOJI,
    "MultimodalRetrieval": {"emoji": datasets.MultimodalEmoji.C(**EMOJI), "queries": "text", "documents": "image"},
    "PackagePairs": {"sha256": "0" * 64, "path": Path("packages")},
    "PairRetrieval": {"collection": PAIRS},
    "RelevanceBags": {"judgements": datasets.Judgements.C(**JUDGEMENTS)},
    "RelevanceChoices": {"collection": PAIRS},
    "PairBags": {"collection": PAIRS},
    "EmojiPairs": {"collection": SOURCE},
    "LanguageBags": {"collection": SOURCE},
    "LanguageChoices": {"collection": SOURCE},
    "RelevanceScoring": {"model": uform.UFormEncoder.C(**MODEL), "collection": PAIRS},
    "RetrievalEvaluation": {"model": uform.UFormEncoder.C(**MODEL), "retrievals": {}},
    "RetrievalValidation": {
        "id": "v", "retrieval": datasets.EmojiRetrieval.C(collection=SOURCE, direction="text-text")
    },
    "UFormEncoder": MODEL,
    "UFormLearner": LEARNER,
    "UFormTrainer": {"sampler": uform.BagSampler.C(source=datasets.EmojiBags.C(collection=SOURCE)),
                     "losses": [uform.ContrastiveLoss.C()]},
    "RegexParameterFilter": {"includes": ["a"]},
    "GradientClippingHook": {"max_norm": 1.0},
    "LinearWithWarmup": {"num_warmup_steps": 2},
    "LinearWithWarmupAndMaxEpochs": {"num_warmup_steps": 2},
    "CosineWithWarmup": {"num_warmup_steps": 2},
    "Judgements": JUDGEMENTS,
}  # fmt: skip
"""What a configuration needs to be legal"""

BAD = {"int": [-1, -(2**40), 2**63], "float": [math.nan, math.inf, -math.inf], "str": ["bogus"]}
"""By type; a field that takes one of these has its own below"""

OWN = {
    ("Random", "seed"): [-1, 2**40],
    ("UFormEncoder", "seed"): [-1, 2**64],
    ("UFormLearner", "frozen"): [["("]],
    ("RegexParameterFilter", "includes"): [["("], []],
    ("RegexParameterFilter", "excludes"): [["("]],
    ("EmojiCollection", "languages"): [[], ["en", "en"]],
    ("ContrastiveLoss", "matryoshka_dimensions"): [[0], [8, 8]],
    ("Alerts", "fail_on_alert"): [["bogus"]],
    ("MultimodalEmoji", "voices"): [[]],
    ("MultimodalEmoji", "speeds"): [[], [0]],
    ("UFormBatcher", "probes"): [[[]], [[0]]],
    ("PooledHead", "bias"): BAD["float"],
    ("CosineSchedule", "warmup_steps"): [-1],
}

FREE = {
    ("UFormLearner", "force_resume"): "any words",
    ("RetrievalValidation", "id"): "any name; two of one are refused by the learner",
    ("Checkpoint", "task"): "any name of a task; in place of a hash",
    ("FabricConfiguration", "precision"): "tested by itself: test_learner_precision.py",
    ("EmojiCollection", "emoji_version"): "compared with what is installed, by whoever runs it",
    ("EmojiCollection", "openmoji_version"): "the same",
    ("MultimodalEmoji", "speech_version"): "the same",
    ("MultimodalEmoji", "video_version"): "the same",
}
"""Fields that take every value of their type, and why"""


ABSTRACT = {"AdditiveLoss", "JointLoss"}
"""Exported to be subclassed"""


def public():
    named = {name: getattr(package, name) for package in (uform, datasets) for name in package.__all__}
    configs = {name: cls for name, cls in named.items() if inspect.isclass(cls) and issubclass(cls, Config)}
    ours = {name: cls for name, cls in configs.items() if name not in ABSTRACT}
    return {**ours, **{cls.__name__: cls for cls in FOREIGN}}


def fields():
    """(class, field, type) of every field that is given."""
    for name, cls in sorted(public().items()):
        for argument in cls.__getxpmtype__().arguments.values():
            if argument.generator is None and not argument.constant:
                yield name, argument.name, str(argument.type).removeprefix("Type(").removesuffix(")")


def made(name, **params):
    return public()[name].C(**{**GIVEN.get(name, {}), **params})


FIELDS = list(fields())


@pytest.mark.parametrize(("name", "field", "kind"), FIELDS, ids=[f"{name}.{field}" for name, field, _ in FIELDS])
def test_a_bad_value_is_refused_in_one_line_that_names_the_field(name, field, kind):
    if (name, field) in FREE or kind == "bool":
        # experimaestro takes the truth of whatever a bool is given.
        return
    validate(made(name))
    for value in OWN.get((name, field), BAD.get(kind, [object()])):
        with pytest.raises(ValueError, match=field) as refused:
            validate(made(name, **{field: value}))
        # What experimaestro says of a wrong type is longer, and names the field in its first line.
        assert "\n" not in str(refused.value) or field in str(refused.value).splitlines()[0]


def test_tables_speak_of_fields_that_there_are():
    known = {(name, field) for name, field, _ in FIELDS}
    assert {*OWN, *FREE} <= known
    assert {*GIVEN} <= {name for name, _ in known}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"optimizers": uform.adamw(uform.CosineSchedule.C(learning_rate=1.0, warmup_steps=10))}, "warmup_steps is 10"),
        (
            {"optimizers": uform.adamw(uform.CosineSchedule.C(learning_rate=1e-3, warmup_steps=70, steps=100))},
            "warmup_steps is 70, expected less than the 10 steps",
        ),
        ({"optimizers": uform.adamw(LinearWithWarmup.C(num_warmup_steps=11))}, "num_warmup_steps is 11"),
        ({"random": Random.C(seed=2**40)}, "seed is 1099511627776"),
        ({"fabric_config": FabricConfiguration.C(torch_fp32_precision="bogus")}, "torch_fp32_precision is 'bogus'"),
        ({"model": uform.UFormEncoder.C(**{**MODEL, "seed": -1})}, "seed is -1"),
        ({"optimizers": [optim.ParameterOptimizer.C(optimizer=optim.AdamW.C(eps=-1.0))]}, "eps is -1.0"),
        ({"hooks": [optim.GradientClippingHook.C(max_norm=0.0)]}, "max_norm is 0.0"),
        (
            {"trainer": uform.UFormTrainer.C(
                sampler=LEARNER["trainer"].sampler, losses=[uform.ContrastiveLoss.C(matryoshka_dimensions=[8, 17])]
            )},
            r"matryoshka_dimensions is \[8, 17\], expected at most the width of the pooled head, 16",
        ),
    ],
)  # fmt: skip
def test_a_learner_is_refused_for_what_would_fail_in_its_job(change, words):
    validate(made("UFormLearner"))
    with pytest.raises(ValueError, match=words):
        validate(made("UFormLearner", **change))
