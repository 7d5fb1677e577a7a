"""Model classes for SGLang, which imports every module of this package. See `plugin.py`."""
