"""Set up the device, the processes and their groups, and megatron-core.

This package may import `args` and `plan`; it contains nothing about models.
"""
