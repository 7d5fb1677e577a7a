"""Train on megatron-core: the phases of a run, the trainer and its objective, checkpoints.

This package may import megatron-core and the packages up to `model` and `acceptance`, but no engine.
"""
