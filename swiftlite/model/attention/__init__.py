"""All kinds of attention, with rotary embeddings and the KV cache."""
