"""The command line: which command, its options, its processes; may use every room, loaded when a command runs.

`main.py` is the whole way of a command; only `elastic.py`, the launcher's own process, imports
torch.
"""
