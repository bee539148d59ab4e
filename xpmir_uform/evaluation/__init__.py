"""Evaluation: exact search, retrieval measures, and the listener and the task that use them."""
