"""Sounds of any rate, number of channels and sample type become chunks of one rate.

S samples at the rate of the shape, T chunks (tokens), P samples of one chunk.
"""

from contextlib import suppress
from io import BytesIO

import numpy as np
import soundfile
import soxr
from av import AudioFrame, AudioResampler

from xpmir_uform.data.decoding.chains import parts_of
from xpmir_uform.data.decoding.media import declared_seconds, frames, reading, refusing
from xpmir_uform.data.decoding.segment import Segment
from xpmir_uform.data.decoding.shapes import AudioShape
from xpmir_uform.data.items import Item
from xpmir_uform.data.vocabulary import Modality

RATE_LIMIT = 1_000_000
"""A file that declares more samples per second is refused."""

VALUES_LIMIT = 1 << 21
"""Samples per second times channels: a file that declares more is refused before it is decoded (10 channels at 192 kHz
are fewer). Decoding then costs at most this times ``max_seconds``."""

BLOCK = 1 << 16
"""Samples of each channel that are decoded at once, before they are mixed."""

HEADER_EXCESS = 1.0
"""Seconds that a header may declare beyond the limit before the samples are counted: coders add silence at the ends."""

ENDLESS = 0x7FFFF000
"""A WAV file that was written to a pipe declares at least so many bytes: its writer could not come back to its header.
"""

MOST_PLANES = 7
"""PyAV 18 counts the planes of a frame wrongly, and reads beyond them, from 8 on."""

GAIN = np.float32(8.0)
"""Samples in -1..1 are standardised by this factor: speech and music, whose deviation is usually 0.05 to 0.1, then vary
about as much as the pixels of pictures do."""


def decode(item: Item, shape: AudioShape) -> Segment:
    """The chunks of a sound file: :func:`open_audio`, then :func:`chunks`.

    Raises:
        UnreadableItem: the file is of no known format, is truncated or damaged, or has no sample or too many.
    """
    return chunks(open_audio(item, shape), shape)


def open_audio(item: Item, shape: AudioShape) -> np.ndarray:
    """(S,) float32: the mean of the channels of a sound file, about -1..1, at the rate of ``shape``.

    Integer samples are divided by their full scale, and samples beyond -1..1 are clipped to it, as any player does. The
    sound is then resampled by a band-limited filter (SoX, high quality) to round(S_file * sample_rate / rate_file)
    samples, at least one. The sound track of a video file counts as a sound. A chain of Ogg or FLAC files is the sum of
    its parts, each of its own rate.

    Raises:
        UnreadableItem: as in :func:`decode`.
    """
    with refusing(item):
        parts: list[np.ndarray] = []
        for content in parts_of(item.content):
            parts.append(resampled(*_read(item, content, shape), shape.sample_rate))
            if sum(map(len, parts)) > shape.most_samples:
                raise ValueError(_too_long(shape))
        return np.concatenate(parts)


def resampled(samples: np.ndarray, rate: int, new_rate: int) -> np.ndarray:
    """(S',) float32 of (S,) float32: band-limited to the lower of the two rates; never empty."""
    if rate == new_rate:
        return samples
    result = soxr.resample(samples, rate, new_rate, quality="HQ")
    return result if len(result) else samples.mean(keepdims=True)


