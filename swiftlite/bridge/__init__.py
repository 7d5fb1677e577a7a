"""Hugging Face <-> Megatron weights: rows (a family's table), layout (pure), plan, placement (ranks), tensors (files).

Start with `transfer.py`: `load_hf` and `save_hf`.
"""
