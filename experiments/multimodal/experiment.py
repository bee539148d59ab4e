"""Trains one small model on emoji that are read, seen, seen moving and heard; searches held-out ones in all directions.

experimaestro run-experiment --workdir runs/workspace experiments/multimodal/full.yaml
"""

from itertools import permutations

from experimaestro.experiments import configuration
from report import MultimodalRun, report

from xpmir_uform import (
    AudioShape,
    Augmentation,
    ContrastiveLoss,
    Negatives,
    RetrievalEvaluation,
    VideoShape,
    save_model,
)
from xpmir_uform.datasets import EmojiCollection, MultimodalBags, MultimodalEmoji, MultimodalRetrieval
from xpmir_uform.recipes import (
    ExperimentSettings,
    ModelSettings,
    TrainingSettings,
    UFormExperiment,
    form_of,
    uform_experiment,
)

MODALITIES = ("text", "image", "video", "audio")
DIRECTIONS = tuple(permutations(MODALITIES, 2))


@configuration
class VideoSettings:
    """How the model sees videos."""

    patch_side: int = 8
    tube_frames: int = 8
    max_side: int = 32
    max_frames: int = 8

    def shape(self) -> VideoShape:
        """As a part of the model."""
        return VideoShape.C(
            patch_side=self.patch_side,
            tube_frames=self.tube_frames,
            max_side=self.max_side,
            max_frames=self.max_frames,
        )


@configuration
class AudioSettings:
    """How the model hears sounds."""

    chunk_samples: int = 160
    sample_rate: int = 8000
    max_seconds: float = 3.0

    def shape(self) -> AudioShape:
        """As a part of the model."""
        return AudioShape.C(
            chunk_samples=self.chunk_samples, sample_rate=self.sample_rate, max_seconds=self.max_seconds
        )


@configuration
class Multimodal(ExperimentSettings):
    """What the YAML file sets."""

    seed: int = 1
    form: str = "ranked"
    negatives: str = "ambient"
    held_out: int = 300
    limit: int = 0
    bag_size: int = 3
    voices: list[str]
    speeds: list[int]
    noise: float = 0.0
    hiss: float = 0.0
    delay: float = 0.0
    drop: float = 0.0
    model: ModelSettings = ModelSettings()
    video: VideoSettings = VideoSettings()
    audio: AudioSettings = AudioSettings()
    training: TrainingSettings = TrainingSettings()


@uform_experiment()
def run(helper: UFormExperiment, settings: Multimodal):
    """Trains, evaluates before and after, and prints the report."""
    collection = EmojiCollection.installed(["en"], held_out=settings.held_out, limit=settings.limit)
    emoji = MultimodalEmoji.installed(collection, settings.voices, settings.speeds)
    model = settings.model.config(settings.seed, video=settings.video.shape(), audio=settings.audio.shape())
    learner = settings.training.learner(
        model,
        MultimodalBags.C(emoji=emoji, size=settings.bag_size),
        [ContrastiveLoss.C(form=form_of(settings.form), negatives=Negatives(settings.negatives))],
        seed=settings.seed,
        augmentation=Augmentation.C(noise=settings.noise, hiss=settings.hiss, delay=settings.delay, drop=settings.drop),
    )
    trained = helper.train(learner, form=settings.form, seed=settings.seed)
    retrievals = {
        f"{queries}-{documents}": MultimodalRetrieval.C(emoji=emoji, queries=queries, documents=documents)
        for queries, documents in DIRECTIONS
    }
    before, after = (RetrievalEvaluation.C(model=model, retrievals=retrievals) for _ in range(2))
    helper.submit("Evaluating the untrained model", before)
    helper.submit("Evaluating the trained model", after, init_tasks=[trained.learned_model])
    helper.wait()
    results = helper.xp.resultspath
    save_model(trained.learned_model, results / "model")
    report(MultimodalRun(learner, before, after, results))
