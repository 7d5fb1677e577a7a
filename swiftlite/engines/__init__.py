"""Engines that serve trained heads: one record and one folder each; everything else here is what they share.

May use args, plan, data, bridge, families and acceptance; never training, and no command knows more of an engine than
its record (`info.py`, `index.py`).
"""
