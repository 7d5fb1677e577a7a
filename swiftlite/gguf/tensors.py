"""List the tensors of a GGUF file, and the Hugging Face tensors from which they are computed.

The list is derived from the family's bridge rows, because these have the same Megatron names in all families, and
contain every Hugging Face tensor exactly once. For example, `decoder.layers.3.self_attention.linear_qkv.weight`
consists of three Hugging Face tensors, which become `blk.3.attn_q.weight`, `blk.3.attn_k.weight` and
`blk.3.attn_v.weight`.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from swiftlite.base.errors import UserError
from swiftlite.bridge.join import SwapHalves
from swiftlite.bridge.rows import Row
from swiftlite.families.absent import NoAttention
from swiftlite.families.attention import GroupedQueryAttention, LatentAttention
from swiftlite.families.family import Family
from swiftlite.families.layer import Layer
from swiftlite.families.linear_attention import GatedDeltaNet
from swiftlite.families.mamba import Mamba2
from swiftlite.families.mlp import Mlp, is_gated
from swiftlite.gguf.transforms import (
    ADD_ONE,
    COPY,
    NEGATIVE_EXP,
    SQUEEZE,
    Chain,
    Reorder,
    SplitKeysAndValues,
    Stack,
    Transform,
    reshape,
    zeros,
)

HfConfig = Mapping[str, Any]

_ALWAYS_FLOAT32 = ("ffn_gate_inp.weight", "ffn_gate_inp_shexp.weight", "ssm_conv1d.weight", "ssm_norm.weight")
_ALWAYS_FLOAT32 += ("ssm_a", "ssm_d")
IDLE_EXPERT = 32
"""Width of an expert of zeros, the smallest block of a quantized row."""

_MODEL = {
    "embedding.word_embeddings.weight": ("token_embd.weight",),
    "decoder.final_layernorm.weight": ("output_norm.weight",),
    "output_layer.weight": ("output.weight",),
    "own_inputs.word_embeddings.weight": ("per_layer_token_embd.weight",),
    "own_inputs.projection.weight": ("per_layer_model_proj.weight",),
    "own_inputs.norm.weight": ("per_layer_proj_norm.weight",),
}
_LAYER = {
    "input_layernorm.weight": ("attn_norm.weight",),
    "pre_mlp_layernorm.weight": ("ffn_norm.weight",),
    "post_attention_layernorm.weight": ("post_attention_norm.weight",),
    "post_mlp_layernorm.weight": ("post_ffw_norm.weight",),
    "layer_scalar": ("layer_output_scale.weight",),
    # an input of the layer in addition to the state
    "own_input_gate.weight": ("inp_gate.weight",),
    "own_input_projection.weight": ("proj.weight",),
    "own_input_norm.weight": ("post_norm.weight",),
    # attention
    "self_attention.linear_qkv.weight": ("attn_q.weight", "attn_k.weight", "attn_v.weight"),
    "self_attention.linear_qkv.bias": ("attn_q.bias", "attn_k.bias", "attn_v.bias"),
    "self_attention.linear_proj.weight": ("attn_output.weight",),
    "self_attention.q_layernorm.weight": ("attn_q_norm.weight",),
    "self_attention.k_layernorm.weight": ("attn_k_norm.weight",),
    # latent attention
    "self_attention.linear_q_proj.weight": ("attn_q.weight",),
    "self_attention.linear_q_down_proj.weight": ("attn_q_a.weight",),
    "self_attention.linear_q_up_proj.weight": ("attn_q_b.weight",),
    "self_attention.linear_kv_down_proj.weight": ("attn_kv_a_mqa.weight",),
    "self_attention.linear_kv_up_proj.weight": ("attn_k_b.weight", "attn_v_b.weight"),
    "self_attention.kv_layernorm.weight": ("attn_kv_a_norm.weight",),
    # gated delta net
    "self_attention.in_proj_qkvz.weight": ("attn_qkv.weight", "attn_gate.weight"),
    "self_attention.in_proj_ba.weight": ("ssm_beta.weight", "ssm_alpha.weight"),
    "self_attention.conv1d.weight": ("ssm_conv1d.weight",),
    "self_attention.A_log": ("ssm_a",),
    "self_attention.dt_bias": ("ssm_dt.bias",),
    "self_attention.norm.weight": ("ssm_norm.weight",),
    "self_attention.out_proj.weight": ("ssm_out.weight",),
    # Mamba-2
    "self_attention.in_proj_zxbcdt.weight": ("ssm_in.weight",),
    "self_attention.conv1d.bias": ("ssm_conv1d.bias",),
    "self_attention.D": ("ssm_d",),
    # MLP
    "mlp.linear_fc1.weight": ("ffn_gate.weight", "ffn_up.weight"),
    "mlp.linear_fc2.weight": ("ffn_down.weight",),
    # mixture of experts
    "mlp.router.weight": ("ffn_gate_inp.weight",),
    "mlp.router.expert_bias": ("exp_probs_b.bias",),
    "mlp.fc1_latent_proj.weight": ("ffn_latent_down.weight",),
    "mlp.fc2_latent_proj.weight": ("ffn_latent_up.weight",),
    "mlp.shared_experts.linear_fc1.weight": ("ffn_gate_shexp.weight", "ffn_up_shexp.weight"),
    "mlp.shared_experts.linear_fc2.weight": ("ffn_down_shexp.weight",),
    "mlp.shared_experts.gate_weight": ("ffn_gate_inp_shexp.weight",),
    # experts next to an MLP
    "mlp.dense.linear_fc1.weight": ("ffn_gate.weight", "ffn_up.weight"),
    "mlp.dense.linear_fc2.weight": ("ffn_down.weight",),
    "mlp.dense_norm.weight": ("ffn_norm.weight",),
    "mlp.dense_output_norm.weight": ("post_ffw_norm_1.weight",),
    "mlp.experts_norm.weight": ("pre_ffw_norm_2.weight",),
    "mlp.experts_output_norm.weight": ("post_ffw_norm_2.weight",),
    "mlp.router.input_norm.weight": ("ffn_gate_inp.scale",),
    "mlp.router.expert_scale": ("ffn_down_exps.scale",),
}
_EXPERTS = {
    "linear_fc1.weight": ("ffn_gate_exps.weight", "ffn_up_exps.weight"),
    "linear_fc2.weight": ("ffn_down_exps.weight",),
}
_HEAD = {
    "eh_proj.weight": ("nextn.eh_proj.weight",),
    "enorm.weight": ("nextn.enorm.weight",),
    "hnorm.weight": ("nextn.hnorm.weight",),
    "final_layernorm.weight": ("nextn.shared_head_norm.weight",),
}
_EXPERT = re.compile(r"mlp\.experts\.local_experts\.\d+\.(.+)")


@dataclass(frozen=True)
class Conversion:
    """Some Hugging Face tensors, and the GGUF tensors that are computed from them.

    Attributes:
        hf: names of the Hugging Face tensors; empty for constants.
        gguf: names of the GGUF tensors.
        is_exact: whether the Hugging Face tensors are float32 even in a 16-bit model.
    """

    hf: tuple[str, ...]
    gguf: tuple[str, ...]
    transform: Transform = COPY
    is_exact: bool = False


@dataclass(frozen=True)
class Naming:
    """The differences of an architecture of llama.cpp from the names of other architectures.

    Attributes:
        names: GGUF names in a layer that differ, by Megatron name.
        idle_expert: whether a dense MLP in a head is stored as shared experts, next to a routed expert of zeros.
        idle_shared: whether a mixture without shared experts gets a shared expert of zeros.
        tiles_values: whether the values of a gated delta net are ordered by their number in the group, then by group.
        joins_decays: whether the projections of beta and decay are one tensor.
        pairs_channels: whether the two channels that a rotation mixes are next to each other in queries and keys.
    """

    names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    idle_expert: bool = False
    idle_shared: bool = False
    tiles_values: bool = False
    joins_decays: bool = False
    pairs_channels: bool = False


def conversions(family: Family, hf_config: HfConfig, heads: int, naming: Naming) -> list[Conversion]:
    """Return all tensors of a model.

    Args:
        heads: number of MTP heads. llama.cpp numbers them after the trunk's layers.

    Raises:
        UserError: llama.cpp has no tensor for a part of this family.
    """
    architecture = family.architecture(hf_config)
    found = []
    for row in architecture.outside.rows():
        found.append(_plain(row, _MODEL[row.mcore], "", family))
    for number, layer in enumerate(architecture.layers):
        rows = architecture.layer_rows(number)
        found += layer_conversions(rows, f"decoder.layers.{number}.", number, layer, family, naming)
    for head in range(heads):
        number = architecture.outside.num_layers + head
        prefix = f"mtp.layers.{head}."
        frame = [row for row in family.head_rows(hf_config, head) if row.mcore.removeprefix(prefix) in _HEAD]
        block = [row for row in family.head_rows(hf_config, head) if row not in frame]
        for row in frame:
            found.append(_plain(row, _HEAD[row.mcore.removeprefix(prefix)], f"blk.{number}.", family))
        layer = architecture.mtp_block
        inside = f"{prefix}transformer_layer."
        if naming.idle_expert and isinstance(layer.mlp, Mlp):
            found += _dense_as_shared(block, inside, number, layer, family, naming)
        else:
            found += layer_conversions(block, inside, number, layer, family, naming)
    return found


def is_always_float32(gguf_name: str, shape: Sequence[int]) -> bool:
    """Return whether a GGUF tensor is float32 whatever the type of matrices: vectors, routers and convolutions."""
    return len(shape) == 1 or gguf_name.endswith(_ALWAYS_FLOAT32)


def layer_conversions(
    rows: Sequence[Row], prefix: str, number: int, layer: Layer, family: Family, naming: Naming
) -> Iterator[Conversion]:
    """Yield the conversions of a decoder layer.

    Args:
        rows: bridge rows of the layer.
        prefix: start of their Megatron names.
        number: number of the layer in the file.
    """
    experts: dict[str, list[Row]] = {}
    begin = f"blk.{number}."
    for row in rows:
        name = row.mcore.removeprefix(prefix)
        if match := _EXPERT.fullmatch(name):
            experts.setdefault(match[1], []).append(row)
        elif isinstance(layer.attention, GatedDeltaNet) and name.startswith("self_attention."):
            yield _delta_net(row, name, begin, layer.attention, naming)
        elif isinstance(layer.attention, Mamba2) and name.startswith("self_attention."):
            transform = _mamba_transform(name.removeprefix("self_attention."), layer.attention)
            yield Conversion(tuple(row.hf), _prefixed(begin, _LAYER[name]), transform, row.is_exact)
        elif isinstance(layer.attention, NoAttention) and name == "pre_mlp_layernorm.weight":
            yield _plain(row, _LAYER["input_layernorm.weight"], begin, family)
        elif isinstance(layer.attention, LatentAttention) and name == "self_attention.linear_kv_up_proj.weight":
            attention = layer.attention
            split = SplitKeysAndValues(attention.heads, attention.qk_nope_head_dim, attention.v_head_dim)
            yield Conversion(tuple(row.hf), _prefixed(begin, _LAYER[name]), split)
        elif naming.pairs_channels and name.startswith("self_attention.linear_qkv."):
            yield Conversion(tuple(row.hf), _prefixed(begin, _LAYER[name]), _paired(row, layer))
        else:
            yield _plain(row, _in_layer(layer, name, _names(name, naming)), begin, family)
    for name, expert_rows in experts.items():
        for index, gguf in enumerate(_in_layer(layer, name, _EXPERTS[name])):
            yield Conversion(tuple(list(row.hf)[index] for row in expert_rows), (begin + gguf,), Stack())
    if layer.mlp.experts and naming.idle_shared and not any("shared" in row.mcore for row in rows):
        yield _zero_mlp(begin, "_shexp", (), layer.attention.hidden)


def _dense_as_shared(
    rows: Sequence[Row], prefix: str, number: int, layer: Layer, family: Family, naming: Naming
) -> Iterator[Conversion]:
    """Yield the decoder layer of a head whose dense MLP is stored as shared experts, next to a routed expert of
    zeros."""
    begin = f"blk.{number}."
    for row in rows:
        name = row.mcore.removeprefix(prefix).replace("mlp.linear", "mlp.shared_experts.linear")
        yield _plain(row, _names(name, naming), begin, family)
    hidden = layer.attention.hidden
    names = _prefixed(begin, (*_LAYER["mlp.router.weight"], *_LAYER["mlp.router.expert_bias"]))
    yield Conversion((), names, zeros((1, hidden), (1,)))
    yield _zero_mlp(begin, "_exps", (1,), hidden)


def _zero_mlp(begin: str, suffix: str, stacked: tuple[int, ...], hidden: int) -> Conversion:
    names = tuple(f"{begin}ffn_{part}{suffix}.weight" for part in ("gate", "up", "down"))
    narrow, wide = (*stacked, IDLE_EXPERT, hidden), (*stacked, hidden, IDLE_EXPERT)
    return Conversion((), names, zeros(narrow, narrow, wide))


def _names(name: str, naming: Naming) -> tuple[str, ...]:
    found = naming.names.get(name) or _LAYER.get(name)
    if found is None:
        raise UserError(f"llama.cpp has no tensor for {name}", "use another --infer_backend")
    return found


def _in_layer(layer: Layer, name: str, names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names without those of matrices that the layer does not have: of keys and values, or of gates."""
    attention = layer.attention
    if name == "self_attention.linear_qkv.weight" and isinstance(attention, GroupedQueryAttention):
        if attention.key_layer is not None:
            return names[:1]
        return names[:2] if attention.keys_are_values else names
    if name.endswith("linear_fc1.weight") and not is_gated(getattr(layer.mlp, "activation", "")):
        return names[1:]
    return names


