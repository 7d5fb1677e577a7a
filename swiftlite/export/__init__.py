"""Convert checkpoints of runs to audited Hugging Face directories, and back.

May use all packages below `cli`, and megatron-core only through them.
"""
