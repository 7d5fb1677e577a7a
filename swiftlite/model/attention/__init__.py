"""Attention of every kind, with rotary embeddings and the KV cache."""