def _plain(row: Row, gguf: tuple[str, ...], begin: str, family: Family) -> Conversion:
    """Return the conversion of tensors that are copied, except that norms can have another zero point."""
    transform: Transform = COPY
    if isinstance(row.join, SwapHalves):  # llama.cpp's projection reads the embedding first, as megatron-core's
        (shape,) = row.hf.values()
        transform = _swapped(shape[row.join.axis], row.join.axis)
    elif family.norm_start == 0 and row.mcore.endswith("norm.weight"):
        transform = ADD_ONE
    return Conversion(tuple(row.hf), _prefixed(begin, gguf), transform, row.is_exact)


def _prefixed(begin: str, names: Sequence[str]) -> tuple[str, ...]:
    return tuple(begin + name for name in names)


def _paired(row: Row, layer: Layer) -> Reorder:
    """Return the transform of queries, keys and values whose rotary channels are paired.

    Hugging Face rotates channel c of a head with channel c + D / 2. For example, the channels of a head with D = 4 are
    0 1 2 3; in pairs, they are 0 2 1 3.
    """
    assert isinstance(layer.attention, GroupedQueryAttention)
    half, order = layer.attention.head_dim // 2, list[int]()
    lengths = tuple(shape[0] for shape in row.hf.values())
    of_queries, of_keys, of_values = lengths
    for start in range(0, of_queries + of_keys, 2 * half):
        for channel in range(start, start + half):
            order += (channel, channel + half)
    order += range(of_queries + of_keys, of_queries + of_keys + of_values)
    return Reorder(0, tuple(order), lengths, lengths)


