"""How many drafted tokens would be accepted, as the model that is at hand says itself; no engine runs.

It may use `model` and everything below it.
"""
