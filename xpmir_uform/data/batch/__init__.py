"""A batch: all the bags of one step, as arrays."""
