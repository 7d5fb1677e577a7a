"""Live weights for vLLM: channel, transports, the worker's side."""
