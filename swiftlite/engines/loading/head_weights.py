"""Load `mtp.*` tensors into the draft classes of `vllm/models.py` and `sglang/models/`.

The tensors of heads have the names of Qwen3-Next, with one addition: for heads after the first, the names of projection
and norms start with `mtp.heads.{k}`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from transformers import PreTrainedConfig

from swiftlite.base.heads import Heads

Weights = Iterable[tuple[str, torch.Tensor]]
# (part of a fused parameter's name, corresponding part of the tensor's name, expert, shard id); without an expert, the
# tensor contains all experts
ExpertMapping = Sequence[tuple[str, str, int | None, str]]

# Fused parameters of the engines, and the tensors with shard ids that fill them
_JOINED = {
    "qkv_proj": {"q_proj": "q", "k_proj": "k", "v_proj": "v"},
    "gate_up_proj": {"gate_proj": 0, "up_proj": 1},
}
OF_ORDER = ".g_idx"
"""Ending of GPTQ's tensors with the group of each input column, which engines read only if groups are out of order."""
# Scales and zero points of a quantized KV cache, which have defaults
_OPTIONAL = (".attn.",)
PACKED_MODULES = {joined: list(parts) for joined, parts in _JOINED.items()}
"""`packed_modules_mapping` of a draft class: how engines find fused modules in the lists of quantization_config."""
FUSED_MODULES = {joined: [joined] for joined in _JOINED}
"""The same for checkpoints with fused tensors."""


def heads_of(hf_config: PreTrainedConfig) -> Heads:
    """Return the MTP heads that a config declares.

    In the config of a vision-language model, transformers moves the settings that it knows to the config of the
    language model.
    """
    return Heads.from_config({**vars(hf_config), **vars(hf_config.get_text_config())})


def changed(config: Any, **values: Any) -> Any:
    """Return a copy of a config of transformers with other values, for a layer that differs from those of the trunk."""
    config = deepcopy(config)
    config.update(values)
    return config


class Trunk(torch.nn.Module):
    """Base class placed before an engine's model class. It removes the heads' weights from the weights to be loaded.

    If config.json declares no heads, all weights are passed to the engine's class, which rejects weights of heads.
    """

    config: PreTrainedConfig

    def load_weights(self, weights: Weights) -> Any:
        """Load the weights of the trunk, with the signature of the engine's class."""
        if heads_of(self.config).layers > 0:
            weights = ((name, tensor) for name, tensor in weights if not name.startswith("mtp."))
        trunk: Any = super()
        return trunk.load_weights(weights)


def fill(
    parameters: Mapping[str, torch.nn.Parameter],
    weights: Weights,
    num_mtp_heads: int,
    default_loader: Callable[..., Any],
    experts: ExpertMapping | None = None,
    *,
    is_part: bool = False,
    is_fused: bool = False,
) -> set[str]:
    """Fill every parameter from the checkpoint's tensors.

    Args:
        parameters: parameters by their names in a checkpoint.
        num_mtp_heads: number of heads in config.json.
        default_loader: loader of parameters without a `weight_loader`.
        experts: how fused parameters of experts are filled; None for heads without experts.
        is_part: whether the weights are only a part of the checkpoint, so that missing tensors are not an error.
        is_fused: whether tensors of the checkpoint are fused like the engine's parameters.

    Returns:
        Names of the filled parameters.

    Raises:
        ValueError: tensors are missing or unknown; the error names every missing tensor of a head and every unknown
            mtp.* tensor.
    """
    targets: dict[str, tuple[str, tuple]] = {}  # tensor of the checkpoint -> parameter, and shard id
    for name in parameters:
        if any(part in name for part in _OPTIONAL):
            continue
        sources = {name: ()} if is_fused else _sources(name, experts or [])
        for source, place in sources.items():
            targets[source] = (name, place)
    filled = set()
    unknown = []
    # Embedding and output layer can be missing: engines replace them by those of the trunk.
    missing = {source for source in targets if source.startswith("mtp.")}
    for source, tensor in weights:
        if source in targets:
            name, place = targets[source]
            # Engines attach loaders to parameters that are split or fused: they select this rank's part and its place.
            loader = getattr(parameters[name], "weight_loader", default_loader)
            loader(parameters[name], tensor, *place)
            filled.add(name)
            missing.discard(source)
        # Tensors of the trunk are loaded by its own class.
        elif source.startswith("mtp.") and not source.endswith(OF_ORDER):
            unknown.append(source)
    if is_part:
        missing.clear()
    if missing or unknown:
        raise ValueError(
            f"the checkpoint's tensors do not match the {num_mtp_heads} MTP heads in config.json:"
            + "".join(f"\n  missing: {name}" for name in sorted(missing))
            + "".join(f"\n  unexpected: {name}" for name in unknown)
        )
    return filled


def without_final_norm(
    model: torch.nn.Module, weights: Weights, load: Callable[..., Any], loaded: set[str]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Load the trunk's final norm into `model.norm` of a draft model, and yield all other weights.

    Args:
        load: the engine's loader of a parameter.
        loaded: gets the name of the norm when it is loaded.
    """
    for name, tensor in weights:
        if name == "model.norm.weight":
            load(model.get_parameter(name), tensor)
            loaded.add(name)
        else:
            yield name, tensor


def own_sinks(weights: Weights, rank: int, size: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Replace the sinks of all attention heads by those of one tensor-parallel rank.

    The parameters of engines have no loader that selects them.
    """
    for name, tensor in weights:
        yield name, tensor.chunk(size)[rank] if name.endswith(".sinks") else tensor


def single_experts(weights: Weights) -> Iterator[tuple[str, torch.Tensor]]:
    """Replace the heads' stacks of all experts, as in files of gpt-oss, by tensors of single experts.

    Example: `mtp.layers.0.mlp.experts.down_proj` [E, F, H] becomes E tensors `mtp.layers.0.mlp.experts.{e}.down_proj`.
    """
    for name, tensor in weights:
        prefix, _, part = name.rpartition(".")
        if name.startswith("mtp.") and prefix.endswith(".experts"):
            for expert, own in enumerate(tensor):
                yield f"{prefix}.{expert}.{part}", own
        else:
            yield name, tensor


def _sources(name: str, experts: ExpertMapping) -> dict[str, tuple]:
    """Return the checkpoint's tensors that fill a parameter, each with the arguments for the parameter's loader.

    For example, `mtp.layers.0.self_attn.qkv_proj.weight` is filled from `...q_proj.weight` with ("q",), and also from
    the tensors of k and v. `mtp.norm.weight` is filled from the tensor of the same name with ().
    """
    expert_entries = [entry for entry in experts if entry[0] in name]
    if expert_entries:
        return {
            name.replace(joined, part): (name, shard) if expert is None else (name, shard, expert)
            for joined, part, expert, shard in expert_entries
        }
    for joined, parts in _JOINED.items():
        if f".{joined}." in name:
            return {name.replace(joined, part): (shard,) for part, shard in parts.items()}
    return {name: ()}
