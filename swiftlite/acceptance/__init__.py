"""Measure with the model how many draft tokens an engine would accept, without an engine.

May import `model` and packages below it.
"""
