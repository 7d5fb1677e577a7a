"""vLLM 0.32: the engine, its server, what swiftlite adds to it as a plugin. Only `info.py` loads without it."""
