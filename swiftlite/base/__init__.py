"""Define the values that every package may use: errors, logs, atomic files, JSON, and records of heads and adapters."""
