"""Models and datasets of the Hugging Face hub, and GGUF files, given by name instead of a directory. Imports no torch.

`model.py` resolves the name of a model to a directory. Read `name.py` next.
"""
