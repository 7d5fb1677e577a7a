"""Estimate memory, FLOPs and time of a run, and the fastest layout. Arithmetic, no torch."""
