"""Derive the plan of a run from options and config.json before anything loads; may import `args` and `families`."""
