"""Load weights in engines, check which tensors are read and which parameters are filled, and update the weights of a
running engine.
"""
