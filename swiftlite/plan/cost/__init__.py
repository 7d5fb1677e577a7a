"""Estimate memory, FLOPs and time of a run, and find the fastest parallel layout.

This package does not import torch.
"""
