"""transformers with the MTP heads in plain torch around its trunk: the engine that is always there."""
