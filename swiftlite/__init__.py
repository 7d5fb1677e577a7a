"""Fine-tune with Multi-Token Prediction on megatron-core; export; serve with the trained heads."""

__version__ = "0.1.0"
