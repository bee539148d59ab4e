"""Every Pillow mode to 8-bit pixels, against values worked out by hand."""

import numpy as np
import pytest
from PIL import Image

from xpmir_uform.data.decoding import pixels as module

MODES = (
    *("1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "LAB", "HSV"),
    *("I", "F", "I;16", "I;16B", "I;16L", "I;16N"),
)


def flatten(picture, channels):
    """(H, W, C): the pixels."""
    flat = module.flatten(picture, channels)
    assert flat.mode == {1: "L", 3: "RGB"}[channels]
    return np.asarray(flat).reshape(picture.height, picture.width, channels)


def picture_of(mode, *pixels):
    """One row of pixels."""
    picture = Image.new(mode, (len(pixels), 1))
    picture.putdata(pixels)
    return picture


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("channels", [1, 3])
def test_every_mode_has_one_shape(mode, channels):
    pixels = flatten(Image.new(mode, (3, 2)), channels)
    assert pixels.shape == (2, 3, channels)
    assert pixels.dtype == np.uint8


@pytest.mark.parametrize("dtype", ["<u2", ">u2"])
def test_16_bits_keep_their_high_byte(dtype):
    values = np.array([[0, 255, 256, 32768, 65535]], dtype)
    assert flatten(Image.fromarray(values), 1)[0, :, 0].tolist() == [0, 0, 1, 128, 255]


def test_32_bit_integers_of_a_16_bit_file():
    values = np.array([[0, 255, 256, 32768, 65535]], np.int32)
    assert flatten(Image.fromarray(values), 1)[0, :, 0].tolist() == [0, 0, 1, 128, 255]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([-5, -5], [0, 0]),
        ([-128, 127], [0, 255]),
        ([0, 65536], [0, 255]),
        ([-(2**31), 0, 2**31 - 1], [0, 128, 255]),
    ],
)
def test_32_bit_integers_spread_their_own_range(values, expected):
    assert flatten(Image.fromarray(np.array([values], np.int32)), 1)[0, :, 0].tolist() == expected


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([0.0, 0.2, 1.0], [0, 51, 255]),
        ([0.0, 100.4, 255.0], [0, 100, 255]),
        ([0.0, 257.0, 65535.0], [0, 1, 255]),
        ([-1.0, 0.0, 1.0], [0, 128, 255]),
        ([-2.0, -2.0], [0, 0]),
        ([0.0, 1e6], [0, 255]),
    ],
)
def test_floats(values, expected):
    assert flatten(Image.fromarray(np.array([values], np.float32)), 1)[0, :, 0].tolist() == expected


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_floats_that_are_not_finite_are_refused(bad):
    with pytest.raises(ValueError, match="NaN or infinite"):
        flatten(Image.fromarray(np.array([[0.5, bad]], np.float32)), 3)


def test_transparency_shows_white():
    assert flatten(picture_of("RGBA", (255, 0, 0, 0)), 3).tolist() == [[[255, 255, 255]]]
    assert flatten(picture_of("RGBA", (255, 0, 0, 255)), 3).tolist() == [[[255, 0, 0]]]
    # 51 / 255 of the colour and 204 / 255 of white
    assert flatten(picture_of("RGBA", (255, 0, 0, 51)), 3).tolist() == [[[255, 204, 204]]]
    assert flatten(picture_of("LA", (0, 0), (0, 51), (7, 255)), 1)[0, :, 0].tolist() == [255, 204, 7]


@pytest.mark.parametrize("alpha", [b"\xff\x00", 1])
def test_palette_transparency(alpha):
    picture = picture_of("P", 0, 1)
    picture.putpalette([255, 0, 0, 0, 255, 0])
    picture.info["transparency"] = alpha
    assert flatten(picture, 3).tolist() == [[[255, 0, 0], [255, 255, 255]]]


def test_palette_with_alpha_channel():
    picture = picture_of("PA", (0, 255), (1, 0))
    picture.putpalette([255, 0, 0, 0, 255, 0])
    assert flatten(picture, 3).tolist() == [[[255, 0, 0], [255, 255, 255]]]


def test_transparent_colours():
    grey = picture_of("L", 1, 2)
    grey.info["transparency"] = 2
    assert flatten(grey, 1)[0, :, 0].tolist() == [1, 255]
    deep = Image.fromarray(np.array([[256, 40000, 40001]], np.uint16))
    deep.info["transparency"] = 40000
    assert flatten(deep, 1)[0, :, 0].tolist() == [1, 255, 156]


def test_colour_modes():
    assert flatten(picture_of("1", 0, 255), 3).tolist() == [[[0] * 3, [255] * 3]]
    assert flatten(picture_of("CMYK", (0, 0, 0, 0), (0, 255, 255, 0)), 3).tolist() == [[[255] * 3, [255, 0, 0]]]
    assert flatten(picture_of("YCbCr", (128, 128, 128)), 3).tolist() == [[[128] * 3]]
    assert flatten(picture_of("HSV", (0, 255, 255)), 3).tolist() == [[[255, 0, 0]]]
    assert flatten(picture_of("RGBX", (1, 2, 3, 0)), 3).tolist() == [[[1, 2, 3]]]
    # L* 53, a* 80, b* 67 is sRGB red
    red = flatten(picture_of("LAB", (136, 208, 195)), 3)[0, 0].astype(int)
    assert np.abs(red - (255, 0, 0)).max() <= 12


def test_grey_is_luma():
    rgb = picture_of("RGB", (255, 0, 0), (0, 255, 0), (0, 0, 255))
    assert flatten(rgb, 1)[0, :, 0].tolist() == [76, 150, 29]
