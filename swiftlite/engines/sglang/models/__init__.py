"""Model classes for SGLang, which imports every module of this package. See `sglang_plugin.py`."""
