"""Trained models as folders that hold all they need."""

from xpmir_uform.export.pretrained import load_model, save_model

__all__ = ["load_model", "save_model"]
