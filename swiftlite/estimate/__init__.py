"""Estimate memory, FLOPs and time of a run, and find the fastest layout. Does not import torch."""
