"""Resolve names of models and datasets on the Hugging Face hub, and GGUF files. Does not import torch.

`model.py` resolves the name of a model to a directory; `name.py` parses names.
"""
