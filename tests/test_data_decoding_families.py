"""What is easily lost from a file: later parts of chains, transparency of any depth and codec, edit lists; and bombs.

Files are made by other tools than the reader, or put together byte by byte.
"""

import resource
import shutil
import struct
import subprocess
import zlib
from io import BytesIO
from multiprocessing import get_context

import av
import numpy as np
import pytest
import soundfile
from PIL import Image

from xpmir_uform.data.decoding.audio import VALUES_LIMIT, open_audio
from xpmir_uform.data.decoding.chains import parts_of
from xpmir_uform.data.decoding.image import open_image
from xpmir_uform.data.decoding.registry import UnreadableItem
from xpmir_uform.data.decoding.shapes import AudioShape, ImageShape, VideoShape
from xpmir_uform.data.decoding.video import open_video
from xpmir_uform.data.items import Item
from xpmir_uform.data.vocabulary import Modality

RATE = 16_000


def heard(content, **params):
    shape = AudioShape.C(**{"chunk_samples": 400, "sample_rate": RATE, "max_seconds": 5.0, **params})
    return open_audio(Item(Modality.AUDIO, content, 7), shape.instance())


def seen(content, channels=3, max_side=8):
    shape = ImageShape.C(patch_side=2, max_side=max_side, channels=channels).instance()
    return open_image(Item(Modality.IMAGE, content, 7), shape)


def shown(content, max_frames=16, max_side=32):
    shape = VideoShape.C(patch_side=2, tube_frames=2, max_side=max_side, max_frames=max_frames).instance()
    return open_video(Item(Modality.VIDEO, content, 7), shape)


def tone(seconds, rate, channels=1):
    wave = 0.4 * np.sin(2 * np.pi * 440 * np.arange(round(seconds * rate)) / rate)
    return np.repeat(wave[:, None], channels, axis=1)


def sound_file(name, subtype, seconds, rate=RATE, channels=1):
    """By libsndfile."""
    file = BytesIO()
    soundfile.write(file, tone(seconds, rate, channels), rate, format=name, subtype=subtype)
    return file.getvalue()


def by_tool(folder, *command, result):
    """The file ``result`` that a program from Debian writes."""
    if shutil.which(command[0]) is None:
        pytest.skip(f"needs {command[0]} from Debian")
    subprocess.run(command, check=True, capture_output=True, cwd=folder, timeout=300)
    return (folder / result).read_bytes()


# Chains


@pytest.mark.parametrize(
    ("name", "subtype"), [("OGG", "VORBIS"), ("OGG", "OPUS"), ("FLAC", "PCM_16"), ("FLAC", "PCM_24")]
)
def test_every_part_of_a_chain_is_heard(name, subtype):
    parts = [sound_file(name, subtype, seconds) for seconds in (0.5, 0.25, 0.75)]
    chain = b"".join(parts)
    assert parts_of(chain) == parts
    np.testing.assert_array_equal(heard(chain), np.concatenate([heard(part) for part in parts]))
    assert abs(len(heard(chain)) - 1.5 * RATE) <= 3 * 128


def test_parts_of_a_chain_may_differ_in_rate_and_channels():
    chain = sound_file("FLAC", "PCM_16", 0.5, 48_000, channels=2) + sound_file("FLAC", "PCM_16", 0.5, 8_000)
    assert len(heard(chain)) == RATE
    mixed = sound_file("OGG", "VORBIS", 0.5, 32_000, channels=2) + sound_file("OGG", "OPUS", 0.5, 48_000)
    assert abs(len(heard(mixed)) - RATE) <= 128


@pytest.mark.parametrize(("name", "subtype"), [("OGG", "VORBIS"), ("FLAC", "PCM_16")])
def test_the_limit_holds_for_the_whole_chain(name, subtype):
    chain = sound_file(name, subtype, 0.6) * 3
    assert len(heard(chain, max_seconds=1.9)) > 1.7 * RATE
    with pytest.raises(UnreadableItem, match=r"longer than 1\.5 seconds"):
        heard(chain, max_seconds=1.5)


