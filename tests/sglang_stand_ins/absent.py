"""Lets a package be imported that is not there: any submodule of it, and any name in one.

What is taken so is a class without contents, which nobody can use. For `torchvision` and `sgl_kernel` of this folder.
"""

import importlib.abc
import importlib.machinery
import sys
from types import ModuleType


class Absent(type):
    """Of a class, function or enumeration that is not there; what is taken from it is not there either."""

    def __getattr__(cls, name: str) -> "Absent":
        if name.startswith("__"):
            raise AttributeError(name)
        return absent(name)

    def __call__(cls, *args, **kwargs):
        raise NotImplementedError(f"{cls.__name__} has no stand-in")


def absent(name: str) -> Absent:
    """A module's `__getattr__`."""
    if name.startswith("__"):
        raise AttributeError(name)
    return Absent(name, (), {})


class _Submodule(ModuleType):
    def __getattr__(self, name: str) -> Absent:
        return absent(name)


class Submodules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds whatever module is asked for below `package`; the files that are there go first."""

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
