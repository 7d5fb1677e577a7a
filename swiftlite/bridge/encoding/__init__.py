"""Encodings of tensors in files (FP8 blocks, stacked experts), and their selection by config.json."""
