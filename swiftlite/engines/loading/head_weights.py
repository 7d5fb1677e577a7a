"""Tensors named `mtp.*` on their way into an engine: for the draft classes of `vllm/models.py` and `sglang/models/`.

The heads are stored in the layout of Qwen3-Next, heads after the first with a projection and norms of their own under
`mtp.heads.{k}`.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from transformers import PreTrainedConfig

from swiftlite.heads import Heads

Weights = Iterable[tuple[str, torch.Tensor]]
# (part of a joined parameter's name, part of the tensor's name that stands in its place, expert, shard id)
ExpertMapping = list[tuple[str, str, int, str]]

# The engines' joined parameters and the tensors, with their shard ids, that each is filled from
_JOINED = {
    "qkv_proj": {"q_proj": "q", "k_proj": "k", "v_proj": "v"},
    "gate_up_proj": {"gate_proj": 0, "up_proj": 1},
}


def heads_of(hf_config: PreTrainedConfig) -> Heads:
    """The MTP heads that a config promises."""
    return Heads.from_config(vars(hf_config))


class Trunk(torch.nn.Module):
    """Goes before an engine's own class of a model, and keeps the heads from it, which are the draft's.

    All weights get through when config.json promises no heads: the engine then objects to heads, which it should.
    """

    config: PreTrainedConfig

    def load_weights(self, weights: Weights) -> Any:
        """As the engine's class."""
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
) -> set[str]:
    """Fill every parameter from the checkpoint's own tensors, or fail.

    Args:
        parameters: by the name that a checkpoint would give them.
        num_mtp_heads: as config.json promises.
        default_loader: for parameters that bring no `weight_loader` of their own.
        experts: how joined parameters of experts are filled.
        is_part: whether the weights are a part of the checkpoint's, so that nothing can be said to be missing.

    Returns:
        Names of those that were filled.

    Raises:
        ValueError: naming every tensor of a head that is missing, and every mtp.* tensor that no head has.
    """
    targets: dict[str, tuple[str, tuple]] = {}  # the checkpoint's tensor -> parameter, and place in it
    for name in parameters:
        for source, place in _sources(name, experts or []).items():
            targets[source] = (name, place)
    filled = set()
    unknown = []
    missing = {source for source in targets if source.startswith("mtp.")}
    for source, tensor in weights:
        if source in targets:
            name, place = targets[source]
            loader = getattr(parameters[name], "weight_loader", default_loader)
            loader(parameters[name], tensor, *place)
            filled.add(name)
            missing.discard(source)
        elif source.startswith("mtp."):
            unknown.append(source)
    if is_part:
        missing.clear()
    if missing or unknown:
        raise ValueError(
            f"the checkpoint's MTP heads are not the {num_mtp_heads} that its config.json promises:"
            + "".join(f"\n  missing: {name}" for name in sorted(missing))
            + "".join(f"\n  unexpected: {name}" for name in unknown)
        )
    return filled


def _sources(name: str, experts: ExpertMapping) -> dict[str, tuple]:
    """The checkpoint's tensors that fill a parameter, each with its place in it, for the parameter's loader.

    `mtp.layers.0.self_attn.qkv_proj.weight` is filled from `...q_proj.weight` at ("q",), and so on;
    `mtp.norm.weight` from itself at ().
    """
    of_experts = [entry for entry in experts if entry[0] in name]
    if of_experts:
        return {name.replace(joined, part): (name, shard, expert) for joined, part, expert, shard in of_experts}
    for joined, parts in _JOINED.items():
        if f".{joined}." in name:
            return {name.replace(joined, part): (shard,) for part, shard in parts.items()}
    return {name: ()}
