"""Convert data files to batches of tokens and labels, independent of ranks and of the model."""
