"""What a trained model answers: encode, encode_tokens, score, choose."""

from dataclasses import replace
from io import BytesIO, StringIO
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from xpmir_uform import ByteHead, ImageShape, Item, Modality, PooledHead, TokenHead, UFormEncoder
from xpmir_uform.data.decoding.registry import decode
from xpmir_uform.model import pack
from xpmir_uform.model.inference import batches, scoring

TEXTS = ["hello", "", "a somewhat longer name", "é", "hello", "yes or no?"]


def build(**heads):
    given = {"pooled": PooledHead.C(width=24), "tokens": TokenHead.C(width=16), "bytes": ByteHead.C(), **heads}
    model = UFormEncoder.C(depth=2, hidden=128, image=ImageShape.C(patch_side=4, max_side=16), **given).instance()
    model.initialize()
    return model


@pytest.fixture(scope="module")
def model():
    return build()


def picture(key, width, height):
    pixels = np.random.default_rng(key).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return Item(Modality.IMAGE, file.getvalue(), key)


def items():
    return [Item.text(TEXTS[0]), picture(1, 16, 16), *TEXTS[1:4], picture(2, 3, 16), *TEXTS[4:]]


def alone(model, thing, **asked):
    """The answers about one item, from a forward pass of its own."""
    item = thing if isinstance(thing, Item) else Item.text(thing)
    segment = decode(item, model.shapes)
    asked = {"kept": segment.tokens, "answers": True, **asked}
    with torch.no_grad():
        return model(pack([replace(segment, **asked)]))


