"""Training methods, each described by a `Method`. This package does not import torch."""
