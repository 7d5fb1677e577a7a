"""Losses over the vocabulary, and those of routers."""
