"""Data sets: each module holds one collection and the bags and retrieval sets made from it."""
