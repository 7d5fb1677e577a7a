"""The micro-batches of a rank, made from samples in memory or from a stream."""
