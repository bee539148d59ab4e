"""Pictures of reconstructions: what is shown is what was hidden and told."""

import base64
import io
import re

import numpy as np
import pytest
import torch
from PIL import Image

from xpmir_uform import ByteHead, ImageShape, Item, MaskedLoss, Modality, PatchHead, UFormEncoder
from xpmir_uform.data.decoding.registry import decode
from xpmir_uform.data.vocabulary import Slot
from xpmir_uform.losses.masking import standardised
from xpmir_uform.reports.reconstruction import (
    HIDDEN,
    PictureReconstruction,
    draw,
    pixels,
    readable,
    reconstruct,
    runs,
    write_page,
)

SHAPE = {"patch_side": 4, "max_side": 16}


def png(pixels):
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return Item(Modality.IMAGE, file.getvalue(), 7)


PIXELS = np.random.default_rng(0).integers(0, 256, (8, 16, 3), dtype=np.uint8)


@pytest.fixture(scope="module")
def model():
    made = UFormEncoder.C(
        depth=1, hidden=128, image=ImageShape.C(**SHAPE), bytes=ByteHead.C(), patches=PatchHead.C()
    ).instance()
    made.initialize()
    return made


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("patch_side", [1, 3, 4])
def test_pixels_are_what_was_cut_into_patches(patch_side, channels):
    """A grey patch whose number of values is a multiple of 3 is grey all the same."""
    shape = ImageShape.C(patch_side=patch_side, max_side=16, channels=channels).instance()
    sides = 2 * patch_side, 3 * patch_side
    given = PIXELS[: sides[0], : sides[1]] if channels == 3 else PIXELS[: sides[0], : sides[1], 0]
    segment = decode(png(given), {Modality.IMAGE: shape})
    assert np.array_equal(pixels(segment.values, segment.grid, channels).reshape(given.shape), given)


@pytest.mark.parametrize("channels", [1, 3])
def test_a_picture_of_one_row_or_column_of_pixels_is_shown(tmp_path, channels):
    made = UFormEncoder.C(
        depth=1,
        hidden=128,
        image=ImageShape.C(patch_side=1, max_side=4, channels=channels),
        bytes=ByteHead.C(),
        patches=PatchHead.C(),
    ).instance()
    made.initialize()
    shown = [reconstruct(made, MaskedLoss.C().instance(), png(PIXELS[:rows, :4])) for rows in (1, 4)]
    shown.append(reconstruct(made, MaskedLoss.C().instance(), png(PIXELS[:4, :1])))
    write_page(tmp_path / "shown.html", shown, "Title", "")
    pictures = re.findall(r"data:image/png;base64,([^\"]+)", (tmp_path / "shown.html").read_text())
    sizes = [Image.open(io.BytesIO(base64.b64decode(picture))).size for picture in pictures]
    assert sizes == [(4, 1)] * 3 + [(4, 4)] * 3 + [(1, 4)] * 3


def test_a_picture_that_is_told_rightly_is_the_original(model, monkeypatch):
    """The decoder answers the targets themselves; shown patches stay, hidden ones come back."""
    loss = MaskedLoss.C(image_mask_ratio=0.5).instance()
    whole = decode(png(PIXELS), model.shapes)
    asked = loss.ask(whole, png(PIXELS), 0, 0)
    truth = torch.from_numpy(standardised(whole.values[asked.masked]))
    monkeypatch.setattr(model.patch_decoders["image"], "forward", lambda states: truth)
    shown = reconstruct(model, loss, png(PIXELS))
    assert np.array_equal(shown.original, PIXELS)
    assert np.abs(shown.reconstructed.astype(int) - PIXELS).max() <= 1
    grey = (shown.masked == 200).all(axis=2).reshape(2, 4, 4, 4).all(axis=(1, 3)).flatten()
    assert np.flatnonzero(grey).tolist() == asked.masked.tolist()


def test_a_text_shows_what_was_chosen_and_the_likeliest_bytes(model, monkeypatch):
    loss = MaskedLoss.C(token_mask_probability=1.0, replace_fraction=1.0, random_fraction=0.0).instance()
    logits = torch.zeros(3, 256)
    logits[range(3), [ord(letter) for letter in "dog"]] = 1
    monkeypatch.setattr(model.byte_decoder, "forward", lambda states: logits)
    shown = reconstruct(model, loss, Item.text("cat"))
    assert (shown.original, shown.masked) == ([("cat", True)], [(HIDDEN * 3, True)])
    assert shown.reconstructed == [("dog", True)]


def test_nothing_hidden_is_shown_as_it_is(model):
    loss = MaskedLoss.C(token_mask_probability=0.0, image_mask_ratio=0.0).instance()
    text, picture = reconstruct(model, loss, Item.text("cat")), reconstruct(model, loss, png(PIXELS))
    assert text.reconstructed == text.masked == text.original == [("cat", False)]
    assert np.array_equal(picture.reconstructed, picture.original)


def test_runs_and_what_is_no_text():
    values = np.array([*"aü".encode(), Slot.MASK, 0xFF, 10], np.int16)
    assert runs(values, np.array([3])) == [("aü", False), (HIDDEN, True), ("\N{REPLACEMENT CHARACTER}" * 2, False)]
    assert readable([Slot.EMPTY]) == ""


def test_sounds_are_refused(model):
    with pytest.raises(ValueError, match="cannot be shown, expected a text or a picture"):
        reconstruct(model, MaskedLoss.C().instance(), Item(Modality.AUDIO, b"x", 1))


@pytest.mark.parametrize("kinds", ["both", "pictures", "texts"])
def test_drawn_as_a_picture_and_as_a_page_that_needs_nothing_else(model, tmp_path, kinds):
    loss = MaskedLoss.C(token_mask_probability=0.5).instance()
    items = {"pictures": [png(PIXELS)] * 3, "texts": [Item.text("<b>bold</b> & so on")] * 2}
    given = [*items["pictures"], *items["texts"]] if kinds == "both" else items[kinds]
    shown = [reconstruct(model, loss, item) for item in given]
    draw(tmp_path / "shown.png", shown, "Title")
    picture = Image.open(tmp_path / "shown.png")
    assert len(picture.convert("RGB").getcolors(10**6)) > 20
    write_page(tmp_path / "shown.html", shown, "A <title>", "A note")
    page = (tmp_path / "shown.html").read_text()
    assert "A &lt;title&gt;" in page
    assert "<b>" not in page
    assert not re.search(r"(src|href)=\"(?!data:)", page)
    pictures = re.findall(r"data:image/png;base64,([^\"]+)", page)
    assert len(pictures) == (0 if kinds == "texts" else 9)
    if pictures:
        assert np.array_equal(np.asarray(Image.open(io.BytesIO(base64.b64decode(pictures[0])))), PIXELS)
    assert page.count("<mark>") == sum(was for one in shown[-2:] for was in marks(one))


def test_grey_is_drawn_as_it_is(tmp_path):
    """Not spread over black to white, each picture by itself."""
    dim = np.tile(np.array([[[100], [140]]], np.uint8), (8, 4, 1))
    draw(tmp_path / "shown.png", [PictureReconstruction(dim, dim, dim)], "")
    shown = Image.open(tmp_path / "shown.png").convert("L").histogram()
    assert min(shown[100], shown[140]) > 100 > shown[0]


def marks(one):
    """Whether each run of a text's three lines was chosen."""
    if not hasattr(one.original, "append"):
        return []
    return [was for name in ("original", "masked", "reconstructed") for _, was in getattr(one, name)]