@pytest.mark.parametrize(("name", "subtype"), [("OGG", "OPUS"), ("FLAC", "PCM_16")])
def test_chains_of_very_many_files_are_refused(name, subtype, monkeypatch):
    """However short each is: opening one costs more than decoding it."""
    part = sound_file(name, subtype, 0.001)
    with pytest.raises(UnreadableItem, match="a chain of more than 1024 files"):
        heard(part * 1025)
    monkeypatch.setattr("xpmir_uform.data.decoding.chains.MOST_PARTS", 3)
    assert len(parts_of(part * 3)) == 3
    with pytest.raises(ValueError, match="a chain of more than 3 files"):
        parts_of(part * 4)


@pytest.mark.parametrize(("name", "subtype"), [("OGG", "VORBIS"), ("FLAC", "PCM_16")])
def test_a_damaged_later_part_is_damage(name, subtype):
    first, second = sound_file(name, subtype, 0.5), sound_file(name, subtype, 0.5)
    with pytest.raises(UnreadableItem):
        heard(first + second[: len(second) // 2])


def test_what_looks_like_a_stream_in_the_metadata_is_none():
    content = sound_file("FLAC", "PCM_16", 0.5)
    attached = b"abcd" + content[:2000]
    block = b"\x02" + len(attached).to_bytes(3, "big") + attached  # an APPLICATION block
    whole = content[:4] + b"\x00" + content[5:42] + block + content[42:]
    assert content[4] in (0, 0x80)
    assert parts_of(whole) == [whole]
    np.testing.assert_array_equal(heard(whole), heard(content))


@pytest.mark.debian
def test_two_streams_of_one_part_are_no_chain(tmp_path):
    """An Ogg file with two soundtracks begins both before any of them goes on."""
    content = by_tool(
        tmp_path,
        *("ffmpeg", "-v", "error", "-f", "lavfi", "-i", "sine=300:d=1", "-f", "lavfi", "-i", "sine=600:d=1"),
        *("-map", "0", "-map", "1", "-c:a", "libvorbis", "-ac", "2", "two.ogg"),
        result="two.ogg",
    )
    assert parts_of(content) == [content]
    assert len(parts_of(content + content)) == 2


@pytest.mark.debian
def test_a_chain_of_videos_is_seen_to_its_end(tmp_path):
    part = by_tool(
        tmp_path,
        *("ffmpeg", "-v", "error", "-f", "lavfi", "-i", "testsrc=s=32x32:r=10:d=0.5", "-c:v", "libtheora", "a.ogv"),
        result="a.ogv",
    )
    assert len(shown(part)) == 5
    np.testing.assert_array_equal(shown(part + part), np.concatenate([shown(part)] * 2))


@pytest.mark.debian
def test_files_of_flac_and_oggenc_are_chained_too(tmp_path):
    soundfile.write(tmp_path / "a.wav", tone(0.5, RATE), RATE)
    for command, result in ((("flac", "-s", "a.wav"), "a.flac"), (("oggenc", "-Q", "a.wav"), "a.ogg")):
        part = by_tool(tmp_path, *command, result=result)
        assert len(heard(part + part)) == 2 * len(heard(part)) == RATE


# Transparency


def png(width, height, lines, depth, colour, *chunks):
    """A PNG of unfiltered ``lines`` (bytes each), with ``chunks`` (name, data) before its pixels."""

    def chunk(name, data):
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0))
    pixels = chunk(b"IDAT", zlib.compress(b"".join(b"\0" + line for line in lines)))
    extra = b"".join(chunk(name, data) for name, data in chunks)
    return b"\x89PNG\r\n\x1a\n" + header + extra + pixels + chunk(b"IEND", b"")


