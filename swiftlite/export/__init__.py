"""Convert checkpoints of runs to Hugging Face directories, which are audited before they appear, and back.

May use all packages below `cli`, and megatron-core only through them.
"""
