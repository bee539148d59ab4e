"""Memory predicted from a configuration, against what the real model, optimizer and batch take."""

import pytest
import torch
from experimaestro.launcherfinder.parser import parse
from xpm_torch import Random
from xpm_torch.configuration import FabricConfiguration
from xpm_torch.optim import DuplicateParameterFilter

from xpmir_uform import (
    BagSampler,
    ContrastiveLoss,
    CosineSchedule,
    ImageShape,
    PooledHead,
    UFormEncoder,
    UFormLearner,
    UFormTrainer,
    adamw,
)
from xpmir_uform.batching.batcher import UFormBatcher
from xpmir_uform.batching.footprint import Footprint, footprint, predict_memory, requirements_for
from xpmir_uform.batching.memory_probe import saved_bytes
from xpmir_uform.batching.shape import BatchShape
from xpmir_uform.data.decoding.segment import blank_text
from xpmir_uform.datasets import EmojiBags, EmojiCollection
from xpmir_uform.model.packing import pack
from xpmir_uform.model.precision import PRECISIONS, compute_in

BAG = (20, 16)


def learner(batcher=None, batch_size=24, **fabric):
    collection = EmojiCollection.C(
        sha256="0" * 64, emoji_version="2.16.0", openmoji_version="17.0.0", languages=["en", "fr"]
    )
    return UFormLearner.C(
        random=Random.C(seed=1),
        model=UFormEncoder.C(
            depth=2, hidden=128, pooled=PooledHead.C(width=48), image=ImageShape.C(patch_side=8, max_side=32)
        ),
        trainer=UFormTrainer.C(
            sampler=BagSampler.C(source=EmojiBags.C(collection=collection)),
            batch_size=batch_size,
            losses=[ContrastiveLoss.C()],
            **({"batcher": batcher} if batcher else {}),
        ),
        max_epochs=1,
        steps_per_epoch=1,
        optimizers=adamw(CosineSchedule.C(learning_rate=1e-3)),
        listeners=[],
        fabric_config=FabricConfiguration.C(**fabric),
    )


def real(config, lengths, precision=PRECISIONS["32-true"]):
    """The same numbers of a real model after a real optimizer step."""
    held, computed, autocast = precision
    model = config.model.instance()
    model.initialize()
    model.to(held)
    if computed and not autocast:
        compute_in(model, computed)

    def run():
        packed = pack([blank_text(length) for length in lengths])
        with torch.autocast("cpu", computed, enabled=autocast):
            outputs = model(packed)
        (outputs.embeddings.sum() + outputs.inverse_temperature.sum() + outputs.bias.sum()).backward()

    activations, state, taken = saved_bytes(run), 0, DuplicateParameterFilter()
    for made in config.optimizers:
        optimizer = made.instance().create_optimizer(model, taken, log=False)
        optimizer.step()
        state += sum(value.nbytes for entry in optimizer.state.values() for value in entry.values())
    parameters = list(model.parameters())
    return Footprint(
        weights=sum(p.nbytes for p in parameters),
        gradients=sum(p.grad.nbytes for p in parameters),
        optimizer=state,
        activations=activations,
    )


@pytest.mark.parametrize("precision", [name for name in PRECISIONS if name != "16-mixed"])
def test_the_whole_batch_is_predicted_within_twenty_percent(precision):
    config = learner(precision=precision)
    predicted, taken = footprint(config, BAG), real(config, BAG * 24, PRECISIONS[precision])
    assert predicted[:3] == taken[:3]
    assert predicted.activations == pytest.approx(taken.activations, rel=0.2)
    assert predict_memory(config, BAG) == pytest.approx(sum(taken), rel=0.2)


def test_a_batch_shape_makes_microbatches_smaller():
    config = learner(UFormBatcher.C(shape=BatchShape.C(bags=5)))
    assert footprint(config, BAG).activations == pytest.approx(real(config, BAG * 5).activations, rel=0.2)


def test_given_memory_bounds_the_activations():
    whole, memory = footprint(learner(), BAG).activations, 5_000_000
    bounded = footprint(learner(UFormBatcher.C(memory=memory)), BAG).activations
    assert whole > memory
    assert 0.85 * memory <= bounded <= memory


def test_several_devices_share_the_batch():
    whole = footprint(learner(), BAG).activations
    assert footprint(learner(devices="2", num_nodes=2), BAG).activations == pytest.approx(whole / 4, rel=0.01)


def test_a_configuration_is_left_as_it_was():
    config, before = learner(), learner().__xpm__.identifier.all
    predict_memory(config, BAG)
    config.trainer.batch_size = 12
    config.model.hidden = 256
    config.trainer.batch_size, config.model.hidden = 24, 128
    assert config.__xpm__.identifier.all == before


def test_bags_have_a_typical_size_unless_given():
    assert predict_memory(learner()) == predict_memory(learner(), (64, 16))
    short = learner(UFormBatcher.C(shape=BatchShape.C(columns=10)))
    assert predict_memory(short) == predict_memory(short, (10, 10))


def test_a_bag_that_the_shape_refuses_is_refused():
    with pytest.raises(ValueError, match="at most 10"):
        predict_memory(learner(UFormBatcher.C(shape=BatchShape.C(columns=10))), (11,))


def test_an_unknown_precision_is_refused():
    with pytest.raises(ValueError, match="transformer-engine"):
        predict_memory(learner(precision="transformer-engine"))


@pytest.mark.parametrize(
    ("fabric", "expected"),
    [
        ({}, "duration=10h & cuda(mem=2G)"),
        ({"devices": "3"}, "duration=10h & cuda(mem=2G) * 3"),
        ({"accelerator": "gpu", "devices": "0,1"}, "duration=10h & gpu(mem=2G) * 2"),
        ({"accelerator": "cpu", "devices": "2"}, "duration=10h & cpu(mem=3G)"),
    ],
)
def test_launchers_understand_the_requirements(fabric, expected):
    text = requirements_for(learner(**fabric), duration="10h", bag=BAG)
    assert text == expected
    (requirement,) = parse(text).requirements
    assert requirement.duration == 10 * 3600
    accelerators = requirement.accelerators
    assert [spec.memory for spec in accelerators] == [2 * 10**9] * (0 if "cpu" in text else len(accelerators))


def test_more_memory_is_asked_for_a_larger_batch():
    config = learner(UFormBatcher.C(memory_fraction=0.5), batch_size=4096)
    assert requirements_for(config, bag=BAG) == "duration=1h & cuda(mem=9G)"
