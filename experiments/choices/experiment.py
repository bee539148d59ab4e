"""A byte as an answer: the language of a name, and whether a description is relevant to a query.

OMP_NUM_THREADS=1 experimaestro run-experiment --workdir runs/workspace experiments/choices/full.yaml

One model learns the languages of names of emoji. Another learns late interaction on pairs of a query and a
description; its scores of right and wrong pairs, as probabilities, are then what the same encoder learns to answer by
one byte when it reads both as one text.
"""

from experimaestro import stop_tags
from experimaestro.experiments import configuration
from report import LANGUAGE, STUDENT, ChoicesRun, report

from xpmir_uform import BatchShape, ByteHead, ChoicesEvaluation, ChoicesLoss, RelevanceScoring, save_model
from xpmir_uform.datasets import (
    EmojiCollection,
    LanguageBags,
    LanguageChoices,
    PairBags,
    RelevanceBags,
    RelevanceChoices,
)
from xpmir_uform.datasets.languages import LETTERS
from xpmir_uform.datasets.pairs import PairCollection
from xpmir_uform.recipes import (
    ExperimentSettings,
    InteractionSettings,
    ModelSettings,
    PairSettings,
    TrainingSettings,
    UFormExperiment,
    uform_experiment,
)


@configuration
class Choices(ExperimentSettings):
    """What the YAML file sets."""

    seed: int = 1
    held_out: int = 300
    limit: int = 0
    others: int = 4
    echo: float = 0.0
    pairs: PairSettings = PairSettings()
    interaction: InteractionSettings = InteractionSettings()
    model: ModelSettings = ModelSettings()
    language: TrainingSettings = TrainingSettings()
    teacher: TrainingSettings = TrainingSettings()
    student: TrainingSettings = TrainingSettings()


@uform_experiment()
def run(helper: UFormExperiment, settings: Choices):
    """Trains what tells languages beside the teacher and then its student, and prints the report."""
    pairs = settings.pairs.collection(helper.xp.workspace.path / "data")
    told, language = tell_languages(helper, settings)
    taught, relevance, teacher = tell_relevance(helper, settings, pairs)
    helper.wait()
    results = helper.xp.resultspath
    save_model(told, results / "language")
    save_model(taught, results / "relevance")
    report(ChoicesRun(language, relevance, teacher, results))


def tell_languages(helper: UFormExperiment, settings: Choices):
    """Submits the training on names and its evaluation; answers the trained weights and the evaluation."""
    names = EmojiCollection.installed(held_out=settings.held_out, limit=settings.limit)
    model = settings.model.config(settings.seed, bytes=ByteHead.C())
    learner = settings.language.learner(
        model,
        LanguageBags.C(collection=names),
        [ChoicesLoss.C()],
        seed=settings.seed,
        shape=BatchShape.C(max_choices_per_item=len(LETTERS)),
    )
    trained = helper.train(learner, stage="language", seed=settings.seed).learned_model
    evaluation = ChoicesEvaluation.C(model=model, problems={LANGUAGE: LanguageChoices.C(collection=names)})
    helper.submit("Evaluating languages", evaluation, init_tasks=[trained])
    return trained, evaluation


def tell_relevance(helper: UFormExperiment, settings: Choices, pairs: PairCollection):
    """Submits teacher, scoring, student and evaluation; answers the student's weights, its evaluation, the scoring."""
    model = settings.model.config(settings.seed, tokens=settings.interaction.head(), bytes=ByteHead.C())
    late = settings.teacher.learner(
        model, PairBags.C(collection=pairs), [settings.interaction.loss()], seed=settings.seed
    )
    teacher = helper.train(late, stage="teacher", seed=settings.seed).learned_model
    scoring = RelevanceScoring.C(model=model, collection=pairs, others=settings.others)
    judgements = helper.submit("Scoring by the teacher", scoring, init_tasks=[teacher])
    learner = settings.student.learner(
        model,
        RelevanceBags.C(judgements=stop_tags(judgements), echo=settings.echo),
        [ChoicesLoss.C()],
        seed=settings.seed,
        shape=BatchShape.C(max_choices_per_item=2),
    )
    trained = helper.train(learner, start=teacher, stage="student", seed=settings.seed).learned_model
    evaluation = ChoicesEvaluation.C(model=model, problems={STUDENT: RelevanceChoices.C(collection=pairs)})
    helper.submit("Evaluating relevance", evaluation, init_tasks=[trained])
    return trained, evaluation, scoring
