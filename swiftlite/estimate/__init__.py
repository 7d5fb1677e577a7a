"""What a run may cost: memory, operations, time, and which layout is likely the fastest. Arithmetic, no torch."""
