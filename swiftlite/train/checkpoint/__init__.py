"""Checkpoints of a run: weights, optimizer state, adapters, and the files of the source model."""
