"""Inference: embeddings, token vectors, scores and choices of a trained model."""
