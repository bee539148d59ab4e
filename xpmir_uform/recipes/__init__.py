"""What experiment files share: settings, and a helper that trains, waits and reports failures."""

from xpmir_uform.recipes.pairs import InteractionSettings, PairSettings
from xpmir_uform.recipes.runner import ExperimentSettings, UFormExperiment, uform_experiment
from xpmir_uform.recipes.settings import ModelSettings, Seeds, TrainingSettings, form_of

__all__ = [
    "ExperimentSettings",
    "InteractionSettings",
    "ModelSettings",
    "PairSettings",
    "Seeds",
    "TrainingSettings",
    "UFormExperiment",
    "form_of",
    "uform_experiment",
]
