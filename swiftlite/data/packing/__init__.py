"""Which samples a micro-batch holds: packing, scheduling, sampling, streams."""
