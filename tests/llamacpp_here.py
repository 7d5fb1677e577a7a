"""Skip tests that need llama.cpp where it is not installed."""

import pytest

from swiftlite.engines.index import ENGINES

needs_llamacpp = pytest.mark.skipif(not ENGINES["llamacpp"].is_installed, reason="llama.cpp is not installed")
