"""Convert weights between Hugging Face directories and live Megatron models.

The entry points are `load_hf` and `save_hf` in `transfer.py`. Only `placement.py` uses megatron-core and process
groups.
"""
