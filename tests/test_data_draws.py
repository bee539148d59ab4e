"""Keyed draws: pure, disjoint, frozen."""

import numpy as np
import pytest

from xpmir_uform.base.keyed_random import Purpose, choose, generator, key_of, permutation


def numbers(*args, **kwargs):
    return generator(*args, **kwargs).integers(0, 2**63, size=8).tolist()


def test_same_arguments_same_numbers():
    assert numbers(1, Purpose.MASK, step=5, key=9) == numbers(1, Purpose.MASK, step=5, key=9)


def test_every_argument_matters():
    base = {"seed": 1, "purpose": Purpose.MASK, "step": 5, "key": 9}
    others = [{"seed": 2}, {"purpose": Purpose.ORDER}, {"step": 6}, {"key": 10}, {"seed": 9, "key": 1}]
    drawn = [numbers(**base), *(numbers(**{**base, **other}) for other in others)]
    assert len({tuple(values) for values in drawn}) == len(drawn)


def test_streams_are_frozen():
    """These numbers decide results of published identifiers: they may never change."""
    assert generator(1, Purpose.BAG, step=2, key=3).integers(0, 1000, size=5).tolist() == [994, 281, 20, 1, 459]
    assert key_of("emoji", "x") == 9058355506294022567
    assert permutation(7, Purpose.ORDER, 0, 6).tolist() == [2, 4, 5, 1, 0, 3]


def test_largest_arguments():
    top = 2**64 - 1
    assert len(numbers(top, Purpose.ORDER, step=top, key=top)) == 8


@pytest.mark.parametrize("name", ["seed", "step", "key"])
@pytest.mark.parametrize("value", [-1, 2**64])
def test_out_of_range_is_refused_by_name(name, value):
    arguments = {"seed": 0, "step": 0, "key": 0, name: value}
    with pytest.raises(ValueError, match=rf"{name} is {value}, expected an integer in \[0, 2\*\*64\)"):
        generator(arguments["seed"], Purpose.ORDER, arguments["step"], arguments["key"])


def test_keys_do_not_confuse_their_parts():
    assert key_of("ab", "c") != key_of("a", "bc") != key_of("abc")


def test_permutations_hold_each_number_once_and_differ_by_epoch():
    first, second = (permutation(3, Purpose.ORDER, epoch, 100) for epoch in (0, 1))
    assert sorted(first.tolist()) == list(range(100))
    assert first.tolist() != second.tolist()
    with pytest.raises(ValueError, match="read-only"):
        first[0] = 1


def test_choices_are_uniform_over_options():
    counts = dict.fromkeys("abcde", 0)
    for key in range(2000):
        for option in choose(generator(0, Purpose.BAG, key=key), "abcde", 2):
            counts[option] += 1
    # Each option is chosen 2000 * 2 / 5 = 800 times on average, with a standard deviation of 22.
    assert all(abs(count - 800) < 110 for count in counts.values())
    assert np.sum(list(counts.values())) == 4000
