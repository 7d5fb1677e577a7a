"""Micro-batches of a rank: from samples in memory, from a stream."""
