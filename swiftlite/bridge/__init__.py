"""Weights between Hugging Face directories and live Megatron models. This room uses torch; only `placement.py` knows
megatron-core and processes.

Start with `transfer.py`: `load_hf` and `save_hf`.
"""
