"""Models and datasets of the Hugging Face hub and GGUF files, given by name, not as a directory. No torch at import.

`model.py` resolves the name of a model to a directory. Read `name.py` next.
"""