@pytest.mark.parametrize("batch_tokens", [1, 20, 16_384])
def test_answers_are_those_of_each_item_alone_in_order(model, batch_tokens):
    given = items()
    embeddings = model.encode(given, batch_tokens)
    vectors, offsets = model.encode_tokens(given, batch_tokens)
    probabilities = model.choose(given, b"yn?", batch_tokens)
    both = model.encode_both(given, batch_tokens)
    torch.testing.assert_close(both, (embeddings, vectors, offsets), rtol=1e-5, atol=1e-6)
    assert offsets[0] == 0
    assert offsets[-1] == len(vectors)
    assert len(offsets) == len(given) + 1
    for place, thing in enumerate(given):
        expected = alone(model, thing)
        torch.testing.assert_close(embeddings[place], expected.embeddings[0], rtol=1e-5, atol=1e-6)
        own = vectors[offsets[place] : offsets[place + 1]]
        torch.testing.assert_close(own, expected.tokens, rtol=1e-5, atol=1e-6)
        legal = expected.choices[0, list(b"yn?")].softmax(0)
        torch.testing.assert_close(probabilities[place], legal, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("call", ["encode", "encode_tokens", "choose"])
def test_a_pass_has_as_many_tokens_as_are_allowed_unless_it_is_of_one_item(model, call):
    passes = []
    hook = model.register_forward_pre_hook(lambda _, given: passes.append(given[0]))
    getattr(model, call)([*TEXTS, "x" * 99] * 5, *((b"yn",) if call == "choose" else ()), batch_tokens=24)
    hook.remove()
    assert sum(packed.items for packed in passes) == 35
    assert max(packed.tokens + sum(packed.answers) for packed in passes if packed.items > 1) in range(12, 25)
    assert sum(packed.items == 1 for packed in passes) <= 12


def test_token_vectors_are_unit_and_may_be_cut(model):
    vectors, offsets = model.encode_tokens(items())
    torch.testing.assert_close(vectors.norm(dim=1), torch.ones(len(vectors)))
    cut, starts = model.encode_tokens(items(), max_span=3)
    assert starts.diff().tolist() == [min(3, length) for length in offsets.diff().tolist()]
    for place in range(len(items())):
        whole = vectors[offsets[place] : offsets[place + 1]][:3]
        torch.testing.assert_close(cut[starts[place] : starts[place + 1]], whole, rtol=1e-5, atol=1e-6)


def test_scores_are_the_mean_of_the_best_cosines(model):
    queries, documents = TEXTS[:3], items()[1:6]
    expected = torch.stack(
        [
            torch.stack([(alone(model, q).tokens @ alone(model, d).tokens.T).amax(1).mean() for d in documents])
            for q in queries
        ]
    )
    scores = model.score(queries, documents)
    torch.testing.assert_close(scores, expected, rtol=1e-5, atol=1e-6)
    pairs = [(2, 0), (0, 4), (2, 0)]
    for given in (pairs, torch.tensor(pairs), np.array(pairs)):
        listed = model.score(queries, documents, given)
        torch.testing.assert_close(listed, expected[[2, 0, 2], [0, 4, 0]], rtol=1e-5, atol=1e-6)
    assert model.score(queries, documents, []).shape == (0,)
    short = (alone(model, TEXTS[0], kept=2).tokens @ alone(model, TEXTS[2]).tokens.T).amax(1).mean()
    found = model.score(TEXTS[:1], TEXTS[2:3], max_query_span=2)
    torch.testing.assert_close(found[0, 0], short, rtol=1e-5, atol=1e-6)


def test_scores_are_made_in_blocks_that_bound_memory(model, monkeypatch):
    queries = [*TEXTS, "a query that is a good deal longer than all the others"]
    pairs = [(q, d) for q in range(len(queries)) for d in (3, 0)]
    expected = model.score(queries, TEXTS), model.score(queries, TEXTS, pairs)
    made, cells = scoring.maxsim, []

    def noted(vectors, offsets, documents, starts, pairs=None):
        cells.append(len(vectors) * (len(starts) - 1) if pairs is None else int(offsets.diff()[pairs[:, 0]].sum()))
        return made(vectors, offsets, documents, starts, pairs)

    monkeypatch.setattr(scoring, "maxsim", noted)
    for limit in (1, 400, 800):
        monkeypatch.setattr(scoring, "CELLS", limit)
        cells.clear()
        torch.testing.assert_close(model.score(queries, TEXTS), expected[0], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(model.score(queries, TEXTS, pairs), expected[1], rtol=1e-5, atol=1e-6)
        assert max(cells) <= limit or limit == 1
        assert len(cells) > 2


def test_what_can_be_walked_once_is_answered_whole(model):
    """A generator is no sequence; walked twice it would be answered as nothing."""
    assert torch.equal(model.encode(text for text in TEXTS), model.encode(TEXTS))
    assert torch.equal(model.choose_packed(iter(TEXTS), b"yn")[0], model.choose_packed(TEXTS, b"yn")[0])


def test_probabilities_packed_and_as_lists(model):
    choices = [b"a", b"yn", b"\x00\xff\x80", b"yn", b"ny", bytes(range(256))]
    rows = model.choose(TEXTS, choices)
    packed, offsets = model.choose_packed(TEXTS, choices)
    assert [len(row) for row in rows] == offsets.diff().tolist() == [1, 2, 3, 2, 2, 256]
    assert torch.equal(torch.cat(rows), packed)
    torch.testing.assert_close(torch.stack([row.sum() for row in rows]), torch.ones(6))
    torch.testing.assert_close(model.choose(TEXTS[4:5], [b"yn"])[0], rows[4].flip(0))
    own = [Item.text(text, choices=each) for text, each in zip(TEXTS, choices, strict=True)]
    assert torch.equal(model.choose_packed(own)[0], packed)
    assert torch.equal(model.choose_packed(TEXTS, b"yn")[0][2:4], model.choose_packed(TEXTS, [b"yn"] * 6)[0][2:4])


def test_nothing_is_answered_of_nothing(model):
    assert model.encode([]).shape == (0, 24)
    assert [part.shape for part in model.encode_tokens([])] == [(0, 16), (1,)]
    assert model.choose([], b"yn") == []
    assert model.score([], ["a"]).shape == (0, 1)


@pytest.mark.parametrize("call", ["encode", "encode_tokens", "choose"])
def test_modes_are_restored_and_there_is_no_graph(model, call):
    model.train()
    model.pooling.eval()
    before = [part.training for part in model.modules()]
    arguments = (b"yn",) if call == "choose" else ()
    found = getattr(model, call)(TEXTS, *arguments)
    assert not (found if call == "encode" else found[0]).requires_grad
    assert [part.training for part in model.modules()] == before
    with pytest.raises(ValueError, match="is not UTF-8"):
        getattr(model, call)([Item(Modality.TEXT, b"\xff", 0)], *arguments)
    assert [part.training for part in model.modules()] == before
    assert torch.is_grad_enabled()
    model.eval()


@pytest.mark.parametrize(
    ("call", "head", "message"),
    [
        (lambda m: m.encode(["a"]), "pooled", r"no pooled head: build it with pooled=PooledHead"),
        (lambda m: m.encode_tokens(["a"]), "tokens", r"no token head: build it with tokens=TokenHead"),
        (lambda m: m.score(["a"], ["b"]), "tokens", r"no token head: build it with tokens=TokenHead"),
        (lambda m: m.choose(["a"], b"yn"), "bytes", r"no byte head: build it with bytes=ByteHead"),
    ],
)
def test_a_model_without_the_head_is_refused(call, head, message):
    with pytest.raises(ValueError, match=message):
        call(build(**{head: None}))


EACH = (
    lambda m, items: m.encode(items),
    lambda m, items: m.encode_tokens(items),
    lambda m, items: m.encode_both(items),
    lambda m, items: m.score(items, ["b"]),
    lambda m, items: m.score(["b"], items),
    lambda m, items: m.choose(items, b"yn"),
    lambda m, items: m.choose_packed(items, b"yn"),
)
"""Every public method that takes items."""


@pytest.mark.parametrize("call", EACH)
def test_what_is_no_sequence_of_items_is_refused(model, call):
    for given, message in [
        ({"doc1": "a"}, "got a dict, of which the keys would be taken: pass its values in a list"),
        ({"a", "b"}, r"got a set, which has no order: pass sorted\(x\)"),
        (StringIO("a\nb\n"), r"an open file \(StringIO\), whose lines end in line breaks"),
        (bytearray(b"ab"), "got one bytearray: put it in a list"),
    ]:
        with pytest.raises(ValueError, match=message):
            call(model, given)


def test_any_iterable_of_items_is_taken(model):
    expected = model.encode(["a", "b"])
    named = {"x": "a", "y": "b"}
    for given in (("a", "b"), np.array(["a", "b"]), (text for text in "ab"), named.values(), {"a": 0, "b": 0}.keys()):
        assert torch.equal(model.encode(given), expected)


def test_a_picture_of_pillow_is_taken(model):
    held = Image.new("RGB", (8, 8), "red")
    assert torch.equal(model.encode([held, "a"]), model.encode([Item.image(held), "a"]))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: m.encode("one"), "expected a sequence of texts or items and got one str: put it in a list"),
        (lambda m: m.encode(Item.text("one")), "got one Item: put it in a list"),
        (lambda m: m.encode([b"one"]), r"number 0 is a bytes: make it an item: Item.image\(...\), Item.audio"),
        (lambda m: m.encode(None), "got one NoneType: put it in a list"),
        *(
            (
                lambda m, call=call: call(m, {"doc1": "a"}),
                "got a dict, of which the keys would be taken: pass its values in",
            )
            for call in EACH
        ),
        *(
            (lambda m, call=call: call(m, {"a", "b"}), r"got a set, which has no order: pass sorted\(x\)")
            for call in EACH
        ),
        *(
            (lambda m, call=call: call(m, StringIO("a\nb\n")), r"an open file \(StringIO\), whose lines end")
            for call in EACH
        ),
        (lambda m: m.choose(["a"], {b"y": b"n"}), "of choices and got a dict, of which the keys would be taken"),
        (lambda m: m.choose(["a"], "yn"), "the choices are a str: give one bytes for all items"),
        (lambda m: m.encode([None]), "number 0 is a NoneType: expected a text or an Item"),
        (lambda m: m.encode(["a", Path("b.png")]), r"number 1 is a PosixPath: make it an item: Item.image\("),
        (lambda m: m.encode(["a", "\udcff"]), r"the text '\\udcff' is no UTF-8"),
        (lambda m: m.encode(["a"], batch_tokens=0), "batch_tokens is 0: expected a whole number, at least 1"),
        (lambda m: m.encode(["a"], batch_tokens="7"), "batch_tokens is '7': expected a whole number"),
        (lambda m: m.encode([Item(Modality.AUDIO, b"x", 0)]), "no audio input"),
        (lambda m: m.encode_tokens(["a"], max_span=0), "max_span is 0"),
        (lambda m: m.encode_tokens(["a"], max_span=2.5), "max_span is 2.5: expected a whole number"),
        (lambda m: m.score(["a"], ["b"], max_query_span=0), "max_query_span is 0: expected a whole number"),
        (lambda m: m.score(["a"], ["b"], [(0, 1)]), r"pairs\[0, 1\] = 1 names no document"),
        (lambda m: m.score(["a"], ["b"], [(0, 0, 0), (0, 0, 0)]), r"shape \(2, 3\), expected \(P, 2\)"),
        (lambda m: m.score(["a"], ["b"], [0, 0]), r"shape \(2,\), expected \(P, 2\)"),
        (lambda m: m.score(["a"], ["b"], [(0, 0), (0,)]), "pairs are no table of numbers"),
        (lambda m: m.score(["a"], ["b"], zip([0], [0], strict=True)), "pairs are no table of numbers"),
        (lambda m: m.score(["a"], ["b"], [(0.0, 0.0)]), "it must hold integers"),
        (lambda m: m.choose(["a"], 3), "the choices are a int: give one bytes for all items, or one each"),
        (lambda m: m.choose(["a", "b"], [b"yn"]), "there are 1 choices for 2 items"),
        (lambda m: m.choose(["a"], b"yy"), r"item 0x[0-9a-f]{16} \(text, 1 bytes\) is offered b'yy': expected bytes"),
        (lambda m: m.choose(["a"], [b""]), "is offered b'': expected bytes, at least one"),
        (lambda m: m.choose(["a"]), "is offered b''"),
        (lambda m: m.choose(["a"], ["yn"]), "is offered 'yn': expected bytes"),
    ],
)
def test_impossible_requests_are_refused(model, call, message):
    with pytest.raises(ValueError, match=message):
        call(model)


def test_a_model_in_float64_answers_in_float64():
    wide = build().double()
    assert wide.encode(TEXTS).dtype == wide.encode_tokens(TEXTS)[0].dtype == torch.float64
    assert wide.score(TEXTS, TEXTS).dtype == wide.choose(TEXTS, b"yn")[0].dtype == torch.float64


def test_a_bar_shows_when_it_takes_long(model, monkeypatch, capsys):
    model.encode(TEXTS)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(batches, "PATIENCE", 0)
    model.encode(TEXTS)
    assert "Encoding: 100%" in capsys.readouterr().err
