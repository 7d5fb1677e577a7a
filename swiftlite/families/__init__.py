"""Model families: everything that differs between them stands in one file each; `index.py` lists them."""

from swiftlite.families.family import Family
from swiftlite.families.index import FAMILIES, get

__all__ = ["FAMILIES", "Family", "get"]
