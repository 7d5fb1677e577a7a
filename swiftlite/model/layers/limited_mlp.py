"""MLPs of megatron-core that compute the activation of their spec, also in a model with fused activations."""

from typing import Any

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.transformer_config import TransformerConfig

from swiftlite.model.layers.swiglu import unfused


class LimitedMLP(MLP):
    """The MLP of a layer with `Mlp.limit`.

    Args:
        pg_collection: the groups of the model's mesh. From 0.17 on, megatron-core's layers pass them to each MLP that
            is a subclass, but only the group `tp` to an MLP (transformer_layer.py:435 of 0.19.2).
        is_mtp_layer: passed to subclasses as well; not used.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *args: Any,
        pg_collection: ProcessGroupCollection | None = None,
        is_mtp_layer: bool = False,
        **kwargs: Any,
    ):
        if pg_collection is not None:
            kwargs["tp_group"] = pg_collection.tp
        super().__init__(unfused(config), *args, **kwargs)


class LimitedSharedExpertMLP(SharedExpertMLP):
    """Shared experts with `MixtureOfExperts.shared_limit`."""

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any):
        super().__init__(unfused(config), *args, **kwargs)
