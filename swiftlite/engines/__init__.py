"""Engines that serve trained heads. Each engine has a folder and an `EngineInfo` (`info.py`); other modules are shared.

May import args, plan, data, bridge, families and acceptance, but not training. Commands access engines only through
their `EngineInfo` (`index.py`).
"""
