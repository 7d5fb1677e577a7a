"""What follows from options and config.json, by arithmetic, before anything loads; may use `args` and `families`."""
