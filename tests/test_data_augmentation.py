"""Augmentation: keyed, mild, and nothing when it is off."""

import io
import wave

import numpy as np
import pytest
from PIL import Image

from xpmir_uform import AudioShape, Augmentation, Bag, BagSampler, BagSource, ImageShape, Item, Modality, VideoShape
from xpmir_uform.base.configuration import validate
from xpmir_uform.base.keyed_random import Purpose, generator
from xpmir_uform.data.decoding.audio import GAIN
from xpmir_uform.data.decoding.augmentation import delayed, shifted, thinned
from xpmir_uform.data.decoding.registry import decode
from xpmir_uform.trainer.loader import StepDataset

SHAPE = {Modality.IMAGE: ImageShape.C(patch_side=4, max_side=8).instance()}


@pytest.fixture(scope="module")
def picture():
    pixels = np.arange(8 * 8 * 3, dtype=np.uint8).reshape(8, 8, 3)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return Item(Modality.IMAGE, file.getvalue(), 7)


def augmented(item, step=0, seed=1, **params):
    return Augmentation.C(**params).instance().decode(item, SHAPE, seed, step)


def same(one, other):
    return one.grid == other.grid and np.array_equal(one.values, other.values)


def test_off_is_plain_decoding(picture):
    for item in (picture, Item.text("some words")):
        assert same(augmented(item), decode(item, SHAPE))


@pytest.mark.parametrize("params", [{"shift": 2}, {"noise": 3.0}, {"drop": 0.3}])
def test_draws_are_keyed_by_seed_step_and_item(picture, params):
    item = Item.text("a rather long text, of which some bytes go") if "drop" in params else picture
    assert same(augmented(item, **params), augmented(item, **params))
    others = [augmented(item, step=step, **params) for step in range(1, 8)] + [augmented(item, seed=2, **params)]
    assert not all(same(augmented(item, **params), other) for other in others)


class Sentence(BagSource):
    """One text."""

    __xpmid__ = "test.augmented-sentence"

    def __len__(self):
        return 1

    def bag(self, index, seed, epoch):
        return Bag((Item.text("a rather long text, of which some bytes go"),))


def test_a_training_step_augments_by_its_own_number():
    sampler = BagSampler.C(source=Sentence.C()).instance()
    sampler.initialize(np.random.RandomState(0))
    augmentation = Augmentation.C(drop=0.3).instance()
    steps = StepDataset(sampler, 1, {}, augmentation=augmentation)
    for number in (0, 1, 2):
        (found,) = steps[number].segments
        assert same(found, augmentation.decode(steps[number].batch.item(0), {}, sampler.seed, number))
    assert not same(steps[0].segments[0], steps[1].segments[0])


def test_a_picture_moves_and_its_border_is_repeated():
    picture = np.arange(9).reshape(3, 3, 1)
    assert shifted(picture, 1, 0)[..., 0].tolist() == [[0, 1, 2], [0, 1, 2], [3, 4, 5]]
    assert shifted(picture, 0, -1)[..., 0].tolist() == [[1, 2, 2], [4, 5, 5], [7, 8, 8]]
    assert shifted(picture, 0, 0) is not picture


def test_noise_has_the_stated_deviation(picture):
    plain = augmented(picture)
    errors = np.concatenate([augmented(picture, step=step, noise=5.0).values - plain.values for step in range(50)])
    # Values are grey levels / 127.5 - 1.
    assert abs(errors.std() * 127.5 - 5.0) < 0.2
    assert abs(errors.mean() * 127.5) < 0.2


def test_a_sound_is_delayed_by_up_to_the_stated_time():
    sound = np.arange(1, 6, dtype=np.float32)
    drawn = [delayed(sound, 3, generator(0, Purpose.AUGMENTATION, key=key)) for key in range(100)]
    assert {len(one) - len(sound) for one in drawn} == {0, 1, 2, 3}
    for one in drawn:
        assert one.dtype == np.float32
        np.testing.assert_array_equal(one, np.concatenate([np.zeros(len(one) - len(sound)), sound]))


