"""Find a server of llama.cpp: an executable, or the package xllamacpp, which contains the same server code."""

import importlib.util
import os
import shutil
import sys
from functools import cache

from swiftlite.base.log import logger

VARIABLE = "LLAMA_SERVER"
"""Environment variable with the path of llama-server, which has precedence over PATH."""

SHORT_LOG = {"GGML_NO_BACKTRACE": "1"}
"""Variables with which the log of a server that crashes ends with the failed assertion, not with frames of gdb."""


@cache  # one warning per path
def _named(path: str) -> list[str] | None:
    """Return the command of the executable in `VARIABLE`; None if there is no such executable."""
    found = shutil.which(path)
    if found is None:
        logger.warning("%s=%s is not an executable file", VARIABLE, path)
        return None
    return [found]


def program() -> list[str] | None:
    """Return the command of a server that accepts the options of llama-server; None if none is installed.

    The order is: the executable in LLAMA_SERVER, `llama-server` on PATH, the package xllamacpp.
    """
    given = os.environ.get(VARIABLE)
    if given:
        return _named(given)
    found = shutil.which("llama-server")
    if found:
        return [found]
    if importlib.util.find_spec("xllamacpp"):
        return [sys.executable, "-m", "swiftlite.engines.llamacpp.embedded"]
    return None
