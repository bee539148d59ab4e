"""Does masked reconstruction of emoji pictures and names help the contrastive training that follows?

OMP_NUM_THREADS=1 experimaestro run-experiment --workdir runs/workspace experiments/masked/full.yaml

For each seed one model is trained by contrast from its initial weights, and one, with the same settings and the same
number of steps, from the weights that masked reconstruction taught it before.
"""

from typing import Any, cast

import attrs
from experimaestro.experiments import configuration
from report import MaskedRun, report

from xpmir_uform import (
    Augmentation,
    ByteHead,
    ContrastiveLoss,
    MaskedLoss,
    PatchHead,
    RetrievalEvaluation,
    UFormLearner,
    load_model,
    save_model,
)
from xpmir_uform.datasets import EmojiBags, EmojiCollection, EmojiRetrieval
from xpmir_uform.recipes import (
    ExperimentSettings,
    ModelSettings,
    Seeds,
    TrainingSettings,
    UFormExperiment,
    form_of,
    uform_experiment,
)

DIRECTIONS = ("text-text", "text-image", "image-text")


@configuration
class MaskSettings:
    """What masked reconstruction hides; what is not given has the loss's own default."""

    token_mask_probability: float | None = None
    token_mean_span: float | None = None
    image_mask_ratio: float | None = None
    text_weight: float | None = None
    image_weight: float | None = None

    def loss(self) -> MaskedLoss:
        """The loss."""
        given = attrs.asdict(cast(Any, self))
        return MaskedLoss.C(**{name: value for name, value in given.items() if value is not None})


@configuration
class Masked(ExperimentSettings):
    """What the YAML file sets."""

    seeds: Seeds
    form: str = "ranked"
    held_out: int = 300
    limit: int = 0
    noise: float = 0.0
    drop: float = 0.0
    mask: MaskSettings = MaskSettings()
    model: ModelSettings = ModelSettings()
    pretraining: TrainingSettings = TrainingSettings()
    training: TrainingSettings = TrainingSettings()


@uform_experiment()
def run(helper: UFormExperiment, settings: Masked):
    """Trains two models for each seed, a few tasks at a time, evaluates both, and prints the report."""
    collection = EmojiCollection.installed(held_out=settings.held_out, limit=settings.limit)
    runs = {seed: SeedRun(settings, collection, seed) for seed in settings.seeds}
    for one in runs.values():
        one.begin(helper)
        helper.wait()
    for one in runs.values():
        one.go_on(helper)
    helper.wait()
    results = helper.xp.resultspath
    first = runs[settings.seeds[0]]
    save_model(first.pretrained.learned_model, results / "pretrained")
    report(
        MaskedRun(
            {seed: one.alone for seed, one in runs.items()},
            {seed: one.after for seed, one in runs.items()},
            first.masked,
            load_model(results / "pretrained"),
            cast(Any, settings.mask.loss()).instance(),
            cast(Any, collection).instance(),
            results,
        )
    )


class SeedRun:
    """The tasks of one seed."""

    def __init__(self, settings: Masked, collection: EmojiCollection, seed: int) -> None:
        self.settings = settings
        self.collection = collection
        self.seed = seed
        self.model = settings.model.config(seed, bytes=ByteHead.C(), patches=PatchHead.C())

    def reconstruction(self) -> UFormLearner:
        """The masked training, without noise: of a patch of one colour it would have to tell the noise."""
        source = EmojiBags.C(collection=self.collection)
        return self.settings.pretraining.learner(self.model, source, [self.settings.mask.loss()], seed=self.seed)

    def contrast(self) -> UFormLearner:
        """The contrastive training, the same whatever it begins with."""
        return self.settings.training.learner(
            self.model,
            EmojiBags.C(collection=self.collection),
            [ContrastiveLoss.C(form=form_of(self.settings.form))],
            seed=self.seed,
            augmentation=Augmentation.C(noise=self.settings.noise, drop=self.settings.drop),
        )

    def evaluation(self) -> RetrievalEvaluation:
        """Of the seed's model."""
        retrievals = {name: EmojiRetrieval.C(collection=self.collection, direction=name) for name in DIRECTIONS}
        return RetrievalEvaluation.C(model=self.model, retrievals=retrievals)

    def begin(self, helper: UFormExperiment) -> None:
        """Masked reconstruction, and contrast from the initial weights."""
        self.masked = self.reconstruction()
        self.pretrained = helper.train(self.masked, stage="masked", seed=self.seed)
        trained = helper.train(self.contrast(), stage="contrast-alone", seed=self.seed)
        self.alone = self.evaluation()
        helper.submit("Evaluating contrast alone", self.alone, init_tasks=[trained.learned_model])

    def go_on(self, helper: UFormExperiment) -> None:
        """Contrast from the weights of masked reconstruction."""
        trained = helper.train(
            self.contrast(), start=self.pretrained.learned_model, stage="contrast-after-masked", seed=self.seed
        )
        self.after = self.evaluation()
        helper.submit("Evaluating contrast after masked", self.after, init_tasks=[trained.learned_model])
