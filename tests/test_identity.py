"""Identifiers: frozen, moved by what changes the result and by nothing else."""

import inspect
import json
from pathlib import Path

import pytest
import torch
from configs import ABSTRACT, all_configs
from xpm_torch import Random
from xpm_torch.configuration import FabricConfiguration
from xpm_torch.optim import AdamW, ParameterOptimizer

from xpmir_uform import (
    AudioShape,
    Augmentation,
    BagSampler,
    BalancedForm,
    ByteHead,
    Checkpoint,
    ChoicesEvaluation,
    ChoicesLoss,
    ContrastiveLoss,
    CosineSchedule,
    ImageShape,
    LateInteractionLoss,
    LexicalEvaluation,
    MaskedLoss,
    Negatives,
    PatchHead,
    PooledHead,
    PooledRanker,
    RankedForm,
    RelevanceScoring,
    Reranker,
    RetrievalEvaluation,
    RetrievalValidation,
    SigmoidForm,
    TokenHead,
    UFormEncoder,
    UFormLearner,
    UFormTrainer,
    VideoShape,
    adamw,
)
from xpmir_uform.base.configuration import validate
from xpmir_uform.datasets import (
    EmojiBags,
    EmojiCollection,
    EmojiPairs,
    EmojiRetrieval,
    LanguageChoices,
    MultimodalBags,
    MultimodalEmoji,
    MultimodalRetrieval,
)
from xpmir_uform.learner.redundant_settings import FP32_PRECISION

FROZEN = Path(__file__).parent / "assets" / "identifiers.json"


def identifier(config) -> str:
    return config.__xpm__.identifier.all.hex()


def collection(**params):
    return EmojiCollection.C(
        sha256="0" * 64, emoji_version="2.16.0", openmoji_version="17.0.0", languages=["en", "fr"], **params
    )


def multimodal():
    return MultimodalEmoji.C(
        collection=collection(),
        speech_sha256="1" * 64,
        speech_version="0.2.4",
        video_version="18.1.0",
        voices=["en-us", "en-us+f2"],
        speeds=[175, 210],
    )


def encoder(**params):
    return UFormEncoder.C(**{"depth": 2, "hidden": 128, "pooled": PooledHead.C(width=64), **params})


def learner(*, trainer=None, loss=None, fabric=None, model=None, seed=1, **params):
    return UFormLearner.C(
        **{
            "random": Random.C(seed=seed),
            "model": model or encoder(),
            "trainer": UFormTrainer.C(
                **{
                    "sampler": BagSampler.C(source=EmojiBags.C(collection=collection())),
                    "batch_size": 96,
                    "losses": [loss or ContrastiveLoss.C()],
                    **(trainer or {}),
                }
            ),
            "max_epochs": 10,
            "steps_per_epoch": 70,
            "optimizers": adamw(CosineSchedule.C(learning_rate=2e-3)),
            "listeners": [],
            "fabric_config": FabricConfiguration.C(**(fabric or {})),
            **params,
        }
    )


