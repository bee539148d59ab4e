"""What a validation measured outlives damage to its files."""

import json
import os

import pytest

from xpmir_uform.evaluation.history import read_history, sealed_path, write_history

HISTORY = {"1": {"MRR": 0.25, "R@1": 0.125}, "3": {"MRR": 0.5, "R@1": 0.375}}


@pytest.fixture
def path(tmp_path):
    write_history(tmp_path / "history.json", HISTORY)
    return tmp_path / "history.json"


DAMAGES = {
    "cut": lambda file: file.write_bytes(file.read_bytes()[:40]),
    "empty": lambda file: file.write_bytes(b""),
    "a list": lambda file: file.write_text("[1]"),
    "deep": lambda file: file.write_text("[" * 200_000),
    "absent": lambda file: file.unlink(),
    "a pipe": lambda file: (file.unlink(), os.mkfifo(file)),
    "a folder": lambda file: (file.unlink(), file.mkdir()),
    "a link": lambda file: (file.unlink(), file.symlink_to("/dev/zero")),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_either_file_is_enough(path, damage):
    assert json.loads(path.read_text()) == HISTORY
    damage(sealed_path(path))
    assert read_history(path, "MRR") == HISTORY
    write_history(path, HISTORY)
    assert read_history(path, "MRR") == HISTORY
    write_history(tmp := path.with_name("other.json"), HISTORY)
    damage(tmp)
    assert read_history(tmp, "MRR") == HISTORY


def test_a_flipped_digit_is_not_believed(path):
    path.write_text(path.read_text().replace("0.25", "0.95"))
    assert read_history(path, "MRR") == HISTORY


def test_both_damaged_says_what_to_do_and_none_is_the_beginning(path, tmp_path):
    path.write_text('{"1": {"MRR": "much"}}')
    sealed_path(path).write_text(sealed_path(path).read_text().replace("0.25", "0.95"))
    with pytest.raises(ValueError, match="Put one back from a copy; or move both away"):
        read_history(path, "MRR")
    assert read_history(tmp_path / "none.json", "MRR") == {}


def test_a_history_of_an_older_version_is_read(path):
    sealed_path(path).unlink()
    assert read_history(path, "MRR") == HISTORY
    with pytest.raises(ValueError, match="cannot be read"):
        read_history(path, "nDCG@10")
