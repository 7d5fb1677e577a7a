"""transformers with MTP heads in plain torch on top of its trunk: the engine that is always installed."""
