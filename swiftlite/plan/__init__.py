"""Derive the plan of a run from options and config.json before anything is loaded; may import `args` and `families`."""
