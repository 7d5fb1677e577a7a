"""Processes of engines' servers and their metrics."""
