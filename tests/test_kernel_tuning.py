"""The script that chooses block sizes: without a GPU it says so; in Triton's interpreter every row is looked for."""

import importlib
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
from uform_kernels.targets import row_for

ROOT = Path(__file__).parents[1]


def tune(*arguments, interpret):
    environment = os.environ | {"PYTHONPATH": str(ROOT / "kernels"), "TRITON_INTERPRET": interpret}
    script = [sys.executable, "-W", "ignore", ROOT / "benchmarks" / "tune_kernels.py", *arguments]
    return subprocess.run(script, capture_output=True, text=True, check=False, env=environment)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_it_says_so():
    done = tune(interpret="0")
    assert (done.returncode, done.stdout) == (2, "")
    assert "GPU" in done.stderr


def test_candidates_are_checked_and_rows_printed():
    done = tune("--ops", "pair_loss", "choice_loss", interpret="1")
    assert (done.returncode, done.stderr) == (0, "")
    now = importlib.import_module("uform_kernels.ops.choice_loss.kernel").TABLE[""]
    assert f'ops/choice_loss/kernel.py, TABLE: "sm_90": {now},'.replace("'", '"') in done.stdout
    assert "ops/pair_loss/kernel.py, TABLE[4]" in done.stdout


def test_the_search_keeps_what_is_clearly_faster(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    descend = importlib.import_module("tune_kernels").descend
    grid = {"R": (8, 16, 32), "C": (64, 128)}
    times = {(8, 64): 9, (16, 64): 10, (32, 64): 4, (8, 128): 9.9, (16, 128): 8, (32, 128): math.inf}
    found = [descend({"R": r, "C": c, "W": 1}, grid, lambda row: times[row["R"], row["C"]]) for r, c in times]
    # (16, 128) is a valley of its own; nothing follows from a candidate that does not run.
    assert [(row["R"], row["C"], row["W"]) for row in found[:3]] == [(32, 64, 1)] * 3
    assert (found[4]["R"], found[4]["C"]) == (16, 128)
    near = {(8, 64): 1.0, (16, 64): 0.99, (32, 64): 0.985, (8, 128): 1.0, (16, 128): 0.99, (32, 128): 0.99}
    assert descend({"R": 8, "C": 64}, grid, lambda row: near[row["R"], row["C"]]) == {"R": 8, "C": 64}


def test_the_row_with_the_longest_key_holds():
    rows = {"": {"R": 1}, "sm_": {"R": 2}, "sm_90": {"R": 3}, "gfx": {"R": 4}}
    found = [row_for(rows, target)["R"] for target in ("sm_90", "sm_80", "gfx942", "other")]
    assert found == [3, 2, 4, 1]
