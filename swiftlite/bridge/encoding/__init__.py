"""How numbers are stored: encodings (FP8 blocks), the index of those that a config declares, stacked experts."""
