"""Checkpoints: what is saved of a training, and how a run resumes from it."""
