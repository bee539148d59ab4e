"""Masks: how much is hidden and where, what stands in its place, and on what that depends."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xpmir_uform.base.keyed_random import Purpose, generator
from xpmir_uform.data.decoding.segment import Segment, blank_text
from xpmir_uform.data.vocabulary import Modality, Slot
from xpmir_uform.losses.masking import (
    corrupted,
    mask_patches,
    mask_text,
    places_of,
    rounded,
    span_level,
    spans,
    standardised,
)

DRAWS = 10_000


def drawing(key, step=0, seed=7):
    return generator(seed, Purpose.MASK, step, key)


def text(length, seed=0):
    values = np.random.default_rng(seed).integers(0, 256, length).astype(np.int16)
    return Segment(Modality.TEXT, values, (1, 1, length))


def picture(tokens, values=12):
    patches = np.random.default_rng(0).normal(size=(tokens, values)).astype(np.float32)
    return Segment(Modality.IMAGE, patches, (1, 1, tokens))


def assert_within_one_span(chosen, length, probability, mean, lengths):
    wanted = probability * length
    assert chosen > wanted - mean - 1e-9
    assert chosen <= wanted + 1e-9 or chosen < wanted + lengths.max() + 1e-9


@pytest.mark.parametrize(
    ("length", "probability", "mean"), [(12, 0.15, 3.0), (12, 0.5, 20.0), (200, 0.15, 3.0), (200, 0.6, 5.0)]
)
def test_every_draw_is_within_one_span_of_the_target_and_their_mean_on_it(length, probability, mean):
    counts = np.empty(DRAWS)
    for key in range(DRAWS):
        _, lengths = spans(length, probability, mean, drawing(key))
        counts[key] = lengths.sum()
        assert_within_one_span(counts[key], length, probability, mean, lengths)
    error = 4 * counts.std() / DRAWS**0.5
    assert abs(counts.mean() - probability * length) < error < 0.06 * length


@pytest.mark.parametrize(("mean", "length"), [(1.0, 40), (1.5, 60), (3.0, 200), (20.0, 2000)])
def test_the_mean_length_of_spans_and_of_the_runs_they_leave(mean, length):
    """Runs of chosen bytes: spans do not touch, so that what the model sees has the mean that was asked for."""
    runs = chosen = 0
    for key in range(DRAWS):
        places = places_of(*spans(length, 0.15, mean, drawing(key)))
        chosen += len(places)
        runs += int(len(places) > 0) + int((np.diff(places) > 1).sum())
    assert chosen / runs == pytest.approx(mean, rel=0.03)


def test_lengths_are_geometric():
    lengths = np.concatenate([spans(300, 0.15, 3.0, drawing(key))[1] for key in range(DRAWS)])
    for value in range(1, 7):
        expected = (1 / 3) * (2 / 3) ** (value - 1)
        assert (lengths == value).mean() == pytest.approx(expected, rel=0.03)


def test_every_place_of_a_text_is_chosen_equally_often_but_for_its_ends():
    hits = np.zeros(100)
    for key in range(DRAWS):
        hits[places_of(*spans(100, 0.3, 3.0, drawing(key)))] += 1
    assert hits[5:-5] / DRAWS == pytest.approx(np.full(90, 0.3), abs=0.03)
    assert hits.min() / DRAWS > 0.1
    assert hits[:50].sum() == pytest.approx(hits[50:].sum(), rel=0.01)


@settings(deadline=None, max_examples=300)
@given(st.integers(0, 70), st.floats(0, 1), st.floats(1, 30), st.integers(0, 2**63))
def test_spans_are_in_order_within_the_text_and_touch_only_without_room(length, probability, mean, key):
    starts, lengths = spans(length, probability, mean, drawing(key))
    assert (lengths > 0).all()
    ends = starts + lengths
    assert all(start >= 0 and end <= length for start, end in zip(starts, ends, strict=True))
    gaps = [start - end for end, start in zip(ends, starts[1:], strict=False)]
    roomy = length - lengths.sum() >= len(starts) - 1
    assert all(gap >= (1 if roomy else 0) for gap in gaps)
    if length:
        assert_within_one_span(lengths.sum(), length, probability, mean, lengths if len(lengths) else np.zeros(1))


@pytest.mark.parametrize("length", [0, 1, 2, 3, 50])
@pytest.mark.parametrize("mean", [1.0, 3.0, 20.0])
def test_no_probability_chooses_nothing_and_all_of_it_everything(length, mean):
    for key in range(200):
        assert len(places_of(*spans(length, 0.0, mean, drawing(key)))) == 0
        assert places_of(*spans(length, 1.0, mean, drawing(key))).tolist() == list(range(length))


def test_the_level_by_hand():
    """Of 2 bytes with a mean of 2, one span is 1 or 2 bytes long: 1.5 in the mean. Half of them is 1 byte: 2 in 3."""
    levels = [span_level(2, 0.5, 2.0, drawing(key)) for key in range(DRAWS)]
    assert set(levels) == {0, 1}
    assert np.mean(levels) == pytest.approx(2 / 3, abs=0.02)


def test_a_text_of_one_byte_is_masked_as_often_as_asked():
    masked = [len(mask_text(text(1), 0.15, 20.0, (0.8, 0.1), drawing(key)).masked) for key in range(DRAWS)]
    assert np.mean(masked) == pytest.approx(0.15, abs=0.015)


def test_an_empty_text_is_never_masked():
    empty = blank_text(1)
    assert mask_text(empty, 1.0, 3.0, (1.0, 0.0), drawing(0)) is empty


def test_the_split_of_replacements():
    chosen = np.full(DRAWS, 65)
    found = corrupted(chosen, 0.8, 0.1, drawing(0))
    assert (found == Slot.MASK).mean() == pytest.approx(0.8, abs=0.01)
    # A random byte is the byte itself once in 256 times.
    assert (found == 65).mean() == pytest.approx(0.1 + 0.1 / 256, abs=0.01)
    others = found[(found != Slot.MASK) & (found != 65)]
    assert len(others) / DRAWS == pytest.approx(0.1 * 255 / 256, abs=0.01)
    assert others.min() >= 0
    assert others.max() <= 255
    assert len(np.unique(others)) > 240


@pytest.mark.parametrize(("fractions", "expected"), [((1.0, 0.0), Slot.MASK), ((0.0, 0.0), 65)])
def test_all_replaced_or_none(fractions, expected):
    assert set(corrupted(np.full(1000, 65), *fractions, drawing(1))) == {expected}


def test_a_masked_text_holds_the_truth_beside_what_stands_there():
    given = text(60)
    masked = mask_text(given, 0.5, 3.0, (0.8, 0.1), drawing(3))
    assert masked.truth.tolist() == given.values[masked.masked].tolist()
    assert masked.truth.dtype == masked.masked.dtype == np.int64
    assert masked.values.dtype == np.int16
    others = np.setdiff1d(np.arange(60), masked.masked)
    assert np.array_equal(masked.values[others], given.values[others])
    assert (masked.values[masked.masked] == Slot.MASK).any()
    assert np.array_equal(given.values, text(60).values)


@pytest.mark.parametrize(("tokens", "ratio"), [(1, 0.75), (7, 0.5), (16, 0.75)])
def test_patches_are_masked_uniformly_and_as_many_as_asked(tokens, ratio):
    hits, given = np.zeros(tokens), picture(tokens)
    for key in range(DRAWS):
        masked = mask_patches(given, ratio, drawing(key)).masked
        assert abs(len(masked) - ratio * tokens) < 1
        hits[masked] += 1
    assert hits / DRAWS == pytest.approx(np.full(tokens, ratio), abs=0.02)


@pytest.mark.parametrize("tokens", [1, 2, 16])
def test_no_ratio_masks_no_patch_and_all_of_it_every_one(tokens):
    for key in range(100):
        none, every = (mask_patches(picture(tokens), ratio, drawing(key)) for ratio in (0.0, 1.0))
        assert len(none.masked) == len(none.truth) == 0
        assert every.masked.tolist() == list(range(tokens))


def test_a_number_is_rounded_such_that_its_mean_stays():
    assert {rounded(3.0, drawing(key)) for key in range(100)} == {3}
    assert np.mean([rounded(2.3, drawing(key)) for key in range(DRAWS)]) == pytest.approx(2.3, abs=0.02)


def test_targets_have_no_mean_and_unit_deviation():
    told = standardised(np.array([[0.0, 2.0, 4.0], [1.0, 1.0, 4.0]], np.float32))
    assert told.dtype == np.float32
    assert told[0].tolist() == pytest.approx([-(1.5**0.5), 0.0, 1.5**0.5], rel=1e-5)
    assert told.mean(axis=1) == pytest.approx([0, 0], abs=1e-6)
    assert told.std(axis=1) == pytest.approx([1, 1], rel=1e-5)


def test_a_patch_of_one_colour_has_a_finite_target():
    told = standardised(np.array([[0.3] * 5, [-1.0] * 5], np.float32))
    assert np.abs(told).max() < 1e-3
    assert standardised(np.ones((2, 1), np.float32)).tolist() == [[0.0], [0.0]]


@pytest.mark.parametrize(
    "make",
    [lambda draw: mask_text(text(80), 0.15, 3.0, (0.8, 0.1), draw), lambda draw: mask_patches(picture(16), 0.5, draw)],
    ids=["text", "picture"],
)
def test_a_mask_is_a_function_of_seed_step_and_key(make):
    def mask(**key):
        masked = make(drawing(**key))
        return masked.masked.tolist(), np.asarray(masked.values).tolist()

    assert mask(key=5, step=2) == mask(key=5, step=2)
    for one, other in pairwise([{"key": 5, "step": 2}, {"key": 5, "step": 3}, {"key": 6, "step": 3}]):
        assert mask(**one) != mask(**other)
    assert mask(key=5, seed=1) != mask(key=5, seed=2)
