"""Measure with the model in training how many draft tokens an engine would accept. No engine is required.

This package may import `model` and packages below it.
"""
