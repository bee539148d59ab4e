"""The model of a job or checkpoint: loaded as it is, exported by a command, refused when it was changed."""

import json
import shutil

import pytest
import torch
from experimaestro import taskglobals
from experimaestro.xpmutils import DirectoryContext
from safetensors.torch import load_file
from xpm_torch import Random

from xpmir_uform import (
    Bag,
    BagSampler,
    BagSource,
    ContrastiveLoss,
    CosineSchedule,
    ImageShape,
    Item,
    PooledHead,
    Retrieval,
    RetrievalSet,
    RetrievalValidation,
    UFormEncoder,
    UFormLearner,
    UFormTrainer,
    adamw,
    load_model,
)
from xpmir_uform.commands import main

WORDS = ["ant", "bee", "cat", "dog", "elk", "fox"]


class Words(BagSource):
    """A word and its reverse."""

    __xpmid__ = "test.words-to-export"

    def __len__(self):
        return len(WORDS)

    def bag(self, index, seed, epoch):
        return Bag.alike([Item.text(WORDS[index]), Item.text(WORDS[index][::-1])])


class Search(RetrievalSet):
    """Words by their reverse."""

    __xpmid__ = "test.search-to-export"

    def load(self):
        right = [[number] for number in range(len(WORDS))]
        return Retrieval([Item.text(word[::-1]) for word in WORDS], [Item.text(word) for word in WORDS], right)


def configuration(seed):
    shape = ImageShape.C(patch_side=4, max_side=16, channels=1)
    return UFormEncoder.C(depth=1, hidden=128, pooled=PooledHead.C(width=16), image=shape, seed=seed)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of a job of three epochs, all of which are kept."""
    job = tmp_path_factory.mktemp("trained") / "workspace" / "jobs" / "uform.learner" / "job"
    job.mkdir(parents=True)
    learner = UFormLearner.C(
        random=Random.C(seed=3),
        model=configuration(3),
        trainer=UFormTrainer.C(sampler=BagSampler.C(source=Words.C()), batch_size=3, losses=[ContrastiveLoss.C()]),
        max_epochs=3,
        steps_per_epoch=2,
        keep=9,
        optimizers=adamw(CosineSchedule.C(learning_rate=1e-3)),
        listeners=[RetrievalValidation.C(id="validation", retrieval=Search.C())],
    )
    environment = taskglobals.Env.instance()
    before, environment.taskpath = environment.taskpath, job
    try:
        learner.instance(context=DirectoryContext(job)).execute()
    finally:
        environment.taskpath = before
    return job


@pytest.fixture
def job(trained, tmp_path):
    shutil.copytree(trained, tmp_path / "job", symlinks=True)
    return tmp_path / "job"


def holds(model, weights):
    expected = load_file(weights / "model.safetensors")
    return all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())


BEST = "out/listeners/0/best"


@pytest.mark.parametrize("place", [".", "checkpoints", "checkpoints/last", "checkpoints/step-00000002", BEST])
def test_a_checkpoint_or_job_is_loaded_as_it_is(trained, place):
    weights = trained / place if (trained / place / "manifest.json").exists() else trained / "checkpoints" / "last"
    model = load_model(trained / place)
    assert holds(model, weights)
    assert not model.training
    assert (model.image.channels, model.pooled.width, model.seed) == (1, 16, 3)


@pytest.mark.parametrize(
    ("options", "place"),
    [([], "checkpoints/last"), (["--step", "4"], "checkpoints/step-00000004"), (["--best"], BEST)],
)
def test_the_command_exports_a_job_and_says_what_it_is(trained, tmp_path, capsys, options, place):
    folder = tmp_path / "model"
    assert main(["checkpoint", "export", str(trained), *options, str(folder)]) == 0
    assert f"load_model('{folder}')" in capsys.readouterr().out
    assert holds(load_model(folder), trained / place)
    readme = (folder / "README.md").read_text()
    manifest = json.loads((trained / place / "manifest.json").read_text())
    (history,) = (json.loads(path.read_text()) for path in trained.rglob("history.json"))
    for text in (
        "image.channels = 1",
        "pooled.bias = -10.0",
        f"Trained for {manifest['step']} steps (epoch {manifest['epoch']})",
        "uform.learner/job",
        "trainer.sampler.source.type = test.words-to-export",
        manifest["hashes"]["data"],
        f"MRR {history[str(manifest['epoch'])]['MRR']:.4f}",
    ):
        assert text in readme
    for file in ("README.md", "experimaestro.json"):
        assert str(trained.parents[3]) not in (folder / file).read_text()


def test_what_a_job_does_not_have_is_not_exported(trained, job, tmp_path, capsys):
    shutil.copytree(job / BEST, job / "out" / "listeners" / "1" / "best")
    for arguments, said in [
        ([str(trained), "--step", "3"], "has no checkpoint of step 3: it has those of 0, 2, 4, 6"),
        ([str(trained / "out"), "--best"], "has these best checkpoints: none"),
        ([str(job), "--best"], "listeners/1/best; give the path of one"),
        ([str(tmp_path)], "holds no checkpoint"),
    ]:
        assert main(["checkpoint", "export", *arguments, str(tmp_path / "model")]) == 1
        assert said in capsys.readouterr().err
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize("place", ["checkpoints/last", BEST])
@pytest.mark.parametrize("file", ["model.safetensors", "manifest.json"])
def test_a_flipped_byte_is_found_by_every_way_to_the_weights(job, tmp_path, capsys, place, file):
    path = job / place / file
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 2
    path.write_bytes(data)
    loader = configuration(3).loader_config(job / place).instance()
    with pytest.raises(ValueError, match=rf"{file} was changed"):
        loader.execute()
    with pytest.raises(ValueError, match=rf"{file} was changed"):
        load_model(job / place)
    assert main(["checkpoint", "export", str(job / place), str(tmp_path / "model")]) == 1
    assert f"{file} was changed" in capsys.readouterr().err
    assert not (tmp_path / "model").exists()


def test_every_setting_is_shown(trained, capsys):
    assert main(["checkpoint", "show", str(trained)]) == 0
    shown = capsys.readouterr().out
    for line in ("clip_norm = 0.0", "window = 50", "keep = 9", "trainer.batch_size = 3", "model.pooled.groups = 1"):
        assert f" {line}\n" in shown
    assert str(trained.parents[3]) not in shown.partition("\n")[2]
