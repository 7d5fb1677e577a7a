"""What a model runs on: the device, the processes and their groups, and megatron-core made to work there.

It may use `args` and `plan`, and knows nothing of models.
"""
