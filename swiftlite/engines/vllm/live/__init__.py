"""Live weights for vLLM: the channel, the transports and the code in workers."""
