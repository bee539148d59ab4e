"""Batching: which bags run together on a device, and what memory that takes."""
