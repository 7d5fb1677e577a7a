"""Checkpoints of runs to Hugging Face directories, audited before they appear, and back. May use all rooms below `cli`,
and megatron-core through them alone.
"""