def packed(values, depth):
    """Grey values of ``depth`` bits as one line."""
    bits = "".join(format(value, f"0{depth}b") for value in values)
    return bytes(int(bits[place : place + 8].ljust(8, "0"), 2) for place in range(0, len(bits), 8))


@pytest.mark.parametrize("depth", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("transparent", ["none", "first", "third"])
def test_a_transparent_grey_of_any_depth(depth, transparent):
    top = 2**depth - 1
    values = [0, top, top // 2, 1]
    clear = {"none": None, "first": values[0], "third": values[2]}[transparent]
    chunks = [] if clear is None else [(b"tRNS", struct.pack(">H", clear))]
    content = png(4, 2, [packed(values, depth)] * 2, depth, 0, *chunks)
    eight_bits = [value >> 8 if depth == 16 else value * 255 // top for value in values]
    expected = [255 if value == clear else grey for value, grey in zip(values, eight_bits, strict=True)]
    assert seen(content)[1].tolist() == [[grey] * 3 for grey in expected]
    assert seen(content, channels=1)[0, :, 0].tolist() == expected


@pytest.mark.parametrize("depth", [8, 16])
@pytest.mark.parametrize("interlaced", [False, True])
def test_a_transparent_colour_is_compared_in_full(depth, interlaced):
    """Two colours that differ in the low byte alone: one of them is the transparent one."""
    scale = 257 if depth == 16 else 1
    colours = [(10, 20, 30), (10, 20, 31), (200, 0, 0), (0, 0, 0)]
    stored = [tuple(value * scale for value in colour) for colour in colours]
    if depth == 16:
        stored[1] = (stored[0][0], stored[0][1], stored[0][2] + 1)
    form = ">3H" if depth == 16 else ">3B"
    line = b"".join(struct.pack(form, *colour) for colour in stored)
    content = png(4, 2, [line] * 2, depth, 2, (b"tRNS", struct.pack(">3H", *stored[0])))
    if interlaced and depth == 8:
        file = BytesIO()
        Image.open(BytesIO(content)).save(file, "PNG", transparency=stored[0])
        content = file.getvalue()
    expected = [tuple(value >> (depth - 8) for value in colour) for colour in stored]
    assert seen(content)[0].tolist() == [[255] * 3, *map(list, expected[1:])]


@pytest.mark.debian
@pytest.mark.parametrize("codec", ["libvpx", "libvpx-vp9"])
def test_transparent_frames_of_webm_are_white(tmp_path, codec):
    options = ["-auto-alt-ref", "0"] if codec == "libvpx" else []
    source = "color=red@0.0:s=32x16:r=10:d=0.5,format=yuva420p,geq=r=255:g=0:b=0:a='if(lt(X,16),0,255)'"
    content = by_tool(
        tmp_path,
        *(
            "ffmpeg",
            "-v",
            "error",
            "-f",
            "lavfi",
            "-i",
            source,
            "-c:v",
            codec,
            "-pix_fmt",
            "yuva420p",
            *options,
            "a.webm",
        ),
        result="a.webm",
    )
    frames = shown(content)
    assert len(frames) == 5
    assert frames[:, :, :12].min() >= 250
    assert frames[:, :, 20:, 0].min() >= 240
    assert frames[:, :, 20:, 1:].max() <= 15


# What is no pixel


@pytest.mark.parametrize(
    "chunk",
    [
        (b"tEXt", b"Comment\0" + b"a" * 3_000_000),
        (b"zTXt", b"Comment\0\0" + zlib.compress(bytes(5_000_000))),
        (b"iTXt", b"Comment\0\1\0\0\0" + zlib.compress(b"b" * 4_000_000)),
        (b"iCCP", b"profile\0\0" + zlib.compress(bytes(70_000_000))),
        (b"iCCP", b"profile\0\0damaged"),
    ],
)
def test_texts_and_profiles_of_a_png_do_no_harm(chunk):
    content = png(2, 2, [bytes([9, 9])] * 2, 8, 0, *[chunk] * 2, (b"tRNS", struct.pack(">H", 0)))
    assert seen(content).tolist() == [[[9] * 3] * 2] * 2


@pytest.mark.parametrize(
    "chunk",
    [
        (b"tEXt", b"Comment\0" + b"a" * 70_000_000),
        (b"zTXt", b"Comment\0\0" + zlib.compress(bytes(5_000_000))),
        (b"iTXt", b"XML:com.adobe.xmp\0\1\0\0\0" + zlib.compress(b"b" * 40_000_000)),
        (b"zTXt", b"Raw profile type exif\0\0" + zlib.compress(bytes(5_000_000))),
        (b"zTXt", b"Raw profile type exif\0\0damaged"),
    ],
)
def test_texts_after_the_pixels_do_no_harm_either(chunk):
    plain = png(2, 2, [bytes([9, 9])] * 2, 8, 0)
    late = png(2, 2, [bytes([9, 9])] * 2, 8, 0, chunk)
    text = late[33 : 33 + len(late) - len(plain)]
    peak, reason = measured(seen, plain[:-12] + text * 2 + plain[-12:])
    assert reason == ""
    assert peak < 250e6
    assert seen(plain[:-12] + text + plain[-12:]).tolist() == [[[9] * 3] * 2] * 2


XMP = (
    b'<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:RDF xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#">'
    b'<rdf:Description xmlns:tiff="http://ns.adobe.com/tiff/1.0/" tiff:Orientation="%d"/></rdf:RDF></x:xmpmeta>'
)


def raw_profile(value):
    profile = exif(orientation(value)).hex().encode()
    return b"\nexif\n%8d\n%s\n" % (len(profile) // 2, profile)


@pytest.mark.parametrize("turned", [1, 6, 8])
@pytest.mark.parametrize(
    "chunk",
    [
        lambda value: (b"iTXt", b"XML:com.adobe.xmp\0\0\0\0\0" + XMP % value),
        lambda value: (b"iTXt", b"XML:com.adobe.xmp\0\1\0\0\0" + zlib.compress(XMP % value)),
        lambda value: (b"zTXt", b"Raw profile type exif\0\0" + zlib.compress(raw_profile(value))),
        lambda value: (b"tEXt", b"Raw profile type exif\0" + raw_profile(value)),
    ],
)
def test_a_png_is_turned_as_its_texts_say(chunk, turned):
    content = png(8, 4, [bytes([200] * 4 + [0] * 4)] * 4, 8, 0, (b"zTXt", b"Comment\0\0" + b"damaged"), chunk(turned))
    pixels = seen(content)
    assert pixels.shape[:2] == ((4, 8) if turned == 1 else (8, 4))
    assert pixels[0, 0, 0] == (0 if turned == 8 else 200)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_white_that_is_0_is_white_at_any_depth(dtype):
    """TIFF 6.0, PhotometricInterpretation."""
    data = (np.array([[0, 50], [200, 255]]) * (1 if dtype is np.uint8 else 257)).astype(dtype).tobytes()
    tags = [
        (256, 2),
        (257, 2),
        (258, 2 * len(data)),
        (259, 1),
        (262, 0),
        (273, 8),
        (277, 1),
        (278, 2),
        (279, len(data)),
    ]
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags)
    head = b"II*\0" + struct.pack("<I", 8 + len(data))
    content = head + data + struct.pack("<H", len(tags)) + entries + bytes(4)
    assert seen(content, channels=1)[:, :, 0].tolist() == [[255, 205], [55, 0]]


@pytest.mark.debian
@pytest.mark.parametrize("depth", [8, 12, 16])
def test_a_jpeg_2000_of_deep_colours_is_refused(tmp_path, depth):
    """Pillow shows their white as black."""
    make = ("convert", "-size", "16x8", "gradient:white-red", "-type", "TrueColor", "-depth", str(depth), "a.jp2")
    content = by_tool(tmp_path, *make, result="a.jp2")
    if depth == 8:
        assert seen(content).min(axis=2).max() > 200
        return
    with pytest.raises(UnreadableItem, match=r"a JPEG 2000 of \d+ bits a colour, expected 8: convert it"):
        seen(content)


def exif(*entries):
    """A block of Exif with these 12-byte entries of IFD 0 and 16 bytes that they may point to."""
    body = b"".join(entries)
    after = 8 + 2 + len(body) + 4
    return b"Exif\0\0MM\0*" + struct.pack(">IH", 8, len(entries)) + body + bytes(4) + bytes(16 + after)


def orientation(value):
    return struct.pack(">HHIHH", 0x0112, 3, 1, value, 0)


@pytest.mark.parametrize("turned", [1, 3, 6, 8])
@pytest.mark.parametrize(
    "entry",
    [
        struct.pack(">HHII", 0x011A, 10, 1, 60),  # XResolution, as a signed fraction 0 / 0
        struct.pack(">HHII", 0x011A, 5, 1, 0xFFFFFF00),  # its value lies beyond the end
        struct.pack(">HHII", 0x8769, 4, 1, 0xFFFFFFF0),  # a further IFD that is not there
        struct.pack(">HHII", 0x010F, 99, 7, 3),  # a type that does not exist
        struct.pack(">HHII", 0x0131, 2, 0x7FFFFFFF, 3),  # a text of 2 GB
    ],
)
@pytest.mark.filterwarnings("ignore:Truncated File Read", "ignore:Tag data larger than file")
def test_of_exif_the_orientation_alone_is_read(entry, turned):
    picture = Image.new("RGB", (8, 4))
    picture.paste((255, 0, 0), (0, 0, 4, 4))
    entries = sorted([entry, orientation(turned)])
    for name in ("JPEG", "PNG", "WEBP"):
        file = BytesIO()
        picture.save(file, name, exif=exif(*entries), **({"quality": 95} if name == "JPEG" else {"lossless": True}))
        pixels = seen(file.getvalue())
        assert pixels.shape[:2] == ((8, 4) if turned in (6, 8) else (4, 8))
        red = pixels[{1: (1, 1), 3: (2, 6), 6: (1, 1), 8: (6, 1)}[turned]]
        assert red[0] > 200
        assert red[1] < 60


def test_exif_that_is_no_exif_is_passed_over():
    file = BytesIO()
    Image.new("RGB", (8, 4)).save(file, "JPEG", exif=b"Exif\0\0garbage" * 9)
    assert seen(file.getvalue()).shape == (4, 8, 3)


# Edit lists


def edited(content, first, count, rate=10):
    """An MP4 whose edit list shows ``count`` frames from ``first`` on."""
    whole = bytearray(content)
    place = whole.index(b"elst")
    scale = struct.unpack(">I", whole[whole.index(b"mvhd") + 16 :][:4])[0]
    media_scale = struct.unpack(">I", whole[whole.index(b"mdhd") + 16 :][:4])[0]
    whole[place + 12 : place + 20] = struct.pack(">II", count * scale // rate, first * media_scale // rate)
    return bytes(whole)


@pytest.fixture(scope="module")
def film(media):
    frames = np.repeat(np.arange(4, 64, dtype=np.uint8) * 4, 8 * 8 * 3).reshape(60, 8, 8, 3)
    return media.video(frames, "mp4", "mpeg4", "yuv420p")


@pytest.mark.parametrize(("first", "count"), [(0, 10), (20, 10), (45, 15), (50, 3)])
def test_frames_that_an_edit_list_leaves_out_are_not_shown(film, first, count):
    content = edited(film, first, count)
    with av.open(BytesIO(content)) as container:
        assert container.streams.video[0].frames == 60
    frames = shown(content, max_side=8)
    assert abs(len(frames) - count) <= 1
    assert abs(int(frames[0].mean()) - 4 * (first + 4)) <= 4


def test_a_film_is_refused_by_what_it_shows(film):
    with pytest.raises(UnreadableItem, match="more than 16 frames"):
        shown(film)
    with pytest.raises(UnreadableItem, match="more than 9 frames"):
        shown(edited(film, 0, 20), max_frames=9)


def test_hidden_frames_are_bounded(film, monkeypatch):
    """Those from the key frame before the first one that is shown are decoded: here one in twelve is a key frame."""
    monkeypatch.setattr("xpmir_uform.data.decoding.media.HIDDEN_LIMIT", 5)
    assert len(shown(edited(film, 38, 10), max_side=8)) in (10, 11)
    with pytest.raises(UnreadableItem, match="edit list leaves out more than 5 frames"):
        shown(edited(film, 20, 10), max_side=8)


# Bombs


def growth(queue, decode, content):
    """Reports how much memory decoding took at its peak, in bytes, and its error."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        decode(content)
        reason = ""
    except UnreadableItem as error:
        reason = str(error)
    queue.put(((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024, reason))


def measured(decode, content):
    context = get_context("fork")
    queue = context.SimpleQueue()
    process = context.Process(target=growth, args=(queue, decode, content))
    process.start()
    result = queue.get()
    process.join()
    return result


def tiled(side, tile):
    data = zlib.compress(bytes(tile * tile))
    tags = [(256, side), (257, side), (258, 8), (259, 8), (262, 1), (277, 1)]
    tags += [(322, tile), (323, tile), (324, 8), (325, len(data))]
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags)
    head = b"II*\0" + struct.pack("<I", 8 + len(data))
    return head + data + struct.pack("<H", len(tags)) + entries + bytes(4)


def test_tiles_larger_than_their_picture_are_refused():
    assert seen(tiled(12, 512)).max() == 0
    peak, reason = measured(seen, tiled(12, 12_288))
    assert "tiles of 12288 x 12288 pixels, more than its own" in reason
    assert peak < 50e6


def test_one_long_line_of_pixels_is_refused():
    for width, height in ((1, 1 << 26), (1 << 17, 1)):
        peak, reason = measured(seen, png(width, height, [b"\0"], 8, 0))
        assert f"{width} x {height} pixels" in reason
        assert peak < 50e6


@pytest.mark.parametrize(("colour", "pixel"), [(0, 1), (2, 3), (6, 4)])
def test_memory_of_a_large_picture_is_a_small_multiple_of_its_pixels(colour, pixel):
    side = 2048
    content = png(side, side, [bytes(pixel * side)] * side, 8, colour)
    peak, reason = measured(seen, content)
    assert reason == ""
    assert peak < 3.5 * 4 * side * side


@pytest.mark.parametrize(("channels", "rate"), [(255, 192_000), (64, 48_000)])
def test_many_channels_are_refused_before_they_are_decoded(channels, rate):
    assert channels * rate > VALUES_LIMIT
    file = BytesIO()
    soundfile.write(file, np.zeros((4000, channels), np.float32), rate, format="OGG", subtype="VORBIS")
    peak, reason = measured(heard, file.getvalue())
    assert f"declares {channels} channels of {rate} samples per second" in reason
    assert peak < 50e6


def test_channels_are_mixed_as_they_are_read():
    """20 seconds of 100 channels would be 128 MB at once."""
    content = b"RIFF" + struct.pack("<I", 0xFFFFFFFF) + b"WAVEfmt "
    content += struct.pack("<IHHIIHH", 16, 1, 100, RATE, RATE * 100, 100, 8) + b"data" + struct.pack("<I", 0xFFFFFFFF)
    content += b"\x80" * (20 * RATE * 100)
    peak, reason = measured(lambda content: heard(content, max_seconds=21.0), content)
    assert reason == ""
    assert peak < 60e6
