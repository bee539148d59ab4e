"""Unreadable items in training: the run stops and names one, or goes on without them and everything else as it was."""

import wave
from io import BytesIO

import numpy as np
import pytest
import torch
from PIL import Image
from xpm_torch import Random
from xpm_torch.configuration import FabricConfiguration

from xpmir_uform import (
    AudioShape,
    Bag,
    BagSampler,
    BagSource,
    ContrastiveLoss,
    CosineSchedule,
    ImageShape,
    Item,
    Modality,
    PooledHead,
    UFormEncoder,
    UFormLearner,
    UFormTrainer,
    adamw,
)
from xpmir_uform.base.configuration import validate
from xpmir_uform.data.decoding.registry import UnreadableItem
from xpmir_uform.reports.curves import read_scalars
from xpmir_uform.trainer.loader import StepDataset, iterate_steps

COUNT, BATCH = 12, 4
BAD_PICTURES, BAD_SOUNDS = {3, 7}, {7, 8}
SHAPES = {
    "image": ImageShape.C(patch_side=4, max_side=8),
    "audio": AudioShape.C(chunk_samples=100, sample_rate=8_000, max_seconds=1.0),
}


def picture(index):
    file = BytesIO()
    Image.new("RGB", (8, 8), (20 * index, 0, 0)).save(file, "JPEG")
    content = file.getvalue()
    return content[: len(content) // 2] if index in BAD_PICTURES else content


def sound(index):
    file = BytesIO()
    with wave.open(file, "wb") as output:
        output.setnchannels(1)
        output.setsampwidth(2)
        output.setframerate(8_000)
        output.writeframes(np.full(200, 100 * index, np.int16).tobytes())
    return file.getvalue()[:10] if index in BAD_SOUNDS else file.getvalue()


class Files(BagSource):
    """A name, a picture and a sound; 3 has no picture that can be read, 8 no sound, 7 neither."""

    __xpmid__ = "test.files"

    def __len__(self):
        return COUNT

    def bag(self, index, seed, epoch):
        return Bag.alike(
            [
                Item.text(f"name {index}", 100 + index),
                Item(Modality.IMAGE, picture(index), 200 + index),
                Item(Modality.AUDIO, sound(index), 300 + index),
            ]
        )


BAD = {*(200 + index for index in BAD_PICTURES), *(300 + index for index in BAD_SOUNDS)}
GONE = {*BAD, 107}
"""The name of 7 has no partner left."""


def sampler(**params):
    made = BagSampler.C(source=Files.C(), **params).instance()
    made.initialize(np.random.RandomState(0))
    return made


def dataset(rank=0, ranks=1, **params):
    shapes = {Modality[name.upper()]: shape.instance() for name, shape in SHAPES.items()}
    return StepDataset(sampler(**params), BATCH, shapes, rank=rank, ranks=ranks)


def keys(step):
    return step.batch.keys.tolist()


def epoch(data):
    return [data[number] for number in range(COUNT // BATCH)]


def test_one_unreadable_item_stops_the_run_by_its_key():
    with pytest.raises(UnreadableItem) as caught:
        epoch(dataset())
    assert caught.value.key in BAD
    loader = iterate_steps(dataset(), 0, 1)
    with pytest.raises(UnreadableItem, match=f"item {caught.value.key:#018x}"):
        [next(loader) for _ in range(COUNT // BATCH)]


def test_skipping_leaves_every_other_item_in_its_place():
    wanted = [item.key for step in range(COUNT // BATCH) for bag in sampler().bags(step, BATCH) for item in bag.items]
    steps = epoch(dataset(on_bad_item="skip"))
    assert [key for step in steps for key in keys(step)] == [key for key in wanted if key not in GONE]
    assert len(set(wanted)) == 3 * COUNT
    assert sum(len(step.unreadable) for step in steps) == len(BAD)
    for key in BAD:
        assert sum(f"item {key:#018x}" in message for step in steps for message in step.unreadable) == 1


def test_what_is_left_of_a_bag_still_attracts():
    for step in epoch(dataset(on_bad_item="skip")):
        attract = step.batch.attract
        for anchor, key in enumerate(keys(step)):
            others = attract.ids[attract.offsets[anchor] : attract.offsets[anchor + 1]].tolist()
            partners = {100 + key % 100, 200 + key % 100, 300 + key % 100} - {key} - GONE
            assert {keys(step)[other] for other in others} == partners


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_change_nothing(workers):
    loader = iterate_steps(dataset(on_bad_item="skip"), 0, workers)
    for step in epoch(dataset(on_bad_item="skip")):
        other = next(loader)
        assert keys(step) == keys(other)
        assert step.unreadable == other.unreadable
        assert all(np.array_equal(a.values, b.values) for a, b in zip(step.segments, other.segments, strict=True))


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_agree_about_the_batch(ranks):
    single = epoch(dataset(on_bad_item="skip"))
    parts = [epoch(dataset(rank, ranks, on_bad_item="skip")) for rank in range(ranks)]
    for number, step in enumerate(single):
        seen = [part[number] for part in parts]
        assert all(keys(one) == keys(seen[0]) and one.unreadable == step.unreadable for one in seen)
        assert sorted(keys(seen[0])) == sorted(keys(step))
        assert sum(len(one.segments) for one in seen) == len(step.batch)


class Broken(BagSource):
    """Texts that are none."""

    __xpmid__ = "test.broken"

    def __len__(self):
        return 2

    def bag(self, index, seed, epoch):
        return Bag((Item(Modality.TEXT, b"\xff", index),))


def test_a_step_of_which_nothing_is_left_is_an_error():
    broken = BagSampler.C(source=Broken.C(), on_bad_item="skip").instance()
    broken.initialize(np.random.RandomState(0))
    with pytest.raises(ValueError, match=r"no bag of step 0 is left.*item 0x"):
        StepDataset(broken, 2, {})[0]


def learner(**params):
    return UFormLearner.C(
        random=Random.C(seed=1),
        model=UFormEncoder.C(depth=1, hidden=128, pooled=PooledHead.C(width=16), **SHAPES),
        trainer=UFormTrainer.C(
            sampler=BagSampler.C(source=Files.C(), **params), batch_size=BATCH, losses=[ContrastiveLoss.C()]
        ),
        max_epochs=1,
        steps_per_epoch=COUNT // BATCH,
        optimizers=adamw(CosineSchedule.C(learning_rate=1e-3)),
        listeners=[],
        fabric_config=FabricConfiguration.C(),
    )


def test_training_goes_on_and_counts(execute, tmp_path, caplog):
    with caplog.at_level("WARNING"):
        task = execute(learner(on_bad_item="skip"), tmp_path)
    warned = [record.getMessage() for record in caplog.records if "goes on without an item" in record.getMessage()]
    assert len(warned) == len(BAD)
    assert all(torch.isfinite(parameter).all() for parameter in task.model.parameters())
    folder = tmp_path / "workspace" / "jobs" / "task" / "job" / "runs"
    steps, values = read_scalars(folder, "train/unreadable_items")
    assert steps == [COUNT // BATCH]
    assert values == pytest.approx([len(BAD) / (COUNT // BATCH)])


def test_training_stops_by_name(execute, tmp_path):
    with pytest.raises(UnreadableItem, match="item 0x"):
        execute(learner(), tmp_path)


def test_the_choice_is_part_of_the_identifier_and_checked():
    plain, failing, skipping = (learner(**params) for params in ({}, {"on_bad_item": "fail"}, {"on_bad_item": "skip"}))
    identifiers = [config.__xpm__.identifier.all for config in (plain, failing, skipping)]
    assert identifiers[0] == identifiers[1] != identifiers[2]
    with pytest.raises(ValueError, match="on_bad_item is 'next', expected one of fail, skip"):
        validate(learner(on_bad_item="next"))
