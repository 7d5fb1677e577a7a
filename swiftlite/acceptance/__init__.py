"""Measure how many draft tokens would be accepted, with the model itself and without an engine.

It may use `model` and everything below it.
"""
