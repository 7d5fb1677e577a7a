"""Replace torchvision, which SGLang and transformers import for image models, and which PyPI has only for CUDA.

Text models do not call it.
"""

from absent import Submodules, absent

__version__ = "0.28.0"
__getattr__ = absent
Submodules(__name__)
