"""Files that were made by joining files: each part is decoded by itself, since readers stop after the first.

- Ogg (Vorbis, Opus, FLAC, Speex, Theora): RFC 3533, section 4, "sequential multiplexing (chaining)";
- FLAC without a container: what radio recorders and ``cat`` make; each part begins with its own STREAMINFO block.

ADTS and MPEG transport streams are sequences of frames: their readers need no help. A chain of MPEG audio whose later
parts begin with tags is refused by its reader.
"""

import re
from collections.abc import Iterator
from itertools import islice, pairwise

FIRST_PAGE = 0x02
"""The flag of the first page of a logical stream in the header of an Ogg page (RFC 3533, section 6)."""

STREAMINFO = re.compile(rb"fLaC[\x00\x80]\x00\x00\x22")
"""The beginning of a FLAC stream: its marker, then the header of a STREAMINFO block of 34 bytes (RFC 9639, 8.1)."""


MOST_PARTS = 1 << 10
"""A chain of more files is refused: each costs some milliseconds, however short it is."""


def parts_of(content: bytes) -> list[bytes]:
    """The files that ``content`` is a chain of, in their order; itself alone if it is no chain.

    Raises:
        ValueError: they are more than ``MOST_PARTS``.
    """
    starts = _ogg_starts(content) if content.startswith(b"OggS") else _flac_starts(content)
    later = list(islice((start for start in starts if start > 0), MOST_PARTS))
    if len(later) == MOST_PARTS:
        raise ValueError(f"it is a chain of more than {MOST_PARTS} files")
    bounds = [0, *later, len(content)]
    return [content[start:stop] for start, stop in pairwise(bounds)]


def _ogg_starts(content: bytes) -> Iterator[int]:
    """Where a group of first pages begins. The streams of one part all begin before any of them goes on."""
    in_group = True
    for place, flags in _ogg_pages(content):
        first = bool(flags & FIRST_PAGE)
        if first and not in_group:
            yield place
        in_group = first


def _ogg_pages(content: bytes) -> Iterator[tuple[int, int]]:
    """Place and flags of each page; what stands between pages, as tags of other formats may, is passed over."""
    place = content.find(b"OggS")
    while place >= 0 and place + 27 <= len(content):
        yield place, content[place + 5]
        segments = content[place + 26]
        after = place + 27 + segments + sum(content[place + 27 : place + 27 + segments])
        place = content.find(b"OggS", after)


def _flac_starts(content: bytes) -> Iterator[int]:
    """Where a stream begins. What looks like one inside the metadata, such as an attached file, is none."""
    place = 0 if STREAMINFO.match(content) else -1
    while place >= 0:
        yield place
        place += len(b"fLaC")
        last = False
        while not last and place + 4 <= len(content):
            last = bool(content[place] & 0x80)
            place += 4 + int.from_bytes(content[place + 1 : place + 4], "big")
        following = STREAMINFO.search(content, place)
        place = following.start() if following else -1
