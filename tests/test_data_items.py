"""Items and bags: what people hold is taken, and what does not fit is refused where they are made."""

import io
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from xpmir_uform.data.decoding.registry import decode
from xpmir_uform.data.decoding.shapes import ImageShape
from xpmir_uform.data.items import Bag, Item
from xpmir_uform.data.vocabulary import Modality, Side

SHAPES = {Modality.IMAGE: ImageShape.C(patch_side=4, max_side=16).instance()}


def item(**fields):
    return Item(**{"modality": Modality.TEXT, "content": b"ab", "key": 7, **fields})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        *(
            ({"key": key}, "an item has key .*; it must be an integer from 0")
            for key in (-1, 2**64, 1.5, "k", None, True)
        ),
        ({"modality": "text"}, "an item has modality 'text'; it must be a Modality"),
        ({"modality": 1}, "an item has modality 1; it must be a Modality"),
        ({"side": "query"}, r"item 0x0000000000000007 \(text\) has side 'query'; it must be a Side"),
        ({"side": 1}, "has side 1; it must be a Side"),
        ({"side": Side(4)}, "it must be a Side"),
        *(({"group": group}, "it must be an integer of at least 0") for group in (-1, 0.5, None, False, 2**63)),
        ({"content": "ab"}, r"has content of type str; it must be bytes. Item.text"),
        ({"content": None}, "has content of type NoneType"),
        ({"modality": Modality.IMAGE, "content": Path("x")}, "content of type PosixPath; it must be bytes. Item.image"),
        *(
            ({"choices": given}, "has choices of type .*; they must be bytes")
            for given in ([1], None, "yn", bytearray())
        ),
        ({"targets": (1.0,)}, "has 0 choices and 1 targets"),
        ({"choices": b"ab", "targets": (1.0,)}, "has 2 choices and 1 targets; give each choice one target"),
        ({"choices": b"aba"}, "has choices b'aba'; they must be distinct bytes"),
        ({"choices": b"ab", "targets": (0.5, 0.502)}, "targets that sum to 1.002; they must sum to one"),
        ({"choices": b"ab", "targets": torch.tensor([0.5, 0.498])}, "targets that sum to 0.998"),
        *(
            (
                {"choices": b"ab", "targets": (1.0, bad)},
                "has the target .*; targets must be numbers, finite and at least 0",
            )
            for bad in (-0.5, np.nan, np.inf, "x", None)
        ),
    ],
)
def test_a_bad_field_of_an_item_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        item(**fields)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "a text is a NoneType, expected a str"),
        (b"ab", "a text is a bytes, expected a str: decode it as UTF-8"),
        (Path("a"), "a text is a PosixPath"),
        (7, "a text is a int"),
        ("\udcff", "is no UTF-8"),
    ],
)
def test_what_is_no_text_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        Item.text(text)


@pytest.mark.parametrize("make", [Item.image, Item.audio, Item.video], ids=["image", "audio", "video"])
def test_files_by_path_and_by_bytes_are_one_item(make, tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"content\r\n")
    made = make(path)
    assert made.content == b"content\r\n"
    assert made.modality.name.lower() == make.__name__
    assert made == make(str(path)) == make(b"content\r\n") == make(bytearray(b"content\r\n"))
    assert len({one(path).key for one in (Item.image, Item.audio, Item.video)}) == 3
    path.write_bytes(b"other")
    assert made.content == b"content\r\n"
    given = make(path, 3, group=1, side=Side.QUERY)
    assert (given.key, given.group, given.side) == (3, 1, Side.QUERY)
    name = make.__name__
    for bad, message in [
        (tmp_path / "none", rf"the {name} file '.*none' cannot be read: No such file"),
        (tmp_path, f"the {name} file .* cannot be read: Is a directory"),
        (None, f"{name} content is a NoneType: expected the path of its file, or the bytes"),
    ]:
        with pytest.raises(ValueError, match=message):
            make(bad)


def noise(mode):
    """A picture of 9 x 7 pixels of any values."""
    values = np.frombuffer(zlib.compress(np.random.default_rng(0).bytes(4000)), np.uint8)
    if mode in ("I", "F", "I;16"):
        kind = {"I": np.int32, "F": np.float32, "I;16": np.uint16}[mode]
        return Image.fromarray(values[:63].reshape(7, 9).astype(kind) * 200)
    return Image.frombytes("RGBA", (9, 7), values[: 9 * 7 * 4].tobytes()).convert("RGB").convert(mode)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "I;16", "I", "F", "CMYK", "YCbCr", "HSV", "LAB"])
def test_a_picture_of_pillow_is_what_a_model_sees_of_its_lossless_file(mode):
    picture = Image.frombytes("LAB", (9, 7), noise("RGB").tobytes()) if mode == "LAB" else noise(mode)
    made = Item.image(picture)
    assert made == Item.image(picture.copy())
    assert made.key == Item.image(made.content).key
    file = io.BytesIO()
    picture.save(file, "PNG" if mode == "I;16" else "TIFF") if mode != "HSV" else picture.convert("RGB").save(
        file, "PNG"
    )
    seen, expected = (decode(Item.image(content), SHAPES) for content in (made.content, file.getvalue()))
    np.testing.assert_allclose(seen.values, expected.values, atol=3 / 255 if mode == "YCbCr" else 0)


