"""Reading the frames of video and sound files from memory, by FFmpeg through PyAV, within declared limits.

A file is read to its end, or until its reader has enough; nothing is written to disk and no other file is opened. One
thread decodes: loader workers are the parallel part, and the frames are then the same on every run.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import BytesIO
from typing import Any, cast

import av
from av.container import InputContainer
from av.frame import Frame
from av.stream import Disposition

from xpmir_uform.data.decoding.unreadable import UnreadableItem, out_of_memory
from xpmir_uform.data.items import Item
from xpmir_uform.data.vocabulary import Modality

FORMATS = (
    *("mov", "matroska", "avi", "mpegts", "mpeg", "flv", "asf", "ogg", "gif", "apng"),
    *("wav", "w64", "flac", "mp3", "aac", "aiff", "au", "caf", "amr", "wv"),
)
"""Containers that are read, by FFmpeg's names (mov: also mp4, m4a; matroska: also webm; ogg: also opus). Its others
name further files, or hold pictures and texts."""

SIZED = {"mov", "matroska", "wav", "w64", "flac", "aiff", "au", "caf", "wv"}
"""Those whose headers give the length, where they give one. Of the rest FFmpeg guesses it from the bit rate, or from
what is left of a truncated file."""

MISSING_PART, MISSING_SECONDS = 0.1, 0.25
"""A file that ends earlier than its header says by more than both is truncated; by less, the duration of the last frame
may be unknown."""

FRAME_LIMIT = 1 << 25
"""A video whose frames have more pixels (34 million; 8K has 33) is refused before they are expanded."""

HIDDEN_LIMIT = 1 << 10
"""A video that holds more frames which its edit list leaves out is refused: they are decoded, but never shown."""

WITH_ALPHA = {"vp8": "libvpx", "vp9": "libvpx-vp9"}
"""The decoders that keep an alpha channel, which WebM stores as a second picture beside each frame."""

_CODEC = {"max_pixels": str(FRAME_LIMIT), "threads": "1"}
_FILE = {"format_whitelist": ",".join(FORMATS), "protocol_whitelist": "", **_CODEC}

# The errors of FFmpeg, and what PyAV raises for a damaged file.
_DAMAGE = (av.FFmpegError, OSError, EOFError, ValueError, ArithmeticError, LookupError, RuntimeError)


@contextmanager
def reading(item: Item, kind: str, content: bytes | None = None) -> Iterator[tuple[InputContainer, Any]]:
    """The open file of ``item`` and its first stream of ``kind``; what goes wrong within the block names the item.

    Args:
        kind: "video" (a cover picture is none) or "audio".
        content: a part of the item's file; None: all of it.

    Raises:
        UnreadableItem: the file is of no known format, has no such stream, or the block raised an error of reading.
    """
    with refusing(item), _opened(item.content if content is None else content) as container:
        yield container, _stream(container, kind)


@contextmanager
def refusing(item: Item) -> Iterator[None]:
    """Makes what is raised within, as damaged files raise nearly anything, the error that names ``item``.

    Raises:
        MemoryError: memory ran out, also where FFmpeg says so.
    """
    try:
        yield
    except UnreadableItem:
        raise
    except MemoryError as error:
        raise out_of_memory(item) from error
    except _DAMAGE as error:
        raise UnreadableItem.of(item, _reason(item, error)) from error


def declared_seconds(container: InputContainer, stream: Any = None) -> float | None:
    """The length of the file, or of one stream, that its header gives; None where it gives none."""
    if not SIZED & set(container.format.name.split(",")):
        return None
    if stream is None:
        return container.duration / av.time_base if container.duration else None
    return float(stream.duration * stream.time_base) if stream.duration else None


def frames(container: InputContainer, stream: Any) -> Iterator[Any]:
    """The frames of ``stream`` in the order in which they are shown; those that an edit list leaves out are not.

    Raises:
        ValueError: the file is damaged, or ends before the length that its header gives.
    """
    decoder = _decoder(stream)
    end, hidden = 0.0, 0
    for packet in container.demux():
        if packet.is_corrupt:
            raise ValueError("it is truncated or damaged")
        if packet.pts is not None:
            end = max(end, float((packet.pts + (packet.duration or 0)) * packet.time_base))
        if packet.stream is stream:
            hidden += packet.is_discard
            if hidden > HIDDEN_LIMIT:
                raise ValueError(f"its edit list leaves out more than {HIDDEN_LIMIT} frames")
            for frame in cast(Sequence[Frame], decoder.decode(packet if packet.size else None)):
                if frame.is_corrupt:
                    raise ValueError("a frame is damaged")
                yield frame
    whole = declared_seconds(container)
    if whole is not None and whole - end > max(MISSING_PART * whole, MISSING_SECONDS):
        raise ValueError(f"it is truncated: its header declares {whole:.6g} seconds and it holds {end:.6g}")


def _decoder(stream: Any) -> Any:
    """What decodes ``stream``: for VP8 and VP9 with an alpha channel libvpx, since FFmpeg's own decoders drop it."""
    name = WITH_ALPHA.get(stream.codec_context.name)
    if name is None or stream.metadata.get("alpha_mode") != "1":
        return stream.codec_context
    decoder = av.CodecContext.create(name, "r")
    decoder.options = _CODEC
    return decoder


def _opened(content: bytes) -> InputContainer:
    try:
        return av.open(BytesIO(content), "r", metadata_errors="replace", options=_FILE)
    except _DAMAGE as error:
        known = ", ".join(FORMATS)
        raise ValueError(f"it is no file of a known format ({known}), or only the beginning of one") from error


def _stream(container: InputContainer, kind: str) -> Any:
    for stream in getattr(container.streams, kind):
        if not stream.disposition & Disposition.attached_pic:
            if stream.codec_context is None:
                raise ValueError(f"its {kind} stream is coded in a way that is not known")
            stream.thread_type = "NONE"
            stream.codec_context.options = _CODEC
            return stream
    raise ValueError(f"it has no {kind} stream")


def _reason(item: Item, error: BaseException) -> str:
    if isinstance(error, av.FFmpegError):
        large = f", or has frames of more than {FRAME_LIMIT} pixels" if item.modality is Modality.VIDEO else ""
        return f"FFmpeg says {error.strerror!r}: it is damaged{large}"
    return str(error) or type(error).__name__
