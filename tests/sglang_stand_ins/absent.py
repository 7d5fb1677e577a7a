"""Make a package importable that is not installed, with any submodule and any name.

Imported names are classes without content, which cannot be used. The packages are `torchvision` and `sgl_kernel` of
this folder.
"""

import importlib.abc
import importlib.machinery
import sys
from types import ModuleType


class Absent(type):
    """A replacement of a missing class, function or enumeration. Its attributes are replacements too."""

    def __getattr__(cls, name: str) -> "Absent":
        if name.startswith("__"):
            raise AttributeError(name)
        return absent(name)

    def __call__(cls, *args, **kwargs):
        raise NotImplementedError(f"{cls.__name__} has no stand-in")


def absent(name: str) -> Absent:
    """Return a replacement; used as the `__getattr__` of a module."""
    if name.startswith("__"):
        raise AttributeError(name)
    return Absent(name, (), {})


class _Submodule(ModuleType):
    def __getattr__(self, name: str) -> Absent:
        return absent(name)


class Submodules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds any module below `package`. Existing files have precedence."""

    def __init__(self, package: str):
        self._prefix = f"{package}."
        sys.meta_path.append(self)

    def find_spec(self, fullname, path=None, target=None):
        if fullname.startswith(self._prefix):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec):
        return _Submodule(spec.name)

    def exec_module(self, module):
        pass
