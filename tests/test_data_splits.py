"""Splits by content: what shares a text or a file falls on one side."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xpmir_uform.datasets.pairs import Pair
from xpmir_uform.datasets.relevance import questions, wrong_documents
from xpmir_uform.datasets.splits import held_out_first, kin, normalised


@pytest.mark.parametrize(
    "texts",
    [
        ("A  red\tapple!", "a red apple", "«a RED—apple»", "Ａ red\N{NO-BREAK SPACE}apple\N{LINE SEPARATOR}"),
        ("Straße", "STRASSE", "ﬆrasse".replace("ﬆ", "st")),
        ("naïve", "nai\N{COMBINING DIAERESIS}ve"),
        ("हिन्दी भाषा", "हिन्दी, भाषा"),
        ("?", "？"),
    ],
)
def test_normalised_texts_that_are_equal(texts):
    assert len({normalised(text) for text in texts}) == 1
    assert normalised(texts[0])


@pytest.mark.parametrize("texts", [("C", "C++", "C#", "c -"), ("?", "!"), ("हिन्दी", "हनद"), ("a b", "ab"), ("", ".")])
def test_normalised_texts_that_differ(texts):
    assert len({normalised(text) for text in texts}) >= 2


def families(contents):
    found = kin(contents)
    return {frozenset(np.flatnonzero(found == name).tolist()) for name in set(found.tolist())}


def test_kin_share_a_content_directly_or_through_others():
    assert families([["a", b"1"], ["b", b"2"], ["c", b"2"], ["C!", "d"], [b"a"], []]) == {
        frozenset(group) for group in ([0], [1, 2, 3], [4], [5])
    }
    assert families([]) == set()


@st.composite
def holdings(draw):
    """Things, each with some of a few texts; several spellings of each."""
    spelt = st.sampled_from(["{}", " {}!", "“{}”"])
    one = st.tuples(st.integers(0, 11), spelt).map(lambda found: found[1].format(f"Text {found[0]}"))
    return draw(st.lists(st.lists(one, max_size=3), min_size=2, max_size=14))


@settings(max_examples=150, deadline=None)
@given(holdings(), st.integers(1, 6), st.integers(0, 3))
def test_no_text_on_both_sides_and_as_many_held_out_as_asked_for(held, count, seed):
    things = list(range(len(held)))
    try:
        order = held_out_first(things, held.__getitem__, seed=seed, limit=0, held_out=count, name="things")
    except ValueError as error:
        assert "held out together" in str(error) or count >= len(things)  # noqa: PT017
        return
    assert sorted(order) == things
    out, rest = ({normalised(text) for one in part for text in held[one]} for part in (order[:count], order[count:]))
    assert not out & rest


def test_a_split_without_kin_is_the_keyed_order():
    order = held_out_first(range(50), lambda n: [str(n)], seed=3, limit=20, held_out=5, name="numbers")
    plain = held_out_first(range(50), lambda n: [], seed=3, limit=20, held_out=9, name="numbers")
    assert order == plain
    assert len(set(order)) == 20


@pytest.mark.parametrize("limit", [10, 11, 10**6])
def test_a_limit_that_leaves_nothing_out_is_refused(limit):
    """It would be another identifier of the same data."""
    with pytest.raises(ValueError, match=f"limit is {limit} and there are 10 numbers: leave it out"):
        held_out_first(range(10), lambda n: [str(n)], seed=0, limit=limit, held_out=3, name="numbers")


def test_a_number_that_no_families_make_up_is_refused():
    with pytest.raises(
        ValueError, match=r"held_out is 3, and twins that share a text .* together, which makes 2: choose"
    ):
        held_out_first(range(10), lambda n: [str(n // 2)], seed=0, limit=0, held_out=3, name="twins")


SHARED = [
    Pair("a", "mail reader", "Reads mail"),
    Pair("b", "Mail-reader", "Shows letters"),
    Pair("c", "letter viewer", "shows letters."),
    Pair("d", "web browser", "Shows pages"),
    Pair("e", "Shows pages!", "A tool"),
    Pair("f", "file manager", "Moves files"),
]
"""a, b and c are answers of each other, directly or through b; so are d and e."""


def test_wrong_documents_are_never_another_right_answer():
    found = wrong_documents(SHARED, 40)
    kinds = np.array([0, 0, 0, 1, 1, 2])
    assert (kinds[found] != kinds[:, None]).all()
    assert all(set(np.flatnonzero(kinds != kind)) == set(row) for kind, row in zip(kinds, found, strict=True))


def test_no_question_of_relevance_is_answered_in_two_ways():
    answers = [(item.content.decode(), item.targets) for item in questions(SHARED)]
    for (one, yes), (other, no) in combinations(answers, 2):
        assert normalised(one) != normalised(other) or yes == no


def test_pairs_that_are_all_kin_are_refused():
    with pytest.raises(ValueError, match="the 3 pairs share their queries or documents"):
        wrong_documents(SHARED[:3], 1)
