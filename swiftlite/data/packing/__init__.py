"""Select the samples of each micro-batch: packing, scheduling, sampling, streaming."""
