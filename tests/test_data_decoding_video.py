"""Video files to tubes: conformance by lossless files and by hand, frames that are kept, and what is refused."""

import struct
from contextlib import suppress
from io import BytesIO

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from xpmir_uform.data.decoding import video
from xpmir_uform.data.decoding.image import fit
from xpmir_uform.data.decoding.media import FRAME_LIMIT
from xpmir_uform.data.decoding.registry import UnreadableItem, decode
from xpmir_uform.data.decoding.shapes import VideoShape
from xpmir_uform.data.decoding.video import open_video, tubes
from xpmir_uform.data.items import Item
from xpmir_uform.data.vocabulary import Modality

KEY = 0xC0FFEE


def shape_of(**params):
    defaults = {"patch_side": 2, "tube_frames": 2, "max_side": 8, "max_frames": 16}
    return VideoShape.C(**{**defaults, **params}).instance()


def item_of(content):
    return Item(Modality.VIDEO, content, KEY)


def noise(frames, height=6, width=8):
    return np.random.default_rng(0).integers(0, 256, (frames, height, width, 3), np.uint8)


def flat(frames, height=16, width=16):
    """Frames of one grey each, which any encoder keeps: 10, 20, 30 ..."""
    return np.repeat(np.arange(1, frames + 1, dtype=np.uint8) * 10, height * width * 3).reshape(-1, height, width, 3)


def animation(frames, name, **options):
    """A file of some pictures by Pillow."""
    file = BytesIO()
    frames[0].save(file, name, save_all=True, append_images=frames[1:], duration=100, **options)
    return file.getvalue()


def refused(content, shape=None, *, reason):
    with pytest.raises(UnreadableItem, match=reason) as caught:
        decode(item_of(content), {Modality.VIDEO: shape or shape_of()})
    assert caught.value.key == KEY
    assert f"item {KEY:#018x} (video, {len(content)} bytes)" in str(caught.value)


def test_tubes_by_hand():
    # 3 frames of 2 x 4 pixels, 0 to 23: tubes of 2 frames and 2 x 2 pixels, the last frame stands twice.
    pixels = np.arange(24).reshape(3, 2, 4, 1)
    segment = tubes(pixels, shape_of(channels=1))
    expected = [
        [0, 1, 4, 5, 8, 9, 12, 13],
        [2, 3, 6, 7, 10, 11, 14, 15],
        [16, 17, 20, 21, 16, 17, 20, 21],
        [18, 19, 22, 23, 18, 19, 22, 23],
    ]
    assert segment.modality is Modality.VIDEO
    assert segment.grid == (2, 1, 2)
    assert segment.values.dtype == np.float32
    np.testing.assert_allclose(segment.values, np.array(expected) / 127.5 - 1, atol=1e-7)


def test_tube_values_run_by_frame_row_column_channel():
    pixels = noise(4, 4, 4)
    segment = tubes(pixels, shape_of())
    last = [pixels[f, r, c, k] for f in (2, 3) for r in (2, 3) for c in (2, 3) for k in range(3)]
    np.testing.assert_allclose((segment.values[7] + 1) * 127.5, last, atol=1e-4)


@pytest.mark.parametrize("dimensions", [(4, 4, 3), (1, 4, 4, 1), (1, 3, 4, 3), (1, 4, 5, 3), (0, 4, 4, 3)])
def test_pixels_that_are_not_whole_tubes_are_refused(dimensions):
    with pytest.raises(ValueError, match=r"expected \(F, H, W, 3\)"):
        tubes(np.zeros(dimensions, np.uint8), shape_of())


@pytest.mark.parametrize(
    ("container", "codec", "pixels"),
    [("matroska", "ffv1", "bgr0"), ("mov", "png", "rgb24"), ("avi", "rawvideo", "bgr24"), ("apng", "apng", "rgb24")],
)
def test_lossless_files_keep_their_pixels(media, container, codec, pixels):
    frames = noise(5)
    content = media.video(frames, container, codec, pixels)
    np.testing.assert_array_equal(open_video(item_of(content), shape_of()), frames)