CONFIGURATIONS = {
    "encoder": encoder,
    "encoder with images": lambda: encoder(image=ImageShape.C(patch_side=8, max_side=32), seed=3),
    "encoder with videos and sounds": lambda: encoder(
        video=VideoShape.C(patch_side=8, tube_frames=2, frame_stride=3, max_side=32, max_frames=16),
        audio=AudioShape.C(chunk_samples=400, sample_rate=16_000, max_seconds=10.0),
    ),
    "sampler that skips": lambda: BagSampler.C(source=EmojiBags.C(collection=collection()), on_bad_item="skip"),
    "balanced loss": lambda: ContrastiveLoss.C(form=BalancedForm.C(), matryoshka_dimensions=[16, 64]),
    "sigmoid loss across": lambda: ContrastiveLoss.C(negatives=Negatives.ACROSS, ambient_weight=0.5),
    "ranked loss": lambda: ContrastiveLoss.C(form=RankedForm.C(), weight=2.0),
    "masked loss": lambda: MaskedLoss.C(token_mask_probability=0.3, image_mask_ratio=0.0, weight=0.5),
    "choices loss": lambda: ChoicesLoss.C(weight=0.5),
    "late interaction": lambda: LateInteractionLoss.C(negatives=Negatives.AMBIENT, max_query_span=64, weight=0.5),
    "late interaction, sigmoid": lambda: LateInteractionLoss.C(form=SigmoidForm.C(), normalize=False, bias=-2.0),
    "schedule": lambda: CosineSchedule.C(learning_rate=1e-3, min_learning_rate=1e-5, warmup_steps=10, steps=100),
    "emoji retrieval": lambda: EmojiRetrieval.C(collection=collection(limit=40), direction="text-image"),
    "multimodal bags": lambda: MultimodalBags.C(emoji=multimodal(), size=2),
    "multimodal retrieval": lambda: MultimodalRetrieval.C(emoji=multimodal(), queries="audio", documents="video"),
    "learner": learner,
    "learner with validation": lambda: learner(
        listeners=[
            RetrievalValidation.C(
                id="v", retrieval=EmojiRetrieval.C(collection=collection(), direction="text-text"), interval=2
            )
        ]
    ),
    "learner with augmentation": lambda: learner(trainer={"augmentation": Augmentation.C(shift=3, noise=1.0)}),
    "evaluation": lambda: RetrievalEvaluation.C(
        model=encoder(), retrievals={"a": EmojiRetrieval.C(collection=collection(), direction="image-text")}
    ),
    "evaluation by words": lambda: LexicalEvaluation.C(
        retrievals={"a": EmojiRetrieval.C(collection=collection(), direction="text-text")}
    ),
    "evaluation of a reranker": lambda: RetrievalEvaluation.C(
        model=encoder(tokens=TokenHead.C(width=16)),
        retrievals={"a": EmojiRetrieval.C(collection=collection(), direction="text-text")},
        ranker=Reranker.C(first=20),
    ),
    "evaluation of choices": lambda: ChoicesEvaluation.C(
        model=encoder(bytes=ByteHead.C()), problems={"a": LanguageChoices.C(collection=collection())}
    ),
    "scoring of relevance": lambda: RelevanceScoring.C(
        model=encoder(tokens=TokenHead.C(width=16)), collection=EmojiPairs.C(collection=collection())
    ),
}


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_identifiers_are_frozen(name):
    """A change here orphans published results: give a changed meaning a Constant version instead."""
    assert identifier(CONFIGURATIONS[name]()) == json.loads(FROZEN.read_text())[name]


def test_every_frozen_identifier_is_tested():
    assert json.loads(FROZEN.read_text()).keys() == CONFIGURATIONS.keys()


META = {
    "workers": {"trainer": {"num_workers": 5}},
    "devices": {"fabric": {"devices": "4"}},
    "strategy": {"fabric": {"strategy": "ddp"}},
    "accelerator": {"fabric": {"accelerator": "cpu"}},
    "checkpoints": {"checkpoint_interval": 3, "checkpoint_steps": 7, "keep": 5},
    "leaving": {"force_resume": "why not", "time_margin": 1.0, "rank_timeout": 5.0},
    "back end": {"loss": lambda: ContrastiveLoss.C(backend="reference")},
    "the default form, given": {"loss": lambda: ContrastiveLoss.C(form=SigmoidForm.C())},
}

PARAM = {
    "seed": {"seed": 2},
    "width": {"model": lambda: encoder(hidden=256)},
    "initial weights": {"model": lambda: encoder(seed=9)},
    "form": {"loss": lambda: ContrastiveLoss.C(form=RankedForm.C())},
    "batch size": {"trainer": {"batch_size": 95}},
    "precision": {"fabric": {"precision": "bf16-mixed"}},
    "epochs": {"max_epochs": 11},
    "beginning": {"resume_from": lambda: Checkpoint.C(path=Path("/tmp"), sha256="0" * 64)},
}


def made(params):
    return learner(**{name: value() if callable(value) else value for name, value in params.items()})


@pytest.mark.parametrize("name", META)
def test_what_does_not_change_the_result_does_not_change_the_identifier(name):
    assert identifier(made(META[name])) == identifier(learner())


