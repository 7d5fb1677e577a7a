"""MLPs of megatron-core that compute the activation of their spec, also in a model with fused activations."""

from typing import Any

from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.transformer_config import TransformerConfig

from swiftlite.model.layers.swiglu import unfused


class LimitedMLP(MLP):
    """The MLP of a layer with `Mlp.limit`."""

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any):
        super().__init__(unfused(config), *args, **kwargs)


class LimitedSharedExpertMLP(SharedExpertMLP):
    """Shared experts with `MixtureOfExperts.shared_limit`."""

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any):
        super().__init__(unfused(config), *args, **kwargs)
