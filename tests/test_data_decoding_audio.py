"""Sound files to chunks: conformance by files of other tools and by hand, rates, lengths, and what is refused."""

import errno
import io
import struct
import wave
from contextlib import suppress

import av
import numpy as np
import pytest
import soundfile
from hypothesis import given, settings
from hypothesis import strategies as st

from xpmir_uform.data.decoding import audio
from xpmir_uform.data.decoding.audio import GAIN, chunks, open_audio, resampled
from xpmir_uform.data.decoding.registry import UnreadableItem, decode
from xpmir_uform.data.decoding.shapes import AudioShape
from xpmir_uform.data.items import Item
from xpmir_uform.data.vocabulary import Modality

KEY = 0xC0FFEE
RATE = 16_000


def shape_of(**params):
    return AudioShape.C(**{"chunk_samples": 400, "sample_rate": RATE, "max_seconds": 5.0, **params}).instance()


def item_of(content):
    return Item(Modality.AUDIO, content, KEY)


def opened(content, **params):
    return open_audio(item_of(content), shape_of(**params))


def tone(frequency, seconds=1.0, rate=RATE):
    return 0.5 * np.sin(2 * np.pi * frequency * np.arange(round(seconds * rate)) / rate)


def riff(samples, rate=RATE, channels=1, bits=16, kind=1):
    """A WAV file by the wave module where it writes the kind (1: integers), else by hand (3: floats)."""
    if kind == 1:
        file = io.BytesIO()
        with wave.open(file, "wb") as output:
            output.setnchannels(channels)
            output.setsampwidth(bits // 8)
            output.setframerate(rate)
            output.writeframes(samples)
        return file.getvalue()
    block = channels * bits // 8
    form = struct.pack("<4sIHHIIHH", b"fmt ", 16, kind, channels, rate, rate * block, block, bits)
    body = b"WAVE" + form + struct.pack("<4sI", b"data", len(samples)) + samples
    return struct.pack("<4sI", b"RIFF", len(body)) + body


def written(samples, rate=RATE, **options):
    """A file by libsndfile."""
    file = io.BytesIO()
    soundfile.write(file, samples, rate, **options)
    return file.getvalue()


def refused(content, *, reason, **params):
    with pytest.raises(UnreadableItem, match=reason) as caught:
        decode(item_of(content), {Modality.AUDIO: shape_of(**params)})
    assert caught.value.key == KEY
    assert f"item {KEY:#018x} (audio, {len(content)} bytes)" in str(caught.value)


def test_chunks_by_hand():
    segment = chunks(np.array([0.0, 0.25, -0.5, 1.0, -1.0], np.float32), shape_of(chunk_samples=3))
    assert segment.modality is Modality.AUDIO
    assert segment.grid == (1, 1, 2)
    assert segment.values.dtype == np.float32
    assert segment.values.tolist() == [[0, 2, -4], [8, -8, 0]]


@pytest.mark.parametrize("dimensions", [(0,), (4, 2)])
def test_what_is_no_sound_is_refused(dimensions):
    with pytest.raises(ValueError, match=r"expected \(S,\)"):
        chunks(np.zeros(dimensions, np.float32), shape_of())


@pytest.mark.parametrize(
    ("bits", "samples", "expected"),
    [
        (8, bytes([0, 64, 128, 192, 255]), [-1, -0.5, 0, 0.5, 127 / 128]),
        (16, struct.pack("<5h", -32768, -16384, 0, 1, 32767), [-1, -0.5, 0, 2**-15, 1 - 2**-15]),
        (24, b"\0\0\x80" + b"\0\0\xc0" + b"\0\0\0" + b"\1\0\0" + b"\xff\xff\x7f", [-1, -0.5, 0, 2**-23, 1 - 2**-23]),
        (32, struct.pack("<4i", -(2**31), -(2**30), 0, 2**30), [-1, -0.5, 0, 0.5]),
    ],
)
def test_integer_samples_of_every_width(bits, samples, expected):
    values = opened(riff(samples, bits=bits))
    assert values.dtype == np.float32
    np.testing.assert_array_equal(values, np.array(expected, np.float32))


@pytest.mark.parametrize(("bits", "code"), [(32, "f"), (64, "d")])
def test_floating_point_samples_are_clipped(bits, code):
    values = opened(riff(struct.pack(f"<5{code}", -0.5, 0.25, 1.5, -3.0, 1e30), bits=bits, kind=3))
    assert values.tolist() == [-0.5, 0.25, 1, -1, 1]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_samples_that_are_no_numbers_are_refused(value):
    refused(riff(struct.pack("<2f", 0, value), bits=32, kind=3), reason="NaN or infinite")


@pytest.mark.parametrize("channels", [1, 2, 3, 6])
def test_channels_are_averaged(channels):
    values = np.random.default_rng(0).integers(-(2**15), 2**15, (50, channels), np.int16)
    mean = values.mean(axis=1) / 2**15
    np.testing.assert_allclose(opened(riff(values.tobytes(), channels=channels)), mean, atol=1e-7)


@pytest.mark.parametrize(
    ("name", "subtype"),
    [
        *(("WAV", "PCM_U8"), ("WAV", "PCM_16"), ("WAV", "PCM_24"), ("WAV", "PCM_32"), ("WAV", "FLOAT")),
        *(("WAV", "DOUBLE"), ("WAV", "ULAW"), ("WAV", "ALAW"), ("WAVEX", "PCM_16"), ("FLAC", "PCM_S8")),
        *(("FLAC", "PCM_16"), ("FLAC", "PCM_24"), ("AIFF", "PCM_16"), ("AU", "PCM_16"), ("CAF", "PCM_16")),
        *(("RF64", "PCM_16"), ("W64", "PCM_16")),
    ],
)
def test_lossless_files_read_as_libsndfile_reads_them(name, subtype):
    stereo = np.stack((tone(440, 0.1), tone(1000, 0.1)), axis=1)
    content = written(stereo, format=name, subtype=subtype)
    expected, _ = soundfile.read(io.BytesIO(content), always_2d=True)
    np.testing.assert_allclose(opened(content), expected.mean(axis=1), atol=1e-7)


@pytest.mark.parametrize(("name", "subtype"), [("OGG", "VORBIS"), ("OGG", "OPUS"), ("MP3", "MPEG_LAYER_III")])
def test_lossy_files_keep_length_and_sound(name, subtype):
    content = written(tone(440, 0.5), format=name, subtype=subtype)
    values = opened(content)
    assert len(values) == RATE // 2
    expected, _ = soundfile.read(io.BytesIO(content))
    np.testing.assert_allclose(values, expected, atol=1e-4)
    np.testing.assert_allclose(values[2000:-2000], tone(440, 0.5)[2000:-2000], atol=0.05)


@pytest.mark.parametrize(
    ("container", "codec", "rate"),
    [("ipod", "aac", RATE), ("adts", "aac", RATE), ("ipod", "alac", RATE), ("webm", "libopus", 48_000)],
)
def test_files_that_libsndfile_does_not_know(media, container, codec, rate):
    values = opened(media.sound(tone(440, 1.0, rate)[:, None], rate, container, codec))
    assert abs(len(values) - RATE) <= 2048
    spectrum = np.abs(np.fft.rfft(values))
    assert abs(np.argmax(spectrum) * RATE / len(values) - 440) < 2
    assert abs(values[2000:14000].std() - 0.5 / np.sqrt(2)) < 0.01


def test_eight_channels_in_planes(media):
    low = tone(50)  # the channel of low frequency effects carries nothing else
    values = opened(media.sound(np.repeat(low[:, None], 8, axis=1), RATE, "ipod", "aac"))
    np.testing.assert_allclose(values[2000:14000], low[2000:14000], atol=0.02)


def test_the_sound_track_of_a_video_is_a_sound(media):
    frames = np.zeros((10, 16, 16, 3), np.uint8)
    content = media.video(frames, "mp4", "mpeg4", "yuv420p", sound=1.0)
    assert abs(len(opened(content)) - RATE) <= 1024
    refused(media.video(frames, "mp4", "mpeg4", "yuv420p"), reason="no audio stream")


@pytest.mark.parametrize("rate", [8_000, 11_025, 22_050, 32_000, 44_100, 48_000, 96_000, 192_000])
def test_resampling_keeps_what_is_heard(rate):
    values = opened(written(tone(1_000, rate=rate), rate, format="WAV", subtype="FLOAT"))
    assert len(values) == RATE
    middle = slice(RATE // 10, -RATE // 10)
    np.testing.assert_allclose(values[middle], tone(1_000)[middle], atol=2e-3)


@pytest.mark.parametrize("frequency", [9_000, 12_000, 20_000])
def test_resampling_removes_what_would_fold(frequency):
    """At 16 kHz a tone above 8 kHz would come back as another one, of 16 kHz less its frequency."""
    values = opened(written(tone(frequency, rate=48_000), 48_000, format="WAV", subtype="FLOAT"))
    assert np.abs(values[1600:-1600]).max() < 1e-3


@given(st.integers(1, 5_000), st.integers(1_000, 400_000), st.integers(1_000, 48_000))
def test_length_after_resampling(count, rate, new_rate):
    values = resampled(np.zeros(count, np.float32), rate, new_rate)
    assert abs(len(values) - count * new_rate / rate) <= 1
    assert len(values) >= 1


@pytest.mark.parametrize("count", [1, 2, 3, 10])
@pytest.mark.parametrize("rate", [8_000, RATE, 44_100, 192_000, 999_983])
def test_very_short_sounds(count, rate):
    segment = decode(item_of(riff(np.full(count, 1000, np.int16).tobytes(), rate)), {Modality.AUDIO: shape_of()})
    assert segment.grid == (1, 1, 1)
    assert np.isfinite(segment.values).all()
    assert abs(segment.values).max() <= 1.3 * GAIN * 1000 / 2**15


def test_silence_is_zero():
    segment = decode(item_of(riff(bytes(2 * 44_100), 44_100)), {Modality.AUDIO: shape_of()})
    assert segment.grid == (1, 1, 40)
    assert not segment.values.any()


def test_a_sound_without_samples_is_refused():
    refused(riff(b""), reason="no sample")
    refused(b"", reason="no file of a known format")


@pytest.mark.parametrize(
    ("rate", "reason"),
    [(0, "no file of a known format"), (1_000_001, "rate of 1000001"), (2**32 - 1, "no file of a known format")],
)
def test_impossible_rates_are_refused(rate, reason):
    whole = bytearray(riff(bytes(200)))
    whole[24:28] = struct.pack("<I", rate)
    refused(bytes(whole), reason=reason)


def test_too_long_sounds_are_refused(monkeypatch):
    content = written(np.zeros(4 * RATE), format="FLAC")
    assert len(opened(content, max_seconds=4.0)) == 4 * RATE
    refused(content, max_seconds=3.9999, reason=r"longer than 3.9999 seconds, the limit .* \(max_seconds\)")
    monkeypatch.setattr(audio, "frames", None)
    refused(content, max_seconds=2.0, reason="longer than 2 seconds")


def test_a_header_that_understates_its_length_does_not_help(monkeypatch):
    whole = bytearray(written(np.zeros(60 * RATE), format="FLAC"))
    whole[22:26] = struct.pack(">I", 100)  # the lower half of the number of samples
    mixed, heard = audio._mixed, []
    monkeypatch.setattr(audio, "_mixed", lambda values: heard.append(values.size) or mixed(values))
    refused(bytes(whole), reason="longer than 5 seconds")
    assert sum(heard) < 6 * RATE


@pytest.mark.parametrize("declared", [0x7FFFF000, 0x7FFFFFFF, 0xFFFFFFFF])
@pytest.mark.parametrize("subtype", ["PCM_U8", "PCM_16", "PCM_24", "FLOAT", "ULAW"])
def test_sounds_that_were_written_to_a_pipe_are_whole(subtype, declared):
    """Their writer could not come back to say how long they are (sox, espeak, ffmpeg)."""
    content = written(tone(440), 22_050, format="WAV", subtype=subtype)
    piped, place = bytearray(content), content.index(b"data")
    piped[4:8] = struct.pack("<I", min(declared + 36, 0xFFFFFFFF))
    piped[place + 4 : place + 8] = struct.pack("<I", declared)
    np.testing.assert_array_equal(opened(bytes(piped)), opened(content))
    refused(bytes(piped), max_seconds=0.5, reason="longer than 0.5 seconds")


def test_want_of_memory_is_no_fault_of_the_item(monkeypatch):
    def fail(values):
        raise av.error.MemoryError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(audio, "_mixed", fail)
    with pytest.raises(MemoryError, match=f"item {KEY:#018x} .*lower the number of workers"):
        opened(written(tone(440), format="WAV"))


def test_an_hour_is_refused_at_once(monkeypatch):
    content = written(np.zeros(3600 * 1000, np.int16), 1000, format="FLAC")
    monkeypatch.setattr(audio, "frames", None)
    refused(content, reason="longer than 5 seconds")


def test_a_rate_that_changes_is_refused(media):
    parts = [media.sound(tone(440, rate=rate)[:, None], rate, "adts", "aac") for rate in (RATE, 24_000)]
    refused(b"".join(parts), reason="rate changes from 16000 to 24000")


def test_metadata_in_another_encoding_do_no_harm():
    content = written(tone(440, 0.1), format="WAV")
    note = b"INAM" + struct.pack("<I", 4) + b"caf\xe9"
    chunk = b"LIST" + struct.pack("<I", 4 + len(note)) + b"INFO" + note
    whole = bytearray(content + chunk)
    whole[4:8] = struct.pack("<I", len(whole) - 8)
    np.testing.assert_array_equal(opened(bytes(whole)), opened(content))


def test_the_reason_speaks_of_sounds():
    whole = written(tone(440), format="FLAC")
    refused(whole[: len(whole) // 2], reason=r"FFmpeg says '[^']*': it is damaged\. Repair")


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(["WAV", "FLAC", "OGG", "MP3", "AIFF", "CAF"]), st.data())
def test_damaged_files_are_read_or_refused_by_name(name, data):
    content = bytearray(written(tone(440, 0.05), format=name))
    for _ in range(data.draw(st.integers(1, 8))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    with suppress(UnreadableItem):
        segment = decode(item_of(bytes(content)), {Modality.AUDIO: shape_of()})
        assert np.isfinite(segment.values).all()
        assert segment.tokens <= shape_of().most_tokens


@given(st.integers(1, 3_000), st.integers(1, 500), st.integers(1, 2_000))
def test_chunks_hold_every_sample(count, size, rate):
    shape = shape_of(chunk_samples=size, sample_rate=rate, max_seconds=count / rate)
    samples = np.arange(1, count + 1, dtype=np.float32)
    segment = chunks(samples, shape)
    assert segment.tokens == -(-count // size) == shape.most_tokens
    assert segment.values.shape[1] == shape.patch_values
    np.testing.assert_array_equal(segment.values.ravel()[:count], samples * GAIN)
    assert not segment.values.ravel()[count:].any()


@pytest.mark.parametrize(
    "params", [{"chunk_samples": 0}, {"sample_rate": 0}, {"max_seconds": 0.0}, {"max_seconds": float("inf")}]
)
def test_impossible_shapes_are_refused(params):
    with pytest.raises(ValueError, match="holds no sound"):
        shape_of(**params)
