"""Convert weights between Hugging Face directories and Megatron models in memory.

The entry points are `load_hf` in `transfer.py` and `save_hf` in `saving.py`. Only `placement.py` uses megatron-core and
process groups; all other modules work on shapes and files.
"""