@pytest.mark.parametrize(
    ("container", "codec"),
    [
        *(("mp4", "libx264"), ("mp4", "mpeg4"), ("mp4", "libx265"), ("webm", "libvpx"), ("webm", "libvpx-vp9")),
        *(("avi", "mpeg4"), ("flv", "flv"), ("matroska", "libx264"), ("mov", "mjpeg")),
    ],
)
def test_lossy_files_come_close(media, container, codec):
    frames = flat(5)
    kind = "yuvj420p" if codec == "mjpeg" else "yuv420p"
    opened = open_video(item_of(media.video(frames, container, codec, kind, rate=25)), shape_of(max_side=16))
    assert opened.shape == frames.shape
    assert np.abs(opened.astype(int) - frames).max() <= 6


def test_animations_written_by_pillow():
    frames = noise(4)
    content = animation([Image.fromarray(frame) for frame in frames], "PNG")
    np.testing.assert_array_equal(open_video(item_of(content), shape_of()), frames)
    colours = [(255, 0, 0), (0, 255, 0), (0, 0, 255)]
    content = animation([Image.new("RGB", (8, 8), colour) for colour in colours], "GIF")
    assert open_video(item_of(content), shape_of())[:, 0, 0].tolist() == [list(colour) for colour in colours]


def test_transparent_frames_lie_on_white():
    clear = [Image.new("RGBA", (4, 4), (255, 0, 0, alpha)) for alpha in (0, 255)]
    opened = open_video(item_of(animation(clear, "PNG")), shape_of())
    assert opened[:, 0, 0].tolist() == [[255, 255, 255], [255, 0, 0]]


def test_frames_are_kept_by_the_stride(media):
    content = media.video(noise(7))
    for stride in (1, 2, 3, 7, 100):
        opened = open_video(item_of(content), shape_of(frame_stride=stride))
        np.testing.assert_array_equal(opened, noise(7)[::stride])


def test_one_frame_is_a_video(media):
    content = media.video(noise(1))
    segment = decode(item_of(content), {Modality.VIDEO: shape_of(tube_frames=3)})
    assert segment.grid == (1, 3, 4)
    values = segment.values.reshape(12, 3, -1)
    np.testing.assert_array_equal(values[:, 0], values[:, 2])


def test_a_varying_rate_counts_each_frame_once(media):
    content = media.video(noise(5), times=[0, 1, 5, 6, 30])
    np.testing.assert_array_equal(open_video(item_of(content), shape_of()), noise(5))


def test_frames_are_resized_as_images_are(media):
    frames, shape = noise(3, 40, 56), shape_of()
    opened = open_video(item_of(media.video(frames)), shape)
    np.testing.assert_array_equal(opened, [fit(Image.fromarray(frame), shape) for frame in frames])
    assert opened.shape == (3, 6, 8, 3)


def test_grey(media):
    frames = flat(2, 8, 8)
    opened = open_video(item_of(media.video(frames)), shape_of(channels=1))
    np.testing.assert_array_equal(opened, frames[..., :1])


@pytest.mark.parametrize(
    ("matrix", "turns"), [((0, 1, -1, 0), -1), ((0, -1, 1, 0), 1), ((-1, 0, 0, -1), 2), ((1, 0, 0, 1), 0)]
)
def test_frames_are_shown_upright(media, matrix, turns):
    """The matrix of an MP4 track maps stored places (x, y) to shown ones: x' = a x + c y, y' = b x + d y."""
    content = bytearray(media.video(noise(2), "mov", "png", "rgb24"))
    place = content.index(b"tkhd") + 4 + 40
    a, b, c, d = (value << 16 for value in matrix)
    content[place : place + 36] = struct.pack(">9i", a, b, 0, c, d, 0, 0, 0, 1 << 30)
    opened = open_video(item_of(bytes(content)), shape_of())
    np.testing.assert_array_equal(opened, np.rot90(noise(2), turns, axes=(1, 2)))


def test_decoding_is_the_same_every_time(media):
    content = media.video(noise(12, 48, 64), "mp4", "libx264", "yuv420p")
    first, *others = (decode(item_of(content), {Modality.VIDEO: shape_of()}).values for _ in range(4))
    assert all(np.array_equal(first, other) for other in others)


