"""Engines that serve models with trained heads. Each engine has a folder and an `EngineInfo` (`info.py`).

All engines share the other modules. This package may import args, plan, data, bridge, families and acceptance, but not
training. Commands access engines only through their `EngineInfo` (`index.py`).
"""
