"""Losses: what an objective computes from embeddings and edges. Tensors in, tensors out."""
