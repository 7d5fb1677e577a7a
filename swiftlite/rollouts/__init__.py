"""`megatron grpo`: completions that an engine generates with the current weights, and the training on them."""
