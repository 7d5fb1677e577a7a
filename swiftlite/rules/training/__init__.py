"""Rules of the training methods. `sft.py` has the rules that all methods share."""
