"""Reward functions of reinforcement learning, the process that runs them, and the advantages computed from rewards."""