def test_every_default_may_be_given():
    """The identifier of a class with all of its defaults given is that with none."""
    tried = 0
    for cls in all_configs():
        arguments = cls.__getxpmtype__().arguments
        given = {name: argument.default for name, argument in arguments.items() if may_be_given(argument)}
        needed = any(argument.required and not argument.generator for argument in arguments.values())
        if given and not needed and not inspect.isabstract(cls) and cls.__name__ not in ABSTRACT:
            assert identifier(cls.C(**given)) == identifier(cls.C()), cls
            tried += 1
    assert tried > 5


def may_be_given(argument):
    return argument.default is not None and not (argument.generator or argument.ignored or argument.constant)


def test_the_ranker_that_is_meant_may_be_given():
    retrievals = {"a": EmojiRetrieval.C(collection=collection(), direction="image-text")}
    given = RetrievalEvaluation.C(model=encoder(), retrievals=retrievals, ranker=PooledRanker.C())
    assert identifier(given) == identifier(RetrievalEvaluation.C(model=encoder(), retrievals=retrievals))


def test_numbers_are_of_the_type_of_their_field():
    assert identifier(MaskedLoss.C(token_mean_span=3)) == identifier(MaskedLoss.C(token_mean_span=3.0))
    assert identifier(CosineSchedule.C(learning_rate=1)) == identifier(CosineSchedule.C(learning_rate=1.0))


def seeing(**params):
    return encoder(image=ImageShape.C(patch_side=8, max_side=32), **params)


def teller():
    """A model that learns from MaskedLoss."""
    return seeing(bytes=ByteHead.C(), patches=PatchHead.C())


REDUNDANT = {
    "the length of the training": {"optimizers": lambda: adamw(CosineSchedule.C(learning_rate=2e-3, steps=700))},
    "a rate that is replaced": {
        "optimizers": lambda: [
            ParameterOptimizer.C(optimizer=AdamW.C(lr=0.5), scheduler=CosineSchedule.C(learning_rate=2e-3))
        ]
    },
    "float32 precision": {"fabric": {"torch_fp32_precision": "high"}},
    "float32 precision of halves": {"fabric": {"precision": "bf16-mixed", "torch_fp32_precision": "medium"}},
    "no augmentation": {"trainer": {"augmentation": Augmentation.C(shift=0)}},
    "the whole width": {"loss": lambda: ContrastiveLoss.C(matryoshka_dimensions=[64])},
    "no ambient cells": {"loss": lambda: ContrastiveLoss.C(negatives=Negatives.NAMED, ambient_weight=0.5)},
    "ambient cells of no weight": {"loss": lambda: ContrastiveLoss.C(ambient_weight=0.0)},
    "ambient cells across of no weight": {
        "loss": lambda: ContrastiveLoss.C(negatives=Negatives.ACROSS, ambient_weight=0.0)
    },
    "a bias of differences": {
        "loss": lambda: LateInteractionLoss.C(bias=-2.0),
        "model": lambda: encoder(tokens=TokenHead.C(width=16)),
    },
    "spans of nothing": {"loss": lambda: MaskedLoss.C(token_mask_probability=0, token_mean_span=3.0), "model": teller},
    "weights of nothing": {"loss": lambda: MaskedLoss.C(token_mask_probability=0, text_weight=0.5), "model": teller},
    "weights of unmasked pictures": {
        "loss": lambda: MaskedLoss.C(image_mask_ratio=0, image_weight=3.0),
        "model": teller,
    },
    "masked sounds of a model that reads none": {"loss": lambda: MaskedLoss.C(audio_mask_ratio=0.5), "model": teller},
    "weights of videos of a model that reads none": {"loss": lambda: MaskedLoss.C(video_weight=0), "model": teller},
    "moved pictures of a model that reads none": {"trainer": {"augmentation": Augmentation.C(shift=1, drop=0.1)}},
    "hiss of a model that reads no sound": {
        "trainer": {"augmentation": Augmentation.C(hiss=0.1, noise=1.0)},
        "model": seeing,
    },
    "no value": {"loss": lambda: MaskedLoss.C(token_mean_span=None)},
}


def legal(config):
    """It, with as many names as there are languages."""
    config.trainer.sampler.source.others = 1
    return config


