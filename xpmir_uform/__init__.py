"""Train small multimodal embedding models reproducibly, as experimaestro tasks.

Public names are imported when they are first used, so that the plain modules of the model and the data can be used
without experimaestro, xpm-torch or lightning.
"""

from importlib import import_module

_HOMES = {
    "xpmir_uform.batching.batcher": ("UFormBatcher",),
    "xpmir_uform.batching.footprint": ("predict_memory", "requirements_for"),
    "xpmir_uform.batching.packer": ("BagPacker",),
    "xpmir_uform.batching.shape": ("BatchShape",),
    "xpmir_uform.checkpoints.config": ("Checkpoint", "checkpoint_at"),
    "xpmir_uform.data.batch.batch": ("Batch",),
    "xpmir_uform.data.batch.tape": ("Tape",),
    "xpmir_uform.data.decoding.augmentation": ("Augmentation",),
    "xpmir_uform.data.decoding.shapes": ("AudioShape", "ImageShape", "VideoShape"),
    "xpmir_uform.data.items": ("Bag", "Item"),
    "xpmir_uform.data.problems": ("ChoiceSet", "Retrieval", "RetrievalSet"),
    "xpmir_uform.data.sampling": ("BagSampler", "BagSource"),
    "xpmir_uform.data.vocabulary": ("Modality", "Side"),
    "xpmir_uform.datasets.emoji": ("EmojiBags", "EmojiCollection", "EmojiRetrieval"),
    "xpmir_uform.datasets.languages": ("LanguageBags", "LanguageChoices"),
    "xpmir_uform.datasets.multimodal": ("MultimodalBags", "MultimodalEmoji", "MultimodalRetrieval"),
    "xpmir_uform.datasets.packages": ("PackagePairs",),
    "xpmir_uform.datasets.pairs": ("EmojiPairs", "PairBags", "PairRetrieval"),
    "xpmir_uform.datasets.relevance": ("Judgements", "RelevanceBags", "RelevanceChoices"),
    "xpmir_uform.evaluation.choices": ("ChoicesEvaluation",),
    "xpmir_uform.evaluation.lexical": ("LexicalEvaluation",),
    "xpmir_uform.evaluation.rankers": ("PooledRanker", "Reranker", "TokenRanker"),
    "xpmir_uform.evaluation.relevance": ("RelevanceScoring",),
    "xpmir_uform.evaluation.retrieval": ("RetrievalEvaluation", "RetrievalValidation"),
    "xpmir_uform.export.pretrained": ("load_model", "save_model"),
    "xpmir_uform.export.program": ("export_programs",),
    "xpmir_uform.index": ("Document", "Index", "build_index"),
    "xpmir_uform.learner.learner": ("UFormLearner",),
    "xpmir_uform.losses.choices": ("ChoicesLoss",),
    "xpmir_uform.losses.contrastive": ("ContrastiveLoss", "Negatives"),
    "xpmir_uform.losses.forms": ("BalancedForm", "RankedForm", "SigmoidForm"),
    "xpmir_uform.losses.late_interaction": ("LateInteractionLoss",),
    "xpmir_uform.losses.masked": ("MaskedLoss",),
    "xpmir_uform.model.heads": ("ByteHead", "PatchHead", "PooledHead", "TokenHead"),
    "xpmir_uform.model.uform": ("UFormEncoder",),
    "xpmir_uform.monitoring.alerts": ("Alerts",),
    "xpmir_uform.trainer.optimizers": ("adamw",),
    "xpmir_uform.trainer.schedule": ("CosineSchedule",),
    "xpmir_uform.trainer.trainer": ("UFormTrainer",),
    "uform_kernels": ("Edges",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = sorted(_HOME_OF)


def __getattr__(name: str):
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return __all__
