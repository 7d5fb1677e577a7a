"""SGLang 0.5.23: the engine, its server, what swiftlite adds to it as a plugin. Only `info.py` loads without it."""
