"""Does late interaction find more than pooled embeddings, and does reranking by it keep what it finds?

OMP_NUM_THREADS=1 experimaestro run-experiment --workdir runs/workspace experiments/reranker/full.yaml

For each seed three models of the same initial weights are trained on the same pairs in the same order: by contrast of
pooled embeddings, by late interaction, and by both in one pass. The pooled embeddings of the third retrieve the
documents that its token vectors rerank.
"""

from experimaestro.experiments import configuration
from report import LATE, POOLED, RERANKED, RerankerRun, report

from xpmir_uform import (
    ContrastiveLoss,
    LexicalEvaluation,
    PooledRanker,
    Reranker,
    RetrievalEvaluation,
    TokenRanker,
    save_model,
)
from xpmir_uform.datasets import PairBags, PairRetrieval
from xpmir_uform.evaluation.rankers import Ranker
from xpmir_uform.losses.base import BatchLoss
from xpmir_uform.recipes import (
    ExperimentSettings,
    InteractionSettings,
    ModelSettings,
    PairSettings,
    Seeds,
    TrainingSettings,
    UFormExperiment,
    form_of,
    uform_experiment,
)


@configuration
class Reranking(ExperimentSettings):
    """What the YAML file sets."""

    seeds: Seeds
    first: int = 50
    pairs: PairSettings = PairSettings()
    interaction: InteractionSettings = InteractionSettings()
    model: ModelSettings = ModelSettings()
    training: TrainingSettings = TrainingSettings()

    def methods(self) -> dict[str, tuple[list[BatchLoss], Ranker]]:
        """The losses and the ranker of each method."""
        contrast, late = ContrastiveLoss.C(form=form_of(self.interaction.form)), self.interaction.loss()
        return {
            POOLED: ([contrast], PooledRanker.C()),
            LATE: ([late], TokenRanker.C()),
            RERANKED: ([contrast, late], Reranker.C(first=self.first)),
        }


@uform_experiment()
def run(helper: UFormExperiment, settings: Reranking):
    """Trains and evaluates each method, one seed at a time, and prints the report."""
    pairs = settings.pairs.collection(helper.xp.workspace.path / "data")
    problem = {"held-out": PairRetrieval.C(collection=pairs)}
    lexical = LexicalEvaluation.C(retrievals=problem)
    helper.submit("Evaluating BM25", lexical)
    methods = settings.methods()
    evaluations: dict[str, dict[int, RetrievalEvaluation]] = {name: {} for name in methods}
    trained = {}
    for seed in settings.seeds:
        for name, (losses, ranker) in methods.items():
            model = settings.model.config(seed, tokens=settings.interaction.head())
            learner = settings.training.learner(model, PairBags.C(collection=pairs), losses, seed=seed)
            trained[name, seed] = helper.train(learner, method=name.replace(" ", "-"), seed=seed).learned_model
            evaluations[name][seed] = RetrievalEvaluation.C(model=model, retrievals=problem, ranker=ranker)
            helper.submit(f"Evaluating {name}, seed {seed}", evaluations[name][seed], init_tasks=[trained[name, seed]])
        helper.wait()
    results = helper.xp.resultspath
    save_model(trained[RERANKED, settings.seeds[0]], results / "model")
    report(RerankerRun(evaluations, lexical, results))
