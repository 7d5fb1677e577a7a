"""The command line: find the command, parse its options, and start its processes.

The steps are in `main.py`. Other packages are imported when a command runs. Only `elastic.py`, the launcher process,
imports torch.
"""
