"""Activation recomputation: a layer stores only its input, and repeats its forward pass in the backward pass.

This module implements the value "full" of `recompute_granularity` for decoder layers, and mtp.py for MTP layers.
Selective recomputation (core_attn, mlp, moe, mla_up_proj) is implemented in megatron-core's layers.
"""

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from megatron.core.fp4_utils import get_fp4_context
from megatron.core.fp8_utils import get_fp8_context
from megatron.core.tensor_parallel.random import CheckpointFunction, _unset_checkpointing
from megatron.core.transformer.transformer_block import TransformerBlock as McoreTransformerBlock
from megatron.core.transformer.transformer_config import TransformerConfig

from swiftlite.model.layers.deepstack import Deepstack
from swiftlite.model.shared_states import SharedStates


class _Checkpoint(CheckpointFunction):
    """megatron-core's checkpoint function, with its global state restored after an exception.

    megatron-core's function leaves a flag for CUDA graphs set (tensor_parallel/random.py:508 of 0.16.1).
    """

    @staticmethod
    def forward(ctx, *args):
        try:
            return CheckpointFunction.forward(ctx, *args)
        finally:
            _unset_checkpointing()

    @staticmethod
    def backward(ctx, *args):
        try:
            return CheckpointFunction.backward(ctx, *args)
        finally:
            _unset_checkpointing()


def checkpoint(
    config: TransformerConfig,
    tp_group: dist.ProcessGroup,
    function: Callable[..., torch.Tensor],
    hidden_states: torch.Tensor,
    *others: torch.Tensor,
) -> torch.Tensor:
    """Call `function(hidden_states, *others)`, storing only its arguments for the backward pass.

    Only tensors with gradients are passed as arguments. Masks, rotary embeddings and packing descriptors belong in the
    closure of `function`, where they do not have to be tensors. Each tensor-parallel rank stores all of
    `hidden_states`; sequence parallelism already divides them.
    """
    if torch.is_grad_enabled() and not hidden_states.requires_grad:
        # The result has a gradient only if an argument has one: with a frozen trunk the layer would not be trained.
        hidden_states = hidden_states.detach().requires_grad_()
    if config.fp8 or config.fp4:
        # Transformer Engine's function also restores the state of its quantizers; FP8 and FP4 are its autocast.
        from megatron.core.extensions.transformer_engine import te_checkpoint

        return te_checkpoint(function, False, tensor_parallel.get_cuda_rng_tracker, tp_group, hidden_states, *others)
    # False: distribute_saved_activations
    return _Checkpoint.apply(function, False, hidden_states, *others)  # type: ignore[return-value]


class TransformerBlock(McoreTransformerBlock):
    """megatron-core's block, with recomputation that also works after a frozen embedding.

    In megatron-core's block, layers after a frozen embedding get no gradient. Up to 0.17 that block has two more
    defects (transformer_block.py:532 of 0.16.1). With the method `uniform`, it fails with an IndexError if
    `recompute_num_layers` does not divide the number of layers of a stage. With the method `block`, it drops the
    padding mask.

    Attributes:
        holds_layers: whether the layers of this stage are part of the block.
    """

    holds_layers = True

    def _checkpointed_forward(
        self,
        hidden_states: torch.Tensor,
        *,
        use_inner_quantization_context: bool,
        extract_layer_indices: Collection[int] = (),
        layer_offset: int = 0,
        **inputs: Any,
    ) -> torch.Tensor:
        """Compute the layers of this stage with recomputation.

        `uniform` splits the layers into groups of `recompute_num_layers` (the last can be smaller) and stores the input
        of each group. `block` recomputes the first `recompute_num_layers` layers, one at a time.

        Args:
            extract_layer_indices: unused. megatron-core 0.17 and later passes the layers whose states are to be
                returned.
            layer_offset: number of layers on previous stages.
            inputs: inputs shared by all layers, without cross attention.
        """
        assert not extract_layer_indices
        num_layers, is_uniform = self.config.recompute_num_layers, self.config.recompute_method == "uniform"
        assert num_layers is not None

        def precision(layer: torch.nn.Module) -> AbstractContextManager:
            if not use_inner_quantization_context:
                return nullcontext()
            get_context = get_fp8_context if self.config.fp8 else get_fp4_context
            # megatron-core's contexts count layers from 0 over all stages, and `layer_number` from 1.
            return get_context(self.config, cast(int, layer.layer_number) - 1)

        shared = inputs.get("attention_mask")
        step = num_layers if is_uniform else 1
        for start in range(0, len(self.layers), step):
            group = _Group(self.layers[start : start + step], inputs, precision)
            made: Any
            if is_uniform or start < num_layers:
                made = checkpoint(self.config, self.tp_group, group, hidden_states, *group.tensors)
            else:
                made = group(hidden_states, *group.tensors)
            if isinstance(shared, SharedStates):
                # Results of the checkpoint, so that the gradients of later layers reach them.
                made, *keys = made
                shared.add_keys(group.numbers, keys)
            hidden_states = made
        return hidden_states


class _Group:
    """Consecutive layers as a function of the state and of other tensors with gradients, which a checkpoint stores.

    These are features of images (`Deepstack`) or states that layers share (`SharedStates`). Keys and values that later
    layers read are further results of the function.

    Args:
        layers: the layers.
        inputs: inputs of all layers.
        precision: returns the context in which a layer runs.
    """

    def __init__(self, layers: Any, inputs: dict[str, Any], precision: Callable[[Any], AbstractContextManager]):
        self.layers, self.inputs, self.precision = layers, inputs, precision
        self.numbers = [layer.layer_number - 1 for layer in layers]
        shared, deepstack = inputs.get("attention_mask"), inputs.get("padding_mask")
        self.shared = shared.for_layers(self.numbers) if isinstance(shared, SharedStates) else None
        self.deepstack = deepstack if isinstance(deepstack, Deepstack) else None

    @property
    def tensors(self) -> Sequence[torch.Tensor]:
        """The further arguments of the function."""
        if self.shared is not None:
            return self.shared.tensors()
        return () if self.deepstack is None else self.deepstack.features_SBH

    def __call__(self, hidden_states: torch.Tensor, *tensors: torch.Tensor) -> Any:
        """Return the state, and if layers share states, a tuple of the state and the new keys and values."""
        # In the backward pass, the arguments are detached copies, whose gradients the checkpoint returns.
        inputs, shared = dict(self.inputs), None
        if self.deepstack is not None:
            inputs["padding_mask"] = replace(self.deepstack, features_SBH=tensors)
        if self.shared is not None:
            inputs["attention_mask"] = shared = self.shared.with_tensors(tensors)
        for layer in self.layers:
            with self.precision(layer):
                hidden_states, _ = layer(hidden_states=hidden_states, **inputs)
        if self.shared is None or shared is None:
            return hidden_states
        return hidden_states, *shared.new_keys(self.shared)
