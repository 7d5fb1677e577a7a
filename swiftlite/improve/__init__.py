"""Define the commands that call other commands: `regenerate` and `speedup`."""
