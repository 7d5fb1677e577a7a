"""Train on megatron-core: the phases of a run, the trainer and its objective, checkpoints.

May import packages up to `model` and `acceptance`, and megatron-core, but no engine.
"""
