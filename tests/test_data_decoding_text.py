"""Texts to byte tokens, and what the registry of decoders refuses."""

import pickle

import numpy as np
import pytest
from torch.utils.data import DataLoader

from xpmir_uform.data.decoding.registry import DECODERS, UnreadableItem, decode
from xpmir_uform.data.items import Item
from xpmir_uform.data.vocabulary import Modality, Slot


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ab", [97, 98]),
        ("é", [0xC3, 0xA9]),
        ("😀", [0xF0, 0x9F, 0x98, 0x80]),
        ("\0", [0]),
        ("", [Slot.EMPTY]),
    ],
)
def test_bytes_are_tokens(text, expected):
    segment = decode(Item.text(text, key=1), {})
    assert segment.modality is Modality.TEXT
    assert segment.values.dtype == np.int16
    assert segment.values.tolist() == expected
    assert segment.grid == (1, 1, len(expected))
    assert segment.tokens == len(expected)


def test_huge_text_is_legal():
    assert decode(Item.text("x" * 1_000_000, key=1), {}).tokens == 1_000_000


@pytest.mark.parametrize(
    ("content", "place"),
    [
        (b"ab\xff", r"byte 2 \(0xff\)"),
        ("caf\xe9".encode("latin-1"), r"byte 3 \(0xe9\)"),
        ("\ud800".encode("utf-8", "surrogatepass"), r"byte 0 \(0xed\)"),
        ("😀".encode()[:3], r"byte 0 \(0xf0\)"),
        (b"\xc0\x80", r"byte 0 \(0xc0\)"),
    ],
)
def test_other_encodings_are_refused(content, place):
    with pytest.raises(UnreadableItem, match=place) as caught:
        decode(Item(Modality.TEXT, content, key=0xAB), {})
    assert "0x00000000000000ab" in str(caught.value)
    assert caught.value.key == 0xAB


def test_modality_without_shape_is_refused():
    with pytest.raises(ValueError, match=r"item 0x0000000000000007 .*no shape for image items") as caught:
        decode(Item(Modality.IMAGE, b"x", key=7), {})
    assert not isinstance(caught.value, UnreadableItem)


def test_modality_without_decoder_is_refused(monkeypatch):
    monkeypatch.delitem(DECODERS, Modality.IMAGE)
    with pytest.raises(ValueError, match=r"item 0x0000000000000007 .*no decoder of image items"):
        decode(Item(Modality.IMAGE, b"x", key=7), {Modality.IMAGE: object()})


def decode_all(items):
    return [decode(item, {}) for item in items]


def test_error_comes_out_of_a_worker():
    loader = DataLoader(
        [Item.text("good", 1), Item(Modality.TEXT, b"\xff", 0xAB)], num_workers=1, collate_fn=decode_all
    )
    batches = iter(loader)
    assert next(batches)[0].tokens == 4
    with pytest.raises(UnreadableItem, match="item 0x00000000000000ab"):
        next(batches)


def test_error_survives_pickling():
    error = UnreadableItem.of(Item(Modality.IMAGE, b"x", key=7), "no reason")
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.key, copy.reason) == (str(error), 7, "no reason")
    assert str(type(error)("only a message")) == "only a message"
