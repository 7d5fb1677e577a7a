"""Linear layers, norms, experts, adapters, and the kernels that compute them."""
