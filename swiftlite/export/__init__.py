"""Convert checkpoints of runs to audited Hugging Face directories, and back.

This package may use all packages below `cli`, and uses megatron-core only through them.
"""