def test_delays_are_keyed_and_in_seconds():
    shapes = {Modality.AUDIO: AudioShape.C(chunk_samples=10, sample_rate=1000, max_seconds=1.0).instance()}
    file = io.BytesIO()
    with wave.open(file, "wb") as output:
        output.setparams((1, 2, 1000, 0, "NONE", ""))
        output.writeframes(np.full(100, 2**14, "<i2").tobytes())
    item = Item(Modality.AUDIO, file.getvalue(), 7)
    augmentation = Augmentation.C(delay=0.05).instance()

    def silence(step):
        return int(np.argmax(augmentation.decode(item, shapes, 1, step).values.ravel() != 0))

    silences = [silence(step) for step in range(99)]
    assert silences == [silence(step) for step in range(99)]
    assert 45 <= max(silences) <= 50
    assert min(silences) <= 5


def test_a_delayed_sound_is_no_longer_than_its_shape(media):
    item = Item(Modality.AUDIO, media.sound(np.full((95, 1), 0.5), 1000), 7)
    shapes = {Modality.AUDIO: AudioShape.C(chunk_samples=10, sample_rate=1000, max_seconds=0.1).instance()}
    tokens = [Augmentation.C(delay=1.0).instance().decode(item, shapes, 1, step).tokens for step in range(50)]
    assert set(tokens) == {shapes[Modality.AUDIO].most_tokens}


def test_hiss_has_the_stated_deviation(media):
    item = Item(Modality.AUDIO, media.sound(np.zeros((8000, 1)), 16_000), 7)
    shapes = {Modality.AUDIO: AudioShape.C(chunk_samples=100, sample_rate=16_000, max_seconds=1.0).instance()}
    values = Augmentation.C(hiss=0.1).instance().decode(item, shapes, 1, 0).values
    assert abs((values / GAIN).std() - 0.1) < 0.005


def test_all_frames_of_a_video_move_alike(media):
    frames = np.random.default_rng(0).integers(0, 256, (4, 8, 8, 3), np.uint8)
    item = Item(Modality.VIDEO, media.video(frames), 7)
    shape = VideoShape.C(patch_side=8, tube_frames=1, max_side=8, max_frames=4).instance()
    segment = Augmentation.C(shift=2).instance().decode(item, {Modality.VIDEO: shape}, 1, 3)
    moved = np.rint((segment.values.reshape(4, 8, 8, 3) + 1) * 127.5)
    moves = [(down, right) for down in range(-2, 3) for right in range(-2, 3)]
    assert sum(np.array_equal(moved, shifted(frames, *move)) for move in moves) == 1
    assert not np.array_equal(moved, frames)


def test_bytes_are_dropped_with_the_stated_probability():
    text = decode(Item.text("x" * 400), {})
    kept = [thinned(text, 0.2, generator(0, Purpose.AUGMENTATION, key=key)).tokens for key in range(100)]
    assert abs(np.mean(kept) / 400 - 0.8) < 0.01


@pytest.mark.parametrize("text", ["", "a", "\N{GRINNING FACE}"])
def test_a_text_keeps_at_least_one_token(text):
    for step in range(50):
        segment = augmented(Item.text(text), step=step, drop=0.99)
        assert segment.tokens >= 1
        assert segment.grid == (1, 1, segment.tokens)


@pytest.mark.parametrize(
    "params", [{"shift": -1}, {"noise": -1.0}, {"hiss": -1.0}, {"delay": -1.0}, {"drop": 1.0}, {"drop": -0.1}]
)
def test_impossible_settings_are_refused(params):
    with pytest.raises(ValueError, match=f"^{next(iter(params))} is .*, expected (at least 0|in )"):
        validate(Augmentation.C(**params))
