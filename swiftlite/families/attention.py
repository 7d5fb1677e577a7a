"""Define kinds of attention, each with its bridge rows, sizes, FLOPs, and the ways in which ranks can split it.

`model/specs.py` selects the modules that compute them. `mlp.py` has the kinds of MLP, the other half of a decoder
layer; `layer.py` defines the interface of a kind.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any, ClassVar

from swiftlite.bridge.join import COPY, GatedQkv, Interleave, InterleaveBlocks, Join
from swiftlite.bridge.rows import Row, lift, shapes_of
from swiftlite.families.indexer import Indexer
from swiftlite.families.rank import FLOAT32, ParameterCount, Rank


@dataclass(frozen=True)
class GroupedQueryAttention:
    """Attention whose heads share keys and values in groups; with one group per head it is multi-head attention.

    Attributes:
        hidden: size of the model's states.
        heads: number of attention heads.
        groups: number of key-value heads.
        head_dim: size of a query head and a key head.
        rotary: number of rotary channels of a head; 0 without rotary embeddings.
        v_head_dim: size of a value head, at most `head_dim`; None: `head_dim`. Another size is not supported with norms
            of queries and keys, or an output gate.
        value_scale: factor of values.
        keys_are_values: whether values are the projected keys, before their norm and rotary embedding. Requires
            `qk_norm`, and `v_head_dim` None.
        value_norm: whether each head's value is normalized, without a weight. Requires `qk_norm`.
        qkv_bias: whether queries, keys and values have biases.
        output_bias: whether the output projection has a bias.
        qk_norm: whether each head's query and key are normalized.
        qk_norm_is_joint: whether this norm is over the channels of all heads together, with a weight per channel.
        output_gate: whether each channel of a head's output is multiplied by the sigmoid of a gate. The projection of
            queries also computes the gates.
        head_gate: whether the output of each head is multiplied by the sigmoid of a gate, one number per head and
            token.
        window: number of tokens that a token sees: itself and the tokens directly before it; None: all tokens before
            it.
        rope: index in `Outside.ropes` of the rotary embedding; None: all layers have the same.
        rope_start: number of rotary channels of the rotary embeddings before this one in `Outside.ropes`; None: each
            has the number of channels of this one.
        scale: factor of attention scores; None: 1 / sqrt(head_dim).
        has_sinks: whether each head has a sink: a trained score that takes part in the softmax, without a value.
        hf_is_fused: whether files have queries, keys and values in one tensor.
        rope_interleave: whether channels 2i and 2i + 1 are rotated together; otherwise i and i + rotary / 2.
        key_layer: number of the decoder layer whose keys and values are read, with the same `groups` and `head_dim`;
            None: the layer computes its own.
        keeps_keys: whether later layers can read the keys and values.
        hf_heads, hf_groups: keys of config.json for `heads` and `groups`.
    """

    recompute_modules: ClassVar[tuple[str, ...]] = ("core_attn",)
    needs_sequence_parallel: ClassVar[str] = ""
    layer_arguments: ClassVar[tuple[str, ...]] = ("num_attention_heads", "num_query_groups", "kv_channels")
    takes_packed_rows: ClassVar[bool] = True
    takes_parts_of_rows: ClassVar[bool] = True
    is_recurrent: ClassVar[bool] = False
    indexer = None

    hidden: int
    heads: int
    groups: int
    head_dim: int
    rotary: int
    v_head_dim: int | None = None
    value_scale: float = 1.0
    keys_are_values: bool = False
    value_norm: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False
    qk_norm_is_joint: bool = False
    output_gate: bool = False
    head_gate: bool = False
    window: int | None = None
    rope: int | None = None
    rope_start: int | None = None
    scale: float | None = None
    has_sinks: bool = False
    hf_is_fused: bool = False
    rope_interleave: bool = False
    key_layer: int | None = None
    keeps_keys: bool = False
    hf_heads: str = "num_attention_heads"
    hf_groups: str = "num_key_value_heads"

    @property
    def tensor_split(self) -> dict[str, int]:
        return {self.hf_heads: self.heads, self.hf_groups: self.groups}

    def mcore_config(self) -> dict[str, Any]:
        config = {
            "num_attention_heads": self.heads,
            "num_query_groups": self.groups,
            "kv_channels": self._value_size,  # size of the result of a head
            "add_qkv_bias": self.qkv_bias,
            # megatron-core sums gradients of these norms over tensor-parallel ranks, which split joint norms instead.
            "qk_layernorm": self.qk_norm and not self.qk_norm_is_joint,
        }
        if self.output_gate:
            config["attention_output_gate"] = True
        if self.scale is not None:
            config["softmax_scale"] = self.scale
        elif self._value_size != self.head_dim:
            config["softmax_scale"] = self.head_dim**-0.5
        return config

    def rows(self) -> list[Row]:
        queries, keys = self.heads * self.head_dim, self.groups * self.head_dim
        results, values = self.heads * self._value_size, self.groups * self._value_size
        qkv: Join = Interleave(self.groups)
        if self.output_gate:
            qkv = GatedQkv(self.groups, self.head_dim)
        channels = {"q_proj": queries * (1 + self.output_gate), "k_proj": keys}
        if not self.keys_are_values:
            channels["v_proj"] = values
        if self.key_layer is not None:
            channels, qkv = {"q_proj": queries}, COPY
        weights = {f"{name}.weight": (number, self.hidden) for name, number in channels.items()}
        if self.hf_is_fused:
            weights = {"qkv_proj.weight": (queries + keys + values, self.hidden)}
            qkv = InterleaveBlocks(self.groups, ((queries, keys, values),))
        rows = [
            Row("linear_qkv.weight", weights, qkv),
            Row("linear_proj.weight", {"o_proj.weight": (self.hidden, results)}),
        ]
        if self.qkv_bias:
            biases = {f"{name}.bias": (number,) for name, number in channels.items()}
            rows.append(Row("linear_qkv.bias", biases, qkv))
        if self.output_bias:
            rows.append(Row("linear_proj.bias", {"o_proj.bias": (self.hidden,)}))
        if self.head_gate:
            rows.append(Row("linear_gate.weight", {"g_proj.weight": (self.heads, self.hidden)}))
        if self.has_sinks:
            rows.append(Row("core_attention.softmax_offset", {"sinks": (self.heads,)}))
        if self.qk_norm:
            query, key = (queries, keys) if self.qk_norm_is_joint else (self.head_dim, self.head_dim)
            rows.append(Row("q_layernorm.weight", {"q_norm.weight": (query,)}))
            if self.key_layer is None:
                rows.append(Row("k_layernorm.weight", {"k_norm.weight": (key,)}))
        return lift(rows, "self_attention.", "self_attn.")

    def parameters(self, rank: Rank) -> ParameterCount:
        queries, keys = self._widths(rank)
        _, values = self._value_widths(rank)
        biases = self.qkv_bias * (queries + keys + values) + self.output_bias * self.hidden
        sinks = self.has_sinks * (self.heads // rank.tp)
        norms = 0
        if self.qk_norm:
            norms = queries + keys if self.qk_norm_is_joint else 2 * self.head_dim
            if self.key_layer is not None:
                norms = self.head_dim
        return ParameterCount(self._matrices(rank) + biases + sinks + norms)

    def macs_per_token(self) -> int:
        return self._matrices(Rank())

    def macs_per_pair(self) -> int:
        return self.heads * (self.head_dim + self._value_size)

    def gathered(self, rank: Rank) -> int:
        keys_and_values = self.groups // rank.tp * (self.head_dim + self._value_size)
        return rank.itemsize * rank.tokens * keys_and_values

    def input_activation_bytes(self, rank: Rank) -> int:
        # The projection of gates per head is never in low precision, and saves the input itself.
        is_kept_twice = self.head_gate and rank.quantized is not None
        return rank.input_activation_bytes(rank.sequence_tokens, self.hidden) + is_kept_twice * rank.hidden_state_bytes(
            self.hidden
        )

    def activation_bytes(self, rank: Rank) -> int:
        queries, keys = self._widths(rank)
        results, values = self._value_widths(rank)
        if rank.cp > 1 or self.value_scale != 1:
            # Queries and the result; keys and values, of all context-parallel ranks, are separate tensors.
            core = queries + results + (keys + values) * rank.cp
        elif self.key_layer is not None:  # keys and values are stored by the layer that computes them
            core = queries + results
        else:
            # Queries, keys and the result; values are a view of the projection's output, so the whole output is stored.
            core = queries + results + keys + self._projected(rank)
            if not (self.rotary or self.qk_norm):
                core -= self._viewed(rank)
        num_bytes = rank.itemsize * rank.tokens * core
        if self.output_gate:
            num_bytes += rank.tokens * 2 * queries * rank.itemsize  # sigmoid of the gate, and the product
        if self.head_gate:
            num_bytes += rank.tokens * (self.heads // rank.tp + results) * rank.itemsize  # the same
        num_bytes += _softmax_statistics(rank, self.heads)
        if self.qk_norm:
            num_bytes += self._qk_norm_bytes(rank)
        if self.value_norm and self.key_layer is None:
            num_bytes += self._value_norm_bytes(rank)
        return num_bytes

    def _widths(self, rank: Rank) -> tuple[int, int]:
        """Return the number of channels of queries and of keys on a rank."""
        return self.heads // rank.tp * self.head_dim, self.groups // rank.tp * self.head_dim

    def _value_widths(self, rank: Rank) -> tuple[int, int]:
        """Return the number of channels of results (inputs of the output projection) and of values on a rank."""
        return self.heads // rank.tp * self._value_size, self.groups // rank.tp * self._value_size

    @property
    def _value_size(self) -> int:
        if self.v_head_dim is None:
            return self.head_dim
        return self.v_head_dim

    def _projected(self, rank: Rank) -> int:
        """Return the number of channels of the projection's output on a rank."""
        queries, keys = self._widths(rank)
        _, values = self._value_widths(rank)
        if self.key_layer is not None:
            return queries
        return queries * (1 + self.output_gate) + keys + values * (not self.keys_are_values)

    def _viewed(self, rank: Rank) -> int:
        """Return how many channels of queries and keys are views of the projection's output, unless they are rotated
        or normalized. Queries of several groups with several heads each are copied."""
        queries, keys = self._widths(rank)
        is_copied = self.groups > rank.tp and self.heads > self.groups
        return keys if is_copied else queries + keys

    def _matrices(self, rank: Rank) -> int:
        results, _ = self._value_widths(rank)
        head_gates = self.head_gate * (self.heads // rank.tp)
        return (self._projected(rank) + results + head_gates) * self.hidden

    def _qk_norm_bytes(self, rank: Rank) -> int:
        queries, keys = self._widths(rank)
        if self.qk_norm_is_joint:
            unfused = replace(rank, is_fused=False)  # no kernel sums over ranks
            return sum(unfused.norm_activation_bytes(rank.tokens, width) for width in (queries, keys))
        heads, groups = self.heads // rank.tp, self.groups // rank.tp
        if self.key_layer is not None:
            return rank.norm_activation_bytes(rank.tokens * heads, self.head_dim)
        num_bytes = rank.norm_activation_bytes(rank.tokens * heads, self.head_dim) + rank.norm_activation_bytes(
            rank.tokens * groups, self.head_dim
        )
        if not (rank.copies_norm_inputs or rank.copies_views) and rank.cp == 1:
            num_bytes -= rank.tokens * keys * rank.itemsize  # input of the norm and values are views of one tensor
        return num_bytes

    def _value_norm_bytes(self, rank: Rank) -> int:
        """Return the bytes of scales, and of values before and after the norm.

        Values before the norm are a view of the projection's output. If norms copy their inputs, this output is not
        stored. With context parallelism, values after the norm are not stored, because they are gathered.
        """
        _, values = self._value_widths(rank)
        num_bytes = rank.tokens * (self.groups // rank.tp) * FLOAT32
        if rank.cp > 1:
            return num_bytes + rank.tokens * values * (FLOAT32 if rank.copies_norm_inputs else rank.itemsize)
        num_bytes += rank.tokens * values * rank.itemsize
        if rank.copies_norm_inputs:
            num_bytes += rank.tokens * (values * FLOAT32 - self._projected(rank) * rank.itemsize)
        return num_bytes


@dataclass(frozen=True)
class LatentAttention:
    """DeepSeek's multi-head latent attention: queries, keys and values are up-projected from two small latents.

    Attributes:
        hidden: size of the model's states.
        heads: number of attention heads.
        q_lora_rank: size of the latent of queries; None if queries are projected directly.
        kv_lora_rank: size of the latent of keys and values.
        qk_nope_head_dim: number of non-rotary channels of a query and key head.
        qk_rope_head_dim: number of rotary channels of a query and key head. All heads share the rotary channels of the
            key.
        v_head_dim: size of a value head.
        hf_rope: the keys of config.json that determine the rotary frequencies (`families/rope.py`), for heads of
            `qk_rope_head_dim`.
        rope_interleave: whether channels 2i and 2i + 1 are rotated together; otherwise i and i + qk_rope_head_dim / 2.
        indexer: selects the tokens that a token sees; None: all tokens before it. Requires a latent of queries.
    """

    recompute_modules: ClassVar[tuple[str, ...]] = ("core_attn", "mla_up_proj")
    needs_sequence_parallel: ClassVar[str] = "latent attention"
    layer_arguments: ClassVar[tuple[str, ...]] = ()
    takes_packed_rows: ClassVar[bool] = True
    takes_parts_of_rows: ClassVar[bool] = True
    is_recurrent: ClassVar[bool] = False
    window = None

    hidden: int
    heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    hf_rope: Mapping[str, Any]
    rope_interleave: bool = True
    indexer: Indexer | None = None

    @property
    def rotary(self) -> int:
        return self.qk_rope_head_dim

    @property
    def tensor_split(self) -> dict[str, int]:
        split = {"num_attention_heads": self.heads}
        if self.q_lora_rank is not None:
            split["q_lora_rank"] = self.q_lora_rank
        return split | {"kv_lora_rank + qk_rope_head_dim": self._key_latents}

    def mcore_config(self) -> dict[str, Any]:
        return {
            "multi_latent_attention": True,
            "num_attention_heads": self.heads,
            "num_query_groups": self.heads,
            "kv_channels": self.v_head_dim,
            "q_lora_rank": self.q_lora_rank,
            "kv_lora_rank": self.kv_lora_rank,
            "qk_head_dim": self.qk_nope_head_dim,
            "qk_pos_emb_head_dim": self.qk_rope_head_dim,
            "v_head_dim": self.v_head_dim,
            "add_qkv_bias": False,
            "qk_layernorm": False,  # latents always have norms
            "hf_rope": dict(self.hf_rope),
            "rope_interleave": self.rope_interleave,
        }

    def rows(self) -> list[Row]:
        hidden, heads, kv_rank = self.hidden, self.heads, self.kv_lora_rank
        queries, keys_and_values = heads * self._key_size, heads * (self.qk_nope_head_dim + self.v_head_dim)
        q_rank = self.q_lora_rank
        if q_rank is None:
            rows = [Row("linear_q_proj.weight", {"q_proj.weight": (queries, hidden)})]
        else:
            rows = [
                Row("linear_q_down_proj.weight", {"q_a_proj.weight": (q_rank, hidden)}),
                Row("q_layernorm.weight", {"q_a_layernorm.weight": (q_rank,)}),
                Row("linear_q_up_proj.weight", {"q_b_proj.weight": (queries, q_rank)}),
            ]
        rows += [
            Row("linear_kv_down_proj.weight", {"kv_a_proj_with_mqa.weight": (self._key_latents, hidden)}),
            Row("kv_layernorm.weight", {"kv_a_layernorm.weight": (kv_rank,)}),
            Row("linear_kv_up_proj.weight", {"kv_b_proj.weight": (keys_and_values, kv_rank)}),
            Row("linear_proj.weight", {"o_proj.weight": (hidden, heads * self.v_head_dim)}),
        ]
        rows += self._indexer_rows()
        return lift(rows, "self_attention.", "self_attn.")

    def parameters(self, rank: Rank) -> ParameterCount:
        norms = (self.q_lora_rank or 0) + self.kv_lora_rank
        # Every tensor-parallel rank holds the whole indexer.
        shapes = shapes_of(self._indexer_rows()).values()
        return ParameterCount(self._matrices(rank) + norms, frozen=sum(map(prod, shapes)))

    def _indexer_rows(self) -> list[Row]:
        if self.indexer is None:
            return []
        return self.indexer.rows(self.hidden, self.q_lora_rank or 0)

    def macs_per_token(self) -> int:
        return self._matrices(Rank())

    def macs_per_pair(self) -> int:
        return self.heads * (self._key_size + self.v_head_dim)

    def gathered(self, rank: Rank) -> int:
        return rank.itemsize * rank.tokens * self._key_latents

    def input_activation_bytes(self, rank: Rank) -> int:
        """Return the bytes of the inputs that autograd saves on a rank.

        Down-projections never use low precision; the projection of queries does if it has no latent.
        """
        is_kept_twice = rank.quantized is not None and self.q_lora_rank is None
        return rank.hidden_state_bytes(self.hidden) + is_kept_twice * rank.input_activation_bytes(
            rank.sequence_tokens, self.hidden
        )

    def activation_bytes(self, rank: Rank) -> int:
        heads = self.heads // rank.tp
        tokens = rank.sequence_tokens
        # Every context-parallel rank up-projects keys and values of the whole row from the latents.
        grad_query, grad_key = (
            rank.norm_activation_bytes(tokens, size) + rank.input_activation_bytes(tokens, size) if size else 0
            for size in (self.q_lora_rank, self.kv_lora_rank)
        )
        down = grad_query + rank.cp * grad_key
        # A fused kernel stores copies of queries, and of keys and values of all context-parallel ranks. On a CPU this
        # requires equal sizes of keys and values; otherwise the matrix of scores is stored.
        up = heads * (self._key_size + rank.cp * (self._key_size + self.v_head_dim))
        if "mla_up_proj" in rank.recomputed:
            up = 0
        result = heads * self.v_head_dim
        core = rank.itemsize * rank.tokens * (up + result)
        if self.indexer is not None and self.indexer.selects(rank.length * rank.cp):
            return down + core + self.indexer.selection_bytes(rank)  # the backward pass recomputes the softmax
        return down + core + _softmax_statistics(rank, self.heads)

    @property
    def _key_size(self) -> int:
        """Size of a key head, which is also the size of a query head."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def _key_latents(self) -> int:
        """Output size of the down-projection: the latent of keys and values, and the rotary part of the key."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    def _matrices(self, rank: Rank) -> int:
        heads, hidden = self.heads // rank.tp, self.hidden
        queries, keys_and_values = heads * self._key_size, heads * (self.qk_nope_head_dim + self.v_head_dim)
        if self.q_lora_rank:
            matrices = self.q_lora_rank // rank.tp * hidden + queries * self.q_lora_rank
        else:
            matrices = queries * hidden
        matrices += self._key_latents // rank.tp * hidden + keys_and_values * self.kv_lora_rank
        return matrices + hidden * heads * self.v_head_dim


def _softmax_statistics(rank: Rank, heads: int) -> int:
    """Return the bytes of the log-sum-exp per token and head, which the backward pass of the softmax needs."""
    if "core_attn" in rank.recomputed:
        return 0
    return rank.tokens * (heads // rank.tp) * FLOAT32