def test_a_transparent_colour_stays_and_metadata_do_not():
    picture = noise("P")
    picture.info["transparency"] = 0
    plain = Item.image(noise("P"))
    assert Item.image(picture) != plain
    picture = noise("P")
    picture.info |= {"icc_profile": b"x" * 200, "dpi": (300, 300), "comment": "c"}
    assert Item.image(picture) == plain


def test_a_picture_that_lies_on_its_side_is_turned_as_its_file_is():
    exif = Image.Exif()
    exif[0x0112] = 6
    file = io.BytesIO()
    noise("RGB").save(file, "PNG", exif=exif)
    held = Item.image(Image.open(io.BytesIO(file.getvalue())))
    assert Image.open(io.BytesIO(held.content)).size == (7, 9)
    seen, expected = (decode(found, SHAPES).values for found in (held, Item.image(file.getvalue())))
    np.testing.assert_array_equal(seen, expected)


def test_numbers_of_numpy_are_numbers():
    made = item(key=np.uint64(2**64 - 1), group=np.int32(2), choices=b"ab", targets=np.array([0.25, 0.75]))
    assert (type(made.key), type(made.group)) == (int, int)
    assert made.targets == (0.25, 0.75)
    pair = Bag([item(key=1), item(key=2)], attract=np.array([[0, 1]]).tolist(), repel=[(np.int64(1), 0, 0.5)])
    assert pair == Bag((item(key=1), item(key=2)), ((0, 1),), ((1, 0, 0.5),))


@pytest.mark.parametrize(
    ("items", "message"),
    [
        (["a", "b"], r"number 0 of a bag is a str; make it an item: Item.text\(...\)"),
        ([Item.text("a"), b"b"], r"number 1 of a bag is a bytes; make it an item: Item.image"),
        ([Path("a.png")], r"number 0 of a bag is a PosixPath; make it an item: Item.image"),
        ([Image.new("L", (2, 2))], r"number 0 of a bag is a Image; make it an item: Item.image\(...\)"),
        ([Bag((Item.text("a"),))], "number 0 of a bag is a Bag; expected an Item"),
        ([None], "number 0 of a bag is a NoneType; expected an Item"),
        ("ab", "a bag of a str; expected a sequence of items"),
        (Item.text("a"), "a bag of a Item; expected a sequence of items"),
        ([], "a bag is empty; it holds at least one item"),
    ],
)
def test_what_is_no_bag_of_items_is_refused(items, message):
    for make in (Bag, Bag.alike):
        with pytest.raises(ValueError, match=message):
            make(items)


THREE = tuple(Item.text(name) for name in "abc")


@pytest.mark.parametrize("name", ["attract", "repel", "ignore"])
@pytest.mark.parametrize(
    ("links", "message"),
    [
        ([(0, 3)], r"the {name} link \(0, 3\), which names a position outside its 3 items"),
        ([(0, 1), (-1, 0)], r"the {name} link \(-1, 0\), which names a position outside"),
        ([(1, 1)], r"the {name} link \(1, 1\), which is from an item to itself"),
        ([(0, 1.0)], r"the {name} link \(0, 1.0\), which is not \(position, position\)"),
        ([(0, True)], r"which is not \(position, position\)"),
        ([(0, 1), (2,)], r"the {name} link \(2,\), which is not"),
        ([(0, 1), (0, 2, 1.0, 1.0)], r"the {name} link \(0, 2, 1.0, 1.0\), which is not"),
        ([7], "the {name} link 7, which is not"),
        ("01", "the {name} link '01', which is not"),
        (7, "the {name} link 7, which is not"),
        ([(1, 0), (1, 2), (1, 0)], r"the link \(1, 0\) twice in {name}"),
    ],
)
def test_bad_links_are_refused_by_bag(name, links, message):
    with pytest.raises(ValueError, match=message.format(name=name)) as caught:
        Bag(THREE, **{name: links})
    assert f"the bag of 3 items whose first is {THREE[0]}" in str(caught.value)


@pytest.mark.parametrize("weight", [-1.0, np.nan, np.inf, "w", None])
def test_bad_weights_of_links_are_refused(weight):
    with pytest.raises(ValueError, match="whose weight must be a number, finite and at least 0"):
        Bag(THREE, repel=[(0, 1), (0, 2, weight)])


def test_a_pair_in_two_sets_or_ignored_by_weight_is_refused():
    with pytest.raises(ValueError, match=r"the link \(0, 2\) in both attract and ignore"):
        Bag(THREE, attract=((0, 2), (0, 1)), ignore=((0, 2),))
    with pytest.raises(ValueError, match="a pair is ignored or it is not"):
        Bag(THREE, ignore=((1, 0, 1.0),))


@pytest.mark.parametrize("key", [-1, 2**64, 1.5, "k"])
def test_a_bad_key_of_a_bag_is_refused(key):
    with pytest.raises(ValueError, match=r"has key .*; it must be an integer from 0"):
        Bag(THREE, key=key)
