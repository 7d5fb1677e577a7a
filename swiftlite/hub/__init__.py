"""Names in the place of directories: models and datasets of the Hugging Face hub, and GGUF files. No torch at import.

`model.py` is where the name of a model becomes a directory. Read `name.py` next.
"""
