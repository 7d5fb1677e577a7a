"""Weights between Hugging Face directories and live Megatron models, with torch alone but for `placement.py`, which knows
megatron-core and processes. Start with `transfer.py`: `load_hf` and `save_hf`.
"""
