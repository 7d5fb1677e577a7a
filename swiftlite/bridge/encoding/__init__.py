"""How numbers are stored: FP8 blocks, stacked experts, and the quantization that a config declares."""
