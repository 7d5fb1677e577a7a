"""vLLM 0.32: the engine, its server and swiftlite's plugin. Only `info.py` can be imported without vLLM."""
