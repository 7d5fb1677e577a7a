"""Losses over the vocabulary, and load-balancing losses of routers."""