def _swapped(length: int, axis: int) -> Reorder:
    half = length // 2
    return Reorder(axis, (*range(half, length), *range(half)), (length,), (length,))


def _delta_net(row: Row, name: str, begin: str, kind: GatedDeltaNet, naming: Naming) -> Conversion:
    """Return the conversion of a tensor of a gated delta net."""
    names = _LAYER[name]
    if naming.joins_decays and name == "self_attention.in_proj_ba.weight":
        names = ("ssm_ba.weight",)
    part = name.removeprefix("self_attention.")
    return Conversion(tuple(row.hf), _prefixed(begin, names), _delta_transform(part, row, kind, naming), row.is_exact)


def _delta_transform(part: str, row: Row, kind: GatedDeltaNet, naming: Naming) -> Transform:
    per_group = kind.value_heads // kind.key_heads
    keys, values = kind.key_heads * kind.key_head_dim, kind.value_heads * kind.value_head_dim
    heads = _value_heads(kind, naming)
    channels = _blocks(heads, kind.value_head_dim)
    match part:
        case "in_proj_qkvz.weight":
            lengths = tuple(shape[0] for shape in row.hf.values())
            if kind.hf_is_grouped:
                order = _ungrouped(kind, per_group)
            else:
                gates = [2 * keys + values + channel for channel in channels]
                order = (*range(2 * keys), *(2 * keys + channel for channel in channels), *gates)
            return Reorder(0, tuple(order), lengths, (2 * keys + values, values))
        case "in_proj_ba.weight":
            if naming.joins_decays:
                return COPY
            count = kind.value_heads
            order = (*heads, *(count + head for head in heads))
            return Reorder(0, order, (count, count), (count, count))
        case "conv1d.weight":
            order = (*range(2 * keys), *(2 * keys + channel for channel in channels))
            return Chain((SQUEEZE, Reorder(0, order, (len(order),), (len(order),))))
        case "A_log":
            return Chain((NEGATIVE_EXP, Reorder(0, heads, (len(heads),), (len(heads),))))
        case "dt_bias":
            return Reorder(0, heads, (len(heads),), (len(heads),))
        case "out_proj.weight":
            return Reorder(1, channels, (len(channels),), (len(channels),))
    return COPY


