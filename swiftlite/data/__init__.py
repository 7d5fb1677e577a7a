"""Turn data files into batches of tokens and labels, independent of ranks and of the model."""
