"""The mutants of ``make mutants`` can still be made; whether the tests notice them is found out by hand."""

from pathlib import Path

import pytest
from mutants.mutants import MUTANTS

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.mistake)
def test_a_mutant_can_be_made(mutant):
    """Its text is there once, and its tests exist."""
    assert (ROOT / mutant.file).read_text().count(mutant.old) == 1
    assert mutant.new != mutant.old
    assert mutant.tests
    assert all((ROOT / "tests" / test).exists() for test in mutant.tests)
