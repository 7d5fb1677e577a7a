"""Encodings of tensors in files: FP8 blocks, stacked experts, and the selection of an encoding by config.json."""
