"""Model families: everything that differs between them stands in one file each; `index.py` lists them,
`resolved.py` finds that of a model by its name.

Declarations: they use the bridge's rows and layouts, and load no torch, transformers or megatron. `model/` builds what
they say, `plan/` counts it.
"""

from swiftlite.families.family import Family
from swiftlite.families.index import FAMILIES, get

__all__ = ["FAMILIES", "Family", "get"]