def _mamba_transform(name: str, kind: Mamba2) -> Transform:
    heads, inner = kind.heads, kind.heads * kind.head_dim
    per_head = reshape((heads,), (heads, 1))
    transforms: dict[str, Transform] = {
        "conv1d.weight": SQUEEZE,
        "A_log": Chain((NEGATIVE_EXP, per_head)),
        "D": per_head,
        "norm.weight": reshape((inner,), (kind.groups, inner // kind.groups)),
    }
    return transforms.get(name, COPY)


def _value_heads(kind: GatedDeltaNet, naming: Naming) -> tuple[int, ...]:
    """Return the value heads in llama.cpp's order.

    Hugging Face orders them by group. For example, two groups of three value heads are 0 1 2 and 3 4 5; tiled, they are
    0 3 1 4 2 5.
    """
    if not naming.tiles_values:
        return tuple(range(kind.value_heads))
    per_group = kind.value_heads // kind.key_heads
    order = []
    for number in range(per_group):
        order += range(number, kind.value_heads, per_group)
    return tuple(order)


def _blocks(blocks: Sequence[int], size: int) -> tuple[int, ...]:
    """Return the channels of blocks of `size` channels."""
    order: list[int] = []
    for block in blocks:
        order += range(block * size, (block + 1) * size)
    return tuple(order)


def _ungrouped(kind: GatedDeltaNet, per_group: int) -> list[int]:
    """Return the rows of queries, keys, values and gates from rows that are ordered by group.

    A group has the rows of a query, its key, `per_group` values and as many gates. The example of `Reorder` has two
    groups.
    """
    key, values = kind.key_head_dim, per_group * kind.value_head_dim
    starts, group = (0, key, 2 * key, 2 * key + values), 2 * (key + values)
    order: list[int] = []
    for start, length in zip(starts, (key, key, values, values), strict=True):
        for number in range(kind.key_heads):
            first = number * group + start
            order += range(first, first + length)
    return order
