"""The model on megatron-core: layers, hidden states, logits and losses on the ranks of a mesh.

This package may import `families`, `data`, `plan` and `runtime`, but no package about training.
"""