@pytest.mark.parametrize("name", REDUNDANT)
def test_what_repeats_a_default_that_depends_on_other_fields_is_refused(name):
    """The same training would have two identifiers."""
    with pytest.raises(ValueError, match="leave it out"):
        validate(legal(made(REDUNDANT[name])))


def test_models_that_repeat_the_learners_are_refused():
    twice = legal(learner())
    twice.trainer.model = twice.model
    with pytest.raises(ValueError, match=r"the trainer's model is given, .*: leave it out"):
        validate(twice)
    twice = legal(learner())
    twice.optimizers[1].module = twice.model
    with pytest.raises(ValueError, match=r"an optimizer's module is given, .*: leave it out"):
        validate(twice)


ACCEPTED = {
    "another length": {"optimizers": lambda: adamw(CosineSchedule.C(learning_rate=2e-3, steps=701))},
    "another precision": {"fabric": {"torch_fp32_precision": "highest"}},
    "high in halves": {"fabric": {"precision": "bf16-mixed", "torch_fp32_precision": "high"}},
    "some augmentation": {"trainer": {"augmentation": Augmentation.C(drop=0.1)}},
    "moved pictures": {"trainer": {"augmentation": Augmentation.C(shift=1)}, "model": seeing},
    "masked pictures": {"loss": lambda: MaskedLoss.C(image_mask_ratio=0.5, image_weight=3.0), "model": teller},
    "a bias": {
        "loss": lambda: LateInteractionLoss.C(form=SigmoidForm.C(), bias=-2.0),
        "model": lambda: encoder(tokens=TokenHead.C(width=16)),
    },
    "levels": {"loss": lambda: ContrastiveLoss.C(matryoshka_dimensions=[16, 64])},
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_what_differs_from_a_default_is_another_task(name):
    validate(legal(made(ACCEPTED[name])))
    assert identifier(made(ACCEPTED[name])) != identifier(learner())


def test_what_xpm_torch_takes_an_absent_float32_precision_for():
    before = torch.get_float32_matmul_precision()
    try:
        for precision in ("32-true", "64-true", "bf16-true", "bf16-mixed", "16-mixed"):
            fabric = FabricConfiguration.C(precision=precision, accelerator="cpu", devices="1").instance()
            fabric.get_fabric()
            assert fabric.torch_fp32_precision == FP32_PRECISION.get(precision, "high")
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("name", PARAM)
def test_what_changes_the_result_changes_the_identifier(name):
    assert identifier(made(PARAM[name])) != identifier(learner())


TABLE = (Path(__file__).parents[1] / "docs" / "identity.md").read_text()


@pytest.mark.parametrize("cls", all_configs(), ids=lambda cls: cls.__name__)
def test_every_field_has_its_reason_in_the_table(cls):
    if cls.__name__ in ABSTRACT:
        return
    rows = [line for line in TABLE.splitlines() if f"`{cls.__name__}" in line]
    own = [name for name in inspect.get_annotations(cls) if name in cls.__getxpmtype__().arguments]
    for name in own:
        argument = cls.__getxpmtype__().arguments[name]
        kind = "Meta" if argument.ignored else "Param"
        found = any(f"{cls.__name__}.*`" in row or f".{name}`" in row or f"`{name}`" in row for row in rows)
        assert argument.generator or found, f"{cls.__name__}.{name} is not in docs/identity.md"
        assert argument.generator or any(f"`{kind}`" in row for row in rows), f"{cls.__name__}.{name} is a {kind}"


@pytest.mark.parametrize("cls", all_configs(), ids=lambda cls: cls.__name__)
def test_every_configuration_pins_its_identifier_and_documents_its_fields(cls):
    assert cls.__dict__.get("__xpmid__", "").startswith("uform."), f"{cls} pins no __xpmid__"
    assert cls.__doc__
    own = {name for name in inspect.get_annotations(cls) if name in cls.__getxpmtype__().arguments}
    undocumented = [name for name in own if not cls.__getxpmtype__().arguments[name].help]
    assert not undocumented, f"{cls.__name__} has undocumented fields: {undocumented}"
