"""Many byte strings as one array."""

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from xpmir_uform.data.batch.tape import Tape


@given(st.lists(st.binary(max_size=5)))
def test_gather_and_read_back(entries):
    tape = Tape.gather(entries)
    assert len(tape) == len(entries)
    assert list(tape) == entries
    assert [tape[number] for number in range(len(entries))] == entries
    assert (tape.data.dtype, tape.offsets.dtype) == (np.uint8, np.uint64)
    assert tape.lengths().tolist() == list(map(len, entries))
    assert list(pickle.loads(pickle.dumps(tape))) == entries


@given(st.lists(st.binary(max_size=5)), st.slices(8))
def test_slices_are_tapes(entries, place):
    part = Tape.gather(entries)[place]
    assert isinstance(part, Tape)
    assert list(part) == entries[place]


def test_slice_shares_its_bytes():
    tape = Tape.gather([b"ab", b"", b"cde", b"f"])
    part = tape[1:3]
    assert part.offsets.tolist() == [0, 0, 3]
    assert np.shares_memory(part.data, tape.data)


def test_select_takes_any_order():
    tape = Tape.gather([b"ab", b"", b"cde"])
    assert list(tape.select([2, 0, 2, -2])) == [b"cde", b"ab", b"cde", b""]
    assert list(tape.select(np.array([1]))) == [b""]
    with pytest.raises(IndexError):
        tape.select([3])


def test_negative_and_outside():
    tape = Tape.gather([b"ab", b"c"])
    assert tape[-1] == b"c"
    for number in (2, -3):
        with pytest.raises(IndexError):
            tape[number]


def test_gathered_bytes_are_safe_from_writing():
    with pytest.raises(ValueError, match="read-only"):
        Tape.gather([b"ab"]).data[0] = 0


@pytest.mark.parametrize(
    ("data", "offsets", "message"),
    [
        (np.zeros(2, np.int8), np.array([0, 2], np.uint64), "data is int8 of shape .*one axis of uint8"),
        (np.zeros((2, 1), np.uint8), np.array([0, 2], np.uint64), r"data is uint8 of shape \(2, 1\)"),
        (b"ab", np.array([0, 2], np.uint64), "data is a bytes; a tape needs a numpy array"),
        (np.zeros(2, np.uint8), np.array([0, 2]), "offsets is int64 .*one axis of uint64"),
        (np.zeros(2, np.uint8), [0, 2], "offsets is a list"),
        (np.zeros(2, np.uint8), np.array([], np.uint64), r"offsets are empty.*\[0\]"),
        (np.zeros(2, np.uint8), np.array([1, 2], np.uint64), "offsets start at 1; they must start at 0"),
        (np.zeros(2, np.uint8), np.array([0, 2, 1, 2], np.uint64), "offsets decrease from 2 to 1 at entry 1"),
        (np.zeros(2, np.uint8), np.array([0, 1], np.uint64), r"offsets end at 1; they must end at len\(data\) = 2"),
        (np.zeros(2, np.uint8), np.array([0, 3], np.uint64), "offsets end at 3"),
    ],
)
def test_refusals(data, offsets, message):
    with pytest.raises(ValueError, match=message):
        Tape(data, offsets)


@pytest.mark.parametrize("entry", ["text", 3, None, bytearray(b"x")])
def test_gather_refuses_what_is_not_bytes(entry):
    with pytest.raises(ValueError, match=f"entry 1 is a {type(entry).__name__}"):
        Tape.gather([b"x", entry])
