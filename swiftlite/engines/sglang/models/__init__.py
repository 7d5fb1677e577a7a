"""Model classes for SGLang. SGLang imports every module of this package (see `plugin.py`)."""
