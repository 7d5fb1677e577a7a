"""Encodings of tensors in files (FP8 blocks), the index of encodings by config.json, and stacked experts."""
