"""The model on megatron-core: layers, hidden states, logits and losses on the ranks of a mesh.

May import `families`, `data`, `plan` and `runtime`, but nothing about training.
"""
