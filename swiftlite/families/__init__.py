"""Define model families, one file each; `index.py` lists them, and `resolved.py` finds the family of a model.

Families are declarations: they use the bridge's rows, and do not import torch, transformers or megatron-core. `model/`
builds models from them; `plan/` and `estimate/` read their sizes.
"""

from swiftlite.families.family import Family
from swiftlite.families.index import FAMILIES, get

__all__ = ["FAMILIES", "Family", "get"]
