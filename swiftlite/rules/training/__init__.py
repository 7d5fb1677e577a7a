"""Rules of the training methods; `sft.py` has those that all share."""
