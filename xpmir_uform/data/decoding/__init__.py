"""From an item's bytes to the tokens of an encoder: one file for each modality."""
