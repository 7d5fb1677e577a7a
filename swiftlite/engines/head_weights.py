"""Tensors named `mtp.*` on their way into an engine: for the draft classes of `vllm_models.py` and `sglang_models/`.

The heads are stored in the layout of Qwen3-Next, heads after the first with a projection and norms of their own under
`mtp.heads.{k}`.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from transformers import PreTrainedConfig

Weights = Iterable[tuple[str, torch.Tensor]]
# (part of a joined parameter's name, part of the tensor's name that stands in its place, expert, shard id)
ExpertMapping = list[tuple[str, str, int, str]]

# The engines' joined parameters and the tensors, with their shard ids, that each is filled from
_JOINED = {
    "qkv_proj": {"q_proj": "q", "k_proj": "k", "v_proj": "v"},
    "gate_up_proj": {"gate_proj": 0, "up_proj": 1},
}


def mtp_depth(hf_config: PreTrainedConfig) -> int:
    """MTP heads that a config promises."""
    return getattr(hf_config, "num_nextn_predict_layers", None) or 0


def trunk_weights(weights: Weights, hf_config: PreTrainedConfig) -> Weights:
    """Without the heads, which are the draft's; with them when config.json promises none, so that engines object."""
    depth = mtp_depth(hf_config)
    return ((name, tensor) for name, tensor in weights if not (depth and name.startswith("mtp.")))


def fill(
    parameters: Mapping[str, torch.nn.Parameter],
    weights: Weights,
    num_heads: int,
    default_loader: Callable[..., Any],
    experts: ExpertMapping | None = None,
) -> set[str]:
    """Fill every parameter from the checkpoint's own tensors, or fail.

    Args:
        parameters: by the name that a checkpoint would give them.
        num_heads: that config.json promises.
        default_loader: of parameters that bring none.
        experts: how joined parameters of experts are filled.

    Returns:
        Names of those that were filled.

    Raises:
        ValueError: naming every tensor of a head that is missing, and every mtp.* tensor that no head has.
    """
    sources = {source: (name, place) for name in parameters for source, place in _sources(name, experts or []).items()}
    seen, unknown = set(), []
    for source, tensor in weights:
        if source in sources:
            name, place = sources[source]
            loader = getattr(parameters[name], "weight_loader", default_loader)
            loader(parameters[name], tensor, *place)
            seen.add(source)
        elif source.startswith("mtp."):
            unknown.append(source)
    missing = sorted(source for source in sources.keys() - seen if source.startswith("mtp."))
    if missing or unknown:
        raise ValueError(
            f"the checkpoint's MTP heads are not the {num_heads} that its config.json promises:"
            + "".join(f"\n  missing: {name}" for name in missing)
            + "".join(f"\n  unexpected: {name}" for name in unknown)
        )
    return {sources[source][0] for source in seen}


def _sources(name: str, experts: ExpertMapping) -> dict[str, tuple]:
    """The checkpoint's tensors that fill a parameter, each with its place in it, for the parameter's loader."""
    if entries := [entry for entry in experts if entry[0] in name]:
        return {name.replace(joined, part): (name, shard, e) for joined, part, e, shard in entries}
    for joined, parts in _JOINED.items():
        if f".{joined}." in name:
            return {name.replace(joined, part): (shard,) for part, shard in parts.items()}
    return {name: ()}
