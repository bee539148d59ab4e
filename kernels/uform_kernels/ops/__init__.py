"""The operations: one folder each, with a reference, a chunked and a Triton implementation."""
