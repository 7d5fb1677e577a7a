"""Send new weights to a running vLLM: the channel, the transports and the code in vLLM's workers."""
