"""Stands in for torchvision, which SGLang and transformers import for image models, and which PyPI has for CUDA alone.

No text model calls any of it.
"""

from absent import Submodules, absent

__version__ = "0.28.0"
__getattr__ = absent
Submodules(__name__)
