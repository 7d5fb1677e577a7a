"""Define model families (architectures), one file each.

`index.py` finds them in `models/`, and `resolved.py` finds a model's family.

Families contain only declarations: they use the bridge rows of `bridge`, and do not import torch, transformers or
megatron-core. `model/` builds models from them; `plan/` and `plan/cost/` read their sizes.
"""

from swiftlite.families.family import Family
from swiftlite.families.index import FAMILIES, get

__all__ = ["FAMILIES", "Family", "get"]
