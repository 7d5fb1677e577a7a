"""SGLang 0.5.23: the engine, its server and swiftlite's plugin. Only `info.py` can be imported without SGLang."""
