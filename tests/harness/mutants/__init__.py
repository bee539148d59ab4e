"""Mutants of our own: mistakes made on purpose, each of which the tests must notice."""
