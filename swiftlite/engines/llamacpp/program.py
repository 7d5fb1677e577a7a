"""Find a server of llama.cpp: an executable, or the package xllamacpp, which contains the same server code."""

import importlib.util
import os
import shutil
import sys

VARIABLE = "LLAMA_SERVER"
"""Environment variable with the path of llama-server, which has precedence over PATH."""


def program() -> list[str] | None:
    """Return the command of a server that accepts the options of llama-server; None if none is installed.

    The order is: the executable in LLAMA_SERVER, `llama-server` on PATH, the package xllamacpp.
    """
    given = os.environ.get(VARIABLE)
    if given:
        found = shutil.which(given)
        return [found] if found else None
    found = shutil.which("llama-server")
    if found:
        return [found]
    if importlib.util.find_spec("xllamacpp"):
        return [sys.executable, "-m", "swiftlite.engines.llamacpp.embedded"]
    return None
