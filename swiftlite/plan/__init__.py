"""Derive the plan of a run from options and config.json before anything is loaded.

This package may import `args` and `families`.
"""
