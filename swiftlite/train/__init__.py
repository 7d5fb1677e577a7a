"""Training on megatron-core: the phases of a run, the trainer and what it minimises, checkpoints.

May use the rooms up to `model` and `acceptance`, and megatron-core; knows no engine.
"""
