"""Training on megatron-core: the phases of a run, the trainer, what it minimises and which parameters learn, checkpoints.

May use the rooms up to `model` and `acceptance`, and megatron-core; knows no engine.
"""
