"""From data files to batches of tokens and labels, with numpy, torch and the tokenizer's library alone: ranks and models
are not known here. Start with `dataset.py`.
"""
