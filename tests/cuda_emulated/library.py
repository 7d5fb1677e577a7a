"""Compile and load runtime.cpp. This must happen before torch is imported, so this module does not import it."""

import ctypes
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

SOURCE = Path(__file__).with_name("runtime.cpp")


def missing() -> str:
    """Return why a CUDA device cannot be emulated here; "" if it can."""
    if not shutil.which("g++"):
        return "g++ is not installed (on Debian and Ubuntu: apt-get install g++)"
    if (torch_directory() / "lib" / "libtorch_cuda.so").exists():
        return "torch is a CUDA build, which brings a CUDA device of its own; a CPU build can emulate one"
    return ""


def torch_directory() -> Path:
    """Find torch without importing it."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def build() -> Path:
    """Compile runtime.cpp for the installed torch, once per version of both. This takes three seconds.

    Returns:
        The shared library, in a cache directory.

    Raises:
        subprocess.CalledProcessError: the compilation failed; g++ has printed why.
    """
    torch = torch_directory()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "swiftlite" / "cuda-emulated"
    key = hashlib.sha256(SOURCE.read_bytes() + f"{torch} {version('torch')}".encode()).hexdigest()[:16]
    library = cache / f"{key}.so"
    if library.exists():
        return library
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as directory:
        unfinished = Path(directory) / library.name
        command = [
            "g++",
            "-std=c++20",
            "-shared",
            "-fPIC",
            f"-I{torch / 'include'}",
            str(SOURCE),
            "-o",
            str(unfinished),
        ]
        subprocess.run([*command, f"-L{torch / 'lib'}", "-lc10", "-ltorch_cpu"], check=True, timeout=300)
        unfinished.replace(library)  # two processes that build at once write the same file
    return library


def load() -> None:
    """Make torch find a CUDA device in this process, once torch is imported."""
    assert "torch" not in sys.modules, "torch has been imported: it has asked for CUDA already"
    libraries = torch_directory() / "lib"
    for path in (libraries / "libc10.so", libraries / "libtorch_cpu.so", build()):
        ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
