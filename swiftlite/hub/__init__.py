"""Resolve names of models and datasets on the Hugging Face hub, and GGUF files.

`model.py` resolves the name of a model to a directory; `name.py` parses names. This package does not import torch.
"""
