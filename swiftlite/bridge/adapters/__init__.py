"""Convert LoRA adapters between megatron-core and PEFT."""
