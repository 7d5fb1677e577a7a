"""Define model families, one file each; `index.py` lists them, and `resolved.py` finds the family of a model by name.

Families are declarations: they use the bridge's rows and layouts, and do not import torch, transformers or megatron.
`model/` builds models from them, and `plan/` and `estimate/` use their sizes.
"""

from swiftlite.families.family import Family
from swiftlite.families.index import FAMILIES, get

__all__ = ["FAMILIES", "Family", "get"]
