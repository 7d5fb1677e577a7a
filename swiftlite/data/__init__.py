"""Turn data files into batches of tokens and labels.

Uses numpy, torch and the tokenizer's library, but no ranks or models.
"""