def test_nothing_is_written_to_disk(media, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    decode(item_of(media.video(noise(2))), {Modality.VIDEO: shape_of()})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("container", "codec", "pixels"), [("mov", "png", "rgb24"), ("matroska", "ffv1", "bgr0")])
def test_too_many_frames_are_refused_before_they_are_expanded(media, container, codec, pixels, monkeypatch):
    content = media.video(flat(25, 8, 8), container, codec, pixels)
    expanded = []
    monkeypatch.setattr(video, "flatten", lambda *args: expanded.append(args) or Image.new("RGB", (8, 8)))
    refused(content, shape_of(max_frames=5), reason=r"more than 5 frames, the limit of the video shape \(max_frames\)")
    assert len(expanded) == 5
    refused(content, shape_of(max_frames=5, frame_stride=4), reason="more than 5 frames of every 4")
    decode(item_of(content), {Modality.VIDEO: shape_of(max_frames=5, frame_stride=5)})


@pytest.mark.parametrize("side", [9_000, 60_000])
def test_frames_that_declare_too_many_pixels_are_refused(media, side):
    assert side * side > FRAME_LIMIT
    whole = bytearray(animation([Image.new("L", (4, 4), grey) for grey in (0, 255)], "GIF"))
    whole[6:10] = struct.pack("<HH", side, side)
    refused(bytes(whole), reason=f"frames of more than {FRAME_LIMIT} pixels")
    whole = bytearray(media.video(noise(2), "mov", "rawvideo", "rgb24"))
    place = whole.index(b"stsd") + 44
    whole[place : place + 4] = struct.pack(">HH", side, side)
    refused(bytes(whole), reason=f"frames of more than {FRAME_LIMIT} pixels")


def test_only_the_file_itself_is_read(tmp_path):
    (tmp_path / "a.ts").write_bytes(b"")
    for text in (f"#EXTM3U\n#EXTINF:1,\n{tmp_path}/a.ts\n", f"ffconcat version 1.0\nfile {tmp_path}/a.ts\n"):
        refused(text.encode(), reason="no file of a known format")


def test_a_sound_is_no_video(media):
    refused(media.sound(np.zeros((100, 1))), reason="no video stream")


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(["mp4", "webm", "avi", "mkv"]), st.data())
def test_damaged_files_are_read_or_refused_by_name(media, name, data):
    arguments = {
        "mp4": ("mp4", "libx264", "yuv420p"),
        "webm": ("webm", "libvpx", "yuv420p"),
        "avi": ("avi", "mpeg4", "yuv420p"),
        "mkv": ("matroska", "ffv1", "bgr0"),
    }
    content = bytearray(media.video(noise(3, 16, 16), *arguments[name]))
    for _ in range(data.draw(st.integers(1, 8))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    with suppress(UnreadableItem):
        segment = decode(item_of(bytes(content)), {Modality.VIDEO: shape_of()})
        assert np.isfinite(segment.values).all()
        assert segment.tokens <= shape_of().most_tokens


@pytest.mark.parametrize("frames", [1, 2, 3, 16])
@pytest.mark.parametrize(("height", "width"), [(2, 2), (6, 8), (40, 8), (8, 120)])
def test_most_tokens_bounds_every_video(media, frames, height, width):
    segment = decode(item_of(media.video(noise(frames, height, width))), {Modality.VIDEO: shape_of()})
    assert segment.tokens == np.prod(segment.grid) <= shape_of().most_tokens
    assert segment.values.shape[1] == shape_of().patch_values


@pytest.mark.parametrize(
    ("params", "reason"),
    [
        ({"tube_frames": 0}, "keeps no frame"),
        ({"frame_stride": 0}, "keeps no frame"),
        ({"max_frames": 0}, "keeps no frame"),
        ({"patch_side": 0}, "a video shape .* holds no patch"),
        ({"max_side": 1}, "a video shape .* holds no patch"),
        ({"channels": 4}, "channels is 4"),
    ],
)
def test_impossible_shapes_are_refused(params, reason):
    with pytest.raises(ValueError, match=reason):
        shape_of(**params)
