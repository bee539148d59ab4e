"""Trains one small model on emoji pictures and their names in six languages, and tells how well it finds held-out ones.

experimaestro run-experiment --workdir runs/workspace experiments/quickstart/full.yaml
"""

from typing import Any, cast

from experimaestro.experiments import configuration
from report import QuickstartRun, report

from xpmir_uform import Augmentation, ContrastiveLoss, RetrievalEvaluation, RetrievalValidation, save_model
from xpmir_uform.datasets import EmojiBags, EmojiCollection, EmojiRetrieval
from xpmir_uform.recipes import (
    ExperimentSettings,
    ModelSettings,
    TrainingSettings,
    UFormExperiment,
    form_of,
    uform_experiment,
)

DIRECTIONS = ("text-text", "text-image", "image-text")


@configuration
class Quickstart(ExperimentSettings):
    """What the YAML file sets."""

    seed: int = 1
    form: str = "ranked"
    held_out: int = 300
    limit: int = 0
    shift: int = 0
    noise: float = 0.0
    drop: float = 0.0
    model: ModelSettings = ModelSettings()
    training: TrainingSettings = TrainingSettings()


@uform_experiment()
def run(helper: UFormExperiment, settings: Quickstart):
    """Trains, evaluates before and after, and prints the report."""
    collection = EmojiCollection.installed(held_out=settings.held_out, limit=settings.limit)
    retrievals = {name: EmojiRetrieval.C(collection=collection, direction=name) for name in DIRECTIONS}
    model = settings.model.config(settings.seed)
    learner = settings.training.learner(
        model,
        EmojiBags.C(collection=collection),
        [ContrastiveLoss.C(form=form_of(settings.form))],
        seed=settings.seed,
        augmentation=Augmentation.C(shift=settings.shift, noise=settings.noise, drop=settings.drop),
        listeners=[RetrievalValidation.C(id="validation", retrieval=retrievals["text-image"], interval=5)],
    )
    trained = helper.train(learner, form=settings.form, seed=settings.seed)
    before, after = (RetrievalEvaluation.C(model=model, retrievals=retrievals) for _ in range(2))
    helper.submit("Evaluating the untrained model", before)
    helper.submit("Evaluating the trained model", after, init_tasks=[trained.learned_model])
    helper.wait()
    results = helper.xp.resultspath
    save_model(trained.learned_model, results / "model")
    report(QuickstartRun(learner, before, after, cast(Any, collection).instance(), results))