def chunks(samples: np.ndarray, shape: AudioShape) -> Segment:
    """Cuts (S,) samples into chunks, the last one filled with zeros.

    Returns:
        values (T, P) float32, the samples times ``GAIN``; grid (1, 1, T), T = ceil(S / P).

    Raises:
        ValueError: there is no sample.
    """
    if samples.ndim != 1 or not len(samples):
        raise ValueError(f"samples have shape {samples.shape}; expected (S,), at least one.")
    count = -(-len(samples) // shape.chunk_samples)
    values = np.zeros(count * shape.chunk_samples, np.float32)
    values[: len(samples)] = samples * GAIN
    return Segment(Modality.AUDIO, values.reshape(count, -1), (1, 1, count))


def _read(item: Item, content: bytes, shape: AudioShape) -> tuple[np.ndarray, int]:
    """The mean of the channels, (S_file,) float32, and their rate, of one part of an item's file."""
    if content.startswith(b"OggS") or _is_endless(content):
        # FFmpeg ends a Vorbis stream up to 128 samples too early or too late, and calls what ends before its declared
        # end damaged. What libsndfile does not know, such as a video's track, is left to FFmpeg.
        with suppress(soundfile.LibsndfileError):
            return _read_blocks(content, shape)
    return _read_frames(item, content, shape)


def _is_endless(content: bytes) -> bool:
    """Whether a RIFF file says no length."""
    return content.startswith(b"RIFF") and int.from_bytes(content[4:8], "little") >= ENDLESS


def _read_frames(item: Item, content: bytes, shape: AudioShape) -> tuple[np.ndarray, int]:
    with reading(item, "audio", content) as (container, stream):
        if (declared_seconds(container, stream) or 0) > shape.max_seconds + HEADER_EXCESS:
            raise ValueError(_too_long(shape))
        _check_size(stream.codec_context.sample_rate, stream.codec_context.channels)
        mix = _Mix(shape)
        for frame in frames(container, stream):
            mix.add(_channels(frame), frame.sample_rate)
    return mix.result()


def _read_blocks(content: bytes, shape: AudioShape) -> tuple[np.ndarray, int]:
    with soundfile.SoundFile(BytesIO(content)) as file:
        _check_size(file.samplerate, file.channels)
        mix = _Mix(shape)
        while len(block := file.read(BLOCK, dtype="float32", always_2d=True)):
            mix.add(block.T, file.samplerate)
    return mix.result()


class _Mix:
    """The mean of the channels of a file as it is read, within the limits of a shape."""

    def __init__(self, shape: AudioShape) -> None:
        self.shape = shape
        self.rate = self.count = 0
        self.parts: list[np.ndarray] = []

    def add(self, channels: np.ndarray, rate: int) -> None:
        """Takes over the next (C, S) samples."""
        _check_size(rate, len(channels))
        self.rate = _checked_rate(rate, self.rate)
        self.parts.append(_mixed(channels))
        self.count += len(self.parts[-1])
        if self.count > _most_samples(rate, self.shape):
            raise ValueError(_too_long(self.shape))

    def result(self) -> tuple[np.ndarray, int]:
        """All samples, (S_file,) float32, and their rate."""
        if not self.count:
            raise ValueError("it has no sample")
        return np.concatenate(self.parts), self.rate


def _too_long(shape: AudioShape) -> str:
    return f"it is longer than {shape.max_seconds:g} seconds, the limit of the audio shape (max_seconds)"


def _checked_rate(rate: int, before: int) -> int:
    """The rate of a frame, when it is legal and that of the frame before it (0: there is none)."""
    if before and rate != before:
        raise ValueError(f"its rate changes from {before} to {rate} samples per second")
    if not 0 < rate <= RATE_LIMIT:
        raise ValueError(f"it has a rate of {rate} samples per second, expected 1 to {RATE_LIMIT}")
    return rate


def _check_size(rate: int, channels: int) -> None:
    """Refuses files that cost more to decode than any recording does."""
    if rate * channels > VALUES_LIMIT:
        raise ValueError(
            f"it declares {channels} channels of {rate} samples per second, expected at most {VALUES_LIMIT} samples "
            "per second in all"
        )


def _most_samples(rate: int, shape: AudioShape) -> int:
    """The longest legal sound at another rate: S with round(S * sample_rate / rate) <= shape.most_samples."""
    return ((2 * shape.most_samples + 1) * rate - 1) // (2 * shape.sample_rate)


def _channels(frame: AudioFrame) -> np.ndarray:
    """(C, S) float: the channels of a frame, of full scale 1."""
    if frame.format.is_planar and frame.layout.nb_channels > MOST_PLANES:
        frame = _interleaved(frame)
    values: np.ndarray = frame.to_ndarray()
    if not frame.format.is_planar:
        values = values.reshape(-1, frame.layout.nb_channels).T
    if values.dtype == np.uint8:
        return values.astype(np.float32) / 128 - 1
    return values / -float(np.iinfo(values.dtype).min) if values.dtype.kind == "i" else values


def _interleaved(frame: AudioFrame) -> AudioFrame:
    """The same samples in one plane."""
    (whole,) = AudioResampler(frame.format.packed, frame.layout, frame.sample_rate).resample(frame)
    return whole


def _mixed(channels: np.ndarray) -> np.ndarray:
    """(S,) float32 in -1..1: the mean of (C, S) channels."""
    if not np.isfinite(channels).all():
        raise ValueError("some samples are NaN or infinite")
    return np.clip(channels, -1, 1).mean(axis=0, dtype=np.float64).astype(np.float32)
