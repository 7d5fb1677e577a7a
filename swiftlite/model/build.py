"""From a family and a config.json to the model on this rank."""

from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from swiftlite.errors import UserError
from swiftlite.model.gpt import GPTModel
from swiftlite.model.mla import MLATransformerConfig
from swiftlite.model.specs import decoder_spec, mtp_spec
from swiftlite.runtime.device import Device


def _leave_unset(weight: torch.Tensor) -> torch.Tensor:
    return weight


def build_config(
    architecture: dict[str, Any],
    *,
    device: Device,
    dtype: torch.dtype,
    mtp_num_layers: int,
    tensor_model_parallel_size: int = 1,
) -> TransformerConfig:
    """megatron-core's config: what the architecture fixes, and how swiftlite runs it.

    Args:
        architecture: keyword arguments from `Family.transformer_config`.
    """
    config_class = MLATransformerConfig if architecture.get("multi_latent_attention") else TransformerConfig
    return config_class(
        **architecture,
        mtp_num_layers=mtp_num_layers or None,
        tensor_model_parallel_size=tensor_model_parallel_size,
        bf16=dtype is torch.bfloat16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        # Always: only then does megatron-core mark on a parameter which axis it is split along (layers.py:913).
        perform_initialization=True,
        # Numbers come from the bridge; drawing them here first would take longer than loading them.
        init_method=_leave_unset,
        output_layer_init_method=_leave_unset,
        embedding_init_method=_leave_unset,
        use_cpu_initialization=not device.is_cuda,
        # The only mode whose loss and gradient do not depend on micro-batches, data parallelism or padding.
        calculate_per_token_loss=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        # These fusions need Transformer Engine or CUDA kernels, or change the order of operations.
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
    )


def build_model(
    architecture: dict[str, Any],
    hf_config: dict[str, Any],
    *,
    device: Device,
    dtype: torch.dtype,
    mtp_num_layers: int,
    heads_only: bool = False,
    tensor_model_parallel_size: int = 1,
) -> GPTModel:
    """The model on this rank, on the device, in `dtype`; its weights are unset.

    Raises:
        UserError: the vocabulary does not divide by the tensor-parallel size.
    """
    vocab_size = hf_config["vocab_size"]
    if vocab_size % tensor_model_parallel_size:
        raise UserError(
            f"--tensor_model_parallel_size {tensor_model_parallel_size} does not divide the vocabulary of {vocab_size}",
            "use a divisor of the vocabulary size",
        )
    config = build_config(
        architecture,
        device=device,
        dtype=dtype,
        mtp_num_layers=mtp_num_layers,
        tensor_model_parallel_size=tensor_model_parallel_size,
    )
    model = GPTModel(
        config=config,
        hf_config=hf_config,
        heads_only=heads_only,
        transformer_layer_spec=decoder_spec(config),
        mtp_block_spec=mtp_spec(config),
        vocab_size=vocab_size,
        max_sequence_length=hf_config["max_position_embeddings"],
        share_embeddings_and_output_weights=bool(hf_config.get("tie_word_embeddings", False)),
        position_embedding_type="rope",
    )
    return model.to(device.torch_device)
