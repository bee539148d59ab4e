"""Image files to patches: conformance by hand-made pictures, sizes, and files that are odd or bad."""

import struct
import warnings
import zlib
from contextlib import suppress
from io import BytesIO

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from xpmir_uform.data.decoding import image
from xpmir_uform.data.decoding.image import PIXEL_LIMIT, fit, open_image, patches, whole_patches
from xpmir_uform.data.decoding.registry import UnreadableItem, decode
from xpmir_uform.data.decoding.shapes import ImageShape
from xpmir_uform.data.items import Item
from xpmir_uform.data.vocabulary import Modality

KEY = 0xC0FFEE


def shape_of(patch_side=2, max_side=8, channels=3):
    return ImageShape.C(patch_side=patch_side, max_side=max_side, channels=channels).instance()


def file_of(picture, name="PNG", **options):
    stream = BytesIO()
    picture.save(stream, name, **options)
    return stream.getvalue()


def noise(height, width, channels=3):
    return np.random.default_rng(0).integers(0, 256, (height, width, channels), np.uint8)


def item_of(content):
    return Item(Modality.IMAGE, content, KEY)


def png_of(width, height, rows, depth=8, colour=0):
    """A PNG written by hand; `rows` are its filtered scan lines."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    body = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


def refused(content, shape=None, *, reason):
    with pytest.raises(UnreadableItem, match=reason) as caught:
        decode(item_of(content), {Modality.IMAGE: shape or shape_of()})
    assert caught.value.key == KEY
    assert f"item {KEY:#018x} (image, {len(content)} bytes)" in str(caught.value)
    assert "0x7f" not in str(caught.value)  # no address in memory
    return caught.value


def test_patches_of_a_png_written_by_hand():
    # 4 x 2 pixels, 0 to 7: two patches of 2 x 2
    content = png_of(4, 2, bytes([0, 0, 1, 2, 3, 0, 4, 5, 6, 7]))
    segment = decode(item_of(content), {Modality.IMAGE: shape_of(channels=1)})
    expected = np.array([[0, 1, 4, 5], [2, 3, 6, 7]]) / 127.5 - 1
    assert segment.grid == (1, 1, 2)
    assert segment.values.dtype == np.float32
    np.testing.assert_allclose(segment.values, expected, atol=1e-7)


def test_patch_values_run_by_row_column_channel():
    pixels = np.arange(4 * 4 * 3, dtype=np.uint8).reshape(4, 4, 3)
    segment = patches(pixels, shape_of())
    assert segment.grid == (1, 2, 2)
    last = [pixels[row, column, channel] for row in (2, 3) for column in (2, 3) for channel in range(3)]
    np.testing.assert_allclose((segment.values[3] + 1) * 127.5, last, atol=1e-4)


def test_standardised_values_are_exact_at_the_ends():
    pixels = np.array([[[0], [255]], [[255], [0]]])
    for dtype in (np.uint8, np.float32, np.float64):
        assert patches(pixels.astype(dtype), shape_of(channels=1)).values.tolist() == [[-1, 1, 1, -1]]


@pytest.mark.parametrize("dimensions", [(4, 4), (4, 4, 1), (3, 4, 3), (4, 5, 3), (0, 4, 3)])
def test_pixels_that_are_not_whole_patches_are_refused(dimensions):
    with pytest.raises(ValueError, match=r"expected \(H, W, 3\)"):
        patches(np.zeros(dimensions, np.uint8), shape_of())


@pytest.mark.parametrize(
    ("height", "width", "expected"),
    [
        (32, 32, (4, 4)),
        (64, 32, (4, 2)),
        (1, 1, (1, 1)),
        (1, 2000, (1, 4)),
        (2000, 1, (4, 1)),
        (20, 32, (3, 4)),  # 2.5 patches: halves upwards
        (19, 32, (2, 4)),
        (31, 27, (4, 3)),
        (33, 33, (4, 4)),
        (100, 60, (4, 2)),  # 32 x 19.2
    ],
)
def test_whole_patches(height, width, expected):
    assert whole_patches(height, width, shape_of(8, 32)) == expected


@given(*(st.integers(1, 5000) for _ in range(2)), st.integers(1, 64), st.integers(0, 200))
def test_whole_patches_fit(height, width, patch_side, extra):
    max_side = patch_side + extra
    rows, columns = whole_patches(height, width, shape_of(patch_side, max_side))
    assert 1 <= rows * patch_side <= max_side
    assert 1 <= columns * patch_side <= max_side
    assert whole_patches(width, height, shape_of(patch_side, max_side)) == (columns, rows)
    shrink = min(1, max_side / max(height, width))
    assert abs(rows - height * shrink / patch_side) <= 1
    assert (rows, columns) == whole_patches(rows * patch_side, columns * patch_side, shape_of(patch_side, max_side))


def test_fit_keeps_what_fits_and_resizes_with_antialiasing():
    pixels = noise(6, 8)
    np.testing.assert_array_equal(fit(Image.fromarray(pixels), shape_of()), pixels)
    stripes = np.zeros((64, 64), np.uint8)
    stripes[:, ::2] = 255
    resized = fit(Image.fromarray(stripes), shape_of(channels=1))
    assert resized.shape == (8, 8, 1)
    assert np.abs(resized[:, 2:-2].astype(int) - 127.5).max() < 3  # plain sampling gives 0 or 255


@pytest.mark.parametrize("size", [(1, 1), (1, 2000), (2000, 1), (7, 3)])
def test_extreme_sizes(size):
    content = file_of(Image.new("RGB", size, (255, 0, 0)))
    segment = decode(item_of(content), {Modality.IMAGE: shape_of()})
    assert segment.tokens == segment.grid[1] * segment.grid[2] >= 1
    np.testing.assert_array_equal(segment.values.reshape(-1, 3), np.tile([1.0, -1, -1], (segment.tokens * 4, 1)))


@pytest.mark.parametrize("name", ["PNG", "BMP", "TIFF", "PPM", "TGA", "PCX", "SGI", "QOI", "WEBP", "JPEG2000"])
def test_lossless_formats_keep_their_pixels(name):
    pixels = noise(6, 8)
    options = {"WEBP": {"lossless": True}, "JPEG2000": {"irreversible": False}}.get(name, {})
    content = file_of(Image.fromarray(pixels), name, **options)
    np.testing.assert_array_equal(open_image(item_of(content), shape_of()), pixels)


@pytest.mark.parametrize("name", ["JPEG", "AVIF", "GIF"])
def test_lossy_formats_come_close(name):
    pixels = np.full((8, 8, 3), (200, 100, 50), np.uint8)
    opened = open_image(item_of(file_of(Image.fromarray(pixels), name)), shape_of())
    assert np.abs(opened.astype(int) - pixels).max() <= 4


@pytest.mark.parametrize(
    ("mode", "name"),
    [
        *(("1", "PNG"), ("L", "PNG"), ("LA", "PNG"), ("P", "PNG"), ("RGBA", "PNG"), ("I;16", "PNG"), ("I", "PPM")),
        *(("CMYK", "JPEG"), ("CMYK", "TIFF"), ("YCbCr", "TIFF"), ("LAB", "TIFF"), ("I;16B", "TIFF"), ("F", "TIFF")),
        *(("I", "TIFF"), ("PA", "TIFF"), ("L", "JPEG"), ("RGBX", "TIFF"), ("P", "GIF"), ("P", "BMP")),
    ],
)
@pytest.mark.parametrize("channels", [1, 3])
def test_files_of_every_mode(mode, name, channels):
    opened = open_image(item_of(file_of(Image.new(mode, (4, 6)), name)), shape_of(channels=channels))
    assert opened.shape == (6, 4, channels)
    assert opened.dtype == np.uint8


def test_16_bit_files_are_scaled():
    values = np.array([[0, 255], [256, 32768]], np.uint16)
    for name in ("PNG", "TIFF", "PPM"):
        opened = open_image(item_of(file_of(Image.fromarray(values), name)), shape_of(channels=1))
        assert opened[..., 0].tolist() == [[0, 0], [1, 128]]


def test_transparent_files_lie_on_white():
    content = file_of(Image.new("RGBA", (2, 2), (255, 0, 0, 0)))
    assert (open_image(item_of(content), shape_of()) == 255).all()


@pytest.mark.parametrize("name", ["JPEG", "PNG", "TIFF", "WEBP"])
def test_exif_rotation(name):
    pixels = np.zeros((2, 4, 3), np.uint8)
    pixels[:, 2:] = 255
    exif = Image.Exif()
    exif[0x0112] = 6  # the stored left edge is the top
    opened = open_image(item_of(file_of(Image.fromarray(pixels), name, exif=exif)), shape_of(1, 8))
    assert opened.shape == (4, 2, 3)
    assert opened[:2].max() < 40
    assert opened[2:].min() > 215


@pytest.mark.parametrize("name", ["GIF", "PNG", "WEBP", "TIFF"])
def test_first_frame_of_an_animation(name):
    frames = [Image.new("RGB", (4, 4), colour) for colour in ((255, 0, 0), (0, 255, 0))]
    options = {"lossless": True} if name == "WEBP" else {}
    content = file_of(frames[0], name, save_all=True, append_images=frames[1:], **options)
    assert Image.open(BytesIO(content)).n_frames == 2
    assert open_image(item_of(content), shape_of())[0, 0].tolist() == [255, 0, 0]


def test_large_photograph_is_decoded_small():
    gradient = np.linspace(0, 255, 512, dtype=np.uint8)
    pixels = np.repeat(np.repeat(gradient[None, :, None], 384, 0), 3, 2)
    shape = shape_of(8, 32)
    from_jpeg = open_image(item_of(file_of(Image.fromarray(pixels), "JPEG", quality=95)), shape)
    assert from_jpeg.shape == (24, 32, 3)
    assert np.abs(from_jpeg.astype(int) - fit(Image.fromarray(pixels), shape)).max() <= 3


def test_empty_and_foreign_files_are_refused():
    refused(b"", reason="no image of a known format")
    refused(b"hello", reason="no image of a known format")
    refused(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 4 4\n", reason="no image of a known format")
    refused(png_of(0, 4, b""), reason="no pixels|no image of a known format")


@pytest.mark.parametrize("name", ["PNG", "JPEG", "TIFF", "BMP", "WEBP", "AVIF", "JPEG2000", "QOI"])
@pytest.mark.parametrize("part", [0, 10, 0.5])
def test_truncated_files_are_refused(name, part):
    whole = file_of(Image.fromarray(noise(64, 64)), name)
    refused(whole[: part if isinstance(part, int) else int(len(whole) * part)], reason=".")


def test_avif_whose_decoder_stops_is_refused():
    whole = bytearray(file_of(Image.fromarray(noise(12, 9)), "AVIF"))
    start = whole.index(b"mdat") + 4
    whole[start:] = bytes(len(whole) - start)
    refused(bytes(whole), reason="Failed to decode")


def test_png_without_its_last_four_bytes_is_read():
    pixels = noise(8, 8)
    whole = file_of(Image.fromarray(pixels))
    np.testing.assert_array_equal(open_image(item_of(whole[:-4]), shape_of()), pixels)


def test_bombs_are_refused_before_they_are_expanded():
    side = 9000
    assert side * side > PIXEL_LIMIT
    error = refused(png_of(side, side, b"\0"), reason="declares 9000 x 9000 pixels, expected at most 67108864")
    assert error.reason is not None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        refused(png_of(12000, 12000, b"\0"), reason="declares 12000 x 12000")
    refused(png_of(100_000, 100_000, b"\0"), reason="bomb")


def test_want_of_memory_is_no_fault_of_the_item(monkeypatch):
    def fail(picture, channels):
        raise MemoryError

    monkeypatch.setattr(image, "flatten", fail)
    item = item_of(file_of(Image.new("RGB", (2, 2))))
    with pytest.raises(MemoryError, match=f"item {item.key:#018x} .*lower the number of workers"):
        open_image(item, shape_of())


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(["PNG", "JPEG", "GIF", "TIFF", "WEBP", "AVIF", "BMP", "TGA", "PCX"]), st.data())
def test_damaged_files_are_read_or_refused_by_name(name, data):
    content = bytearray(file_of(Image.fromarray(noise(12, 9)), name))
    for _ in range(data.draw(st.integers(1, 8))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with suppress(UnreadableItem):
            segment = decode(item_of(bytes(content)), {Modality.IMAGE: shape_of()})
            assert np.isfinite(segment.values).all()
