"""The model on megatron-core: from a family's description to layers, states, logits and losses on the ranks of a mesh.

It may use `families`, `data`, `plan` and `runtime`, and knows nothing of training.
"""
