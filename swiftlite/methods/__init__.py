"""Training methods, each described by a `Method`. Does not import torch."""
