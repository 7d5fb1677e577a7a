"""Weights in engines: what loads, what stays random, what a live update writes."""
