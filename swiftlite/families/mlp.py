"""Define kinds of MLP, each with its bridge rows, sizes, FLOPs, and the ways in which ranks can split it.

`model/specs.py` selects the modules that compute them; `layer.py` defines the interface of a kind.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from swiftlite.bridge.join import GATE_UP, InterleaveBlocks
from swiftlite.bridge.rows import Row
from swiftlite.families.rank import FLOAT32, ParameterCount, Rank

CLAMPED_SWIGLU = "clamped_swiglu"
"""(up + 1) * gate * sigmoid(1.702 * gate), where gate is at most 7 and up is between -7 and 7, as in gpt-oss."""
RELU2 = "relu2"
"""The square of relu, by transformers' name. MLPs with it have no gate: down(activation(up(x)))."""


@dataclass(frozen=True)
class Mlp:
    """A gated MLP: down(activation(gate(x)) * up(x)); with RELU2, one without a gate.

    Attributes:
        hidden: size of the model's states.
        ffn: number of channels between the matrices (outputs of gate and up, inputs of down).
        hf_is_fused: whether files have gate and up in one tensor.
        activation: the activation, by transformers' name.
        limit: the activated gate is at most this number, and up is between its negative and itself; None: no limit.
            Requires silu.
    """

    recompute_modules: ClassVar[tuple[str, ...]] = ("mlp",)
    needs_sequence_parallel: ClassVar[str] = ""
    layer_arguments: ClassVar[tuple[str, ...]] = ("ffn_hidden_size",)
    norms_input: ClassVar[bool] = False
    experts = 0
    topk = 0
    splits_experts = False

    hidden: int
    ffn: int
    hf_is_fused: bool = False
    activation: str = "silu"
    limit: float | None = None

    @property
    def tensor_split(self) -> dict[str, int]:
        return {"intermediate_size": self.ffn}

    @property
    def expert_split(self) -> dict[str, int]:
        return {}

    def mcore_config(self) -> dict[str, Any]:
        return {"ffn_hidden_size": self.ffn}

    def rows(self) -> list[Row]:
        gate_up, down = mlp_rows("mlp.", self.hidden, self.ffn, has_gate=is_gated(self.activation))
        if self.hf_is_fused:
            fused = {"mlp.gate_up_proj.weight": (2 * self.ffn, self.hidden)}
            gate_up = replace(gate_up, hf=fused, join=InterleaveBlocks(None, ((self.ffn, self.ffn),)))
        return [gate_up, down]

    def parameters(self, rank: Rank) -> ParameterCount:
        return ParameterCount(_matrices(self.hidden, self.ffn // rank.tp, self.activation))

    def macs_per_token(self) -> int:
        return _matrices(self.hidden, self.ffn, self.activation)

    def input_activation_bytes(self, rank: Rank) -> int:
        if "mlp" in rank.recomputed:
            return rank.hidden_state_bytes(self.hidden)
        return rank.input_activation_bytes(rank.sequence_tokens, self.hidden)

    def activation_bytes(self, rank: Rank) -> int:
        if "mlp" in rank.recomputed:
            return 0
        return _saved_activation_bytes(rank, self.ffn // rank.tp, self.activation, self.limit)


@dataclass(frozen=True)
class MixtureOfExperts:
    """A mixture of experts: a router selects MLPs for each token; shared experts process every token.

    Each expert has separate bridge rows, as in most files on the hub. If a file stacks all experts in one tensor, it is
    split while it is read (`bridge/encoding/expert_stack.py`).

    Attributes:
        hidden: size of the model's states.
        experts: number of routed experts.
        topk: number of experts selected per token.
        ffn: width of an expert.
        latent: size of the states that routed experts read and write, between two projections that all of them share;
            None: that of the model's states, without projections.
        shared_ffn: total width of the shared experts; 0 without shared experts.
        shared_gate: whether the output of shared experts is multiplied, per token, by the sigmoid of a gate.
        expert_bias: whether a bias without gradients balances the router's selection.
        has_biases: whether the router and the matrices of experts have biases.
        activation: the activation of experts: a name of transformers, or CLAMPED_SWIGLU.
        limit: limit of the routed experts, as `Mlp.limit`.
        shared_limit: limit of the shared experts.
        hf_is_transposed: whether files have the stacks of gpt-oss (`bridge/encoding/expert_stack.py`). Rows of gate and
            up alternate, in files and in memory.
        hf_is_stacked: whether files have one stack per matrix, as those of Step-3.5 do.
        hf_matrices: names in files of an expert's matrices gate, up and down.
        hf_ffn: key of config.json for `ffn`.
        router: how the router scores and selects experts, as arguments of megatron-core's TransformerConfig.
        router_is_float32: whether the router's matrix is float32 even in a 16-bit model (`Float32Router`).
        biases_softmax: whether scores are softmaxes, to which a bias [1, E] is added for the selection only
            (`BiasedSoftmaxRouter`). Requires `router_is_float32`.
    """

    recompute_modules: ClassVar[tuple[str, ...]] = ("moe",)
    needs_sequence_parallel: ClassVar[str] = "experts"
    layer_arguments: ClassVar[tuple[str, ...]] = ()
    norms_input: ClassVar[bool] = False

    hidden: int
    experts: int
    topk: int
    ffn: int
    latent: int | None = None
    shared_ffn: int = 0
    shared_gate: bool = False
    expert_bias: bool = False
    has_biases: bool = False
    activation: str = "silu"
    limit: float | None = None
    shared_limit: float | None = None
    hf_is_transposed: bool = False
    hf_is_stacked: bool = False
    hf_matrices: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    hf_ffn: str = "moe_intermediate_size"
    router: Mapping[str, Any] = field(default_factory=dict)
    router_is_float32: bool = False
    biases_softmax: bool = False

    @property
    def tensor_split(self) -> dict[str, int]:
        return {}

    @property
    def splits_experts(self) -> bool:
        return not self.has_biases  # megatron-core refuses biases

    @property
    def expert_split(self) -> dict[str, int]:
        return {self.hf_ffn: self.ffn}

    def mcore_config(self) -> dict[str, Any]:
        config = {
            "num_moe_experts": self.experts,
            "moe_ffn_hidden_size": self.ffn,
            "moe_router_topk": self.topk,
            "moe_grouped_gemm": False,
        }
        if self.shared_ffn:
            config["moe_shared_expert_intermediate_size"] = self.shared_ffn
        if self.shared_gate:
            config["moe_shared_expert_gate"] = True
        if self.expert_bias:
            config["moe_router_enable_expert_bias"] = True
        return config | dict(self.router)

    def rows(self) -> list[Row]:
        has_gate = is_gated(self.activation)
        matrix = {"mlp.gate.weight": (self.experts, self.hidden)}
        rows = [Row("mlp.router.weight", matrix, is_exact=self.router_is_float32)]
        if self.expert_bias:
            shape = (1, self.experts) if self.biases_softmax else (self.experts,)
            bias = {"mlp.gate.e_score_correction_bias": shape}
            rows.append(Row("mlp.router.expert_bias", bias, is_exact=True))
        if self.has_biases:
            rows.append(Row("mlp.router.bias", {"mlp.gate.bias": (self.experts,)}))
        for expert in range(self.experts):
            names = f"mlp.experts.{expert}.", f"mlp.experts.local_experts.{expert}."
            if self.hf_is_transposed:
                rows += self._transposed_rows(*names)
            else:
                rows += mlp_rows(names[0], self._expert_hidden, self.ffn, names[1], self.hf_matrices, has_gate)
        if self.latent:
            for name, shape in {"fc1": (self.latent, self.hidden), "fc2": (self.hidden, self.latent)}.items():
                projection = f"mlp.{name}_latent_proj.weight"
                rows.append(Row(projection, {projection: shape}))
        if self.shared_ffn:
            rows += mlp_rows("mlp.shared_experts.", self.hidden, self.shared_ffn, has_gate=has_gate)
        if self.shared_gate:
            rows.append(Row("mlp.shared_experts.gate_weight", {"mlp.shared_expert_gate.weight": (1, self.hidden)}))
        return rows

    def _transposed_rows(self, hf_prefix: str, mcore_prefix: str) -> list[Row]:
        """Return the bridge rows of an expert in stacks of gpt-oss. Ranks split gate and up at the same rows."""
        shapes = {"gate_up_proj": (2 * self.ffn, self.hidden), "down_proj": (self.hidden, self.ffn)}
        rows = []
        for linear, (name, shape) in zip(("linear_fc1", "linear_fc2"), shapes.items(), strict=True):
            rows.append(Row(f"{mcore_prefix}{linear}.weight", {f"{hf_prefix}{name}": shape}))
            if self.has_biases:
                rows.append(Row(f"{mcore_prefix}{linear}.bias", {f"{hf_prefix}{name}_bias": shape[:1]}))
        return rows

    def parameters(self, rank: Rank) -> ParameterCount:
        router = self.experts * (self.hidden + self.has_biases)
        shared = _matrices(self.hidden, self.shared_ffn // rank.tp, self.activation) + self.shared_gate * self.hidden
        one_expert = _matrices(self._expert_hidden, self.ffn // rank.etp, self.activation)
        one_expert += self.has_biases * (2 * self.ffn // rank.etp + self.hidden)
        return ParameterCount(router + shared + self._projections, self.experts // rank.ep * one_expert)

    def macs_per_token(self) -> int:
        router = self.experts * self.hidden
        chosen = self.topk * _matrices(self._expert_hidden, self.ffn, self.activation) + self._projections
        shared = _matrices(self.hidden, self.shared_ffn, self.activation)
        return router + chosen + shared + self.shared_gate * self.hidden

    def input_activation_bytes(self, rank: Rank) -> int:
        """Return the bytes of the inputs that autograd saves on a rank.

        The router's input is never in low precision. With low precision, shared experts save a separate input.
        """
        is_kept_twice = rank.quantized is not None and self.shared_ffn > 0 and "moe" not in rank.recomputed
        return rank.hidden_state_bytes(self.hidden) + is_kept_twice * rank.input_activation_bytes(
            rank.sequence_tokens, self.hidden
        )

    def activation_bytes(self, rank: Rank) -> int:
        """Return the bytes that autograd saves on a rank except the input, if the routed tokens are evenly distributed
        over ranks.
        """
        if "moe" in rank.recomputed:
            return 0
        hidden = self._expert_hidden
        scores = rank.sequence_tokens * (9 * self.experts + 20 * self.topk + 4)  # float32, indices and masks
        choices, ffn = rank.sequence_tokens * rank.etp * self.topk, self.ffn // rank.etp
        # The activations of an MLP, its input, and its output, which is multiplied by the routing weight.
        saves_gate = self.activation != CLAMPED_SWIGLU and self.limit is None and not rank.is_fused
        widths = 3 + saves_gate if is_gated(self.activation) else 2
        experts = choices * (rank.itemsize * (2 * hidden + widths * ffn) + FLOAT32)
        if rank.quantized and rank.is_fused:  # ungrouped experts use torch
            narrow = choices * (hidden + ffn)
            experts -= narrow * rank.itemsize - int(narrow * rank.quantized.copy)
            # Each pass quantizes their weights again and stores them (`model/layers/te.py`).
            experts += int(self.experts // rank.ep * _matrices(hidden, ffn, self.activation) * rank.quantized.weights)
        gate = self.shared_gate * rank.tokens * (self.hidden + 2) * rank.itemsize  # output and score before the product
        shared = _saved_activation_bytes(rank, self.shared_ffn // rank.tp, self.activation, self.shared_limit)
        latents = rank.hidden_state_bytes(self.latent or 0)  # the input of the second projection
        return scores + experts + shared + gate + latents

    @property
    def _expert_hidden(self) -> int:
        """Size of the states that routed experts read and write."""
        return self.latent or self.hidden

    @property
    def _projections(self) -> int:
        """Number of parameters of the projections to latent states and back."""
        return 2 * self.hidden * (self.latent or 0)


def is_gated(activation: str) -> bool:
    """Return whether an MLP with this activation has a gate."""
    return activation != RELU2


def mlp_rows(
    hf_prefix: str,
    hidden: int,
    ffn: int,
    mcore_prefix: str | None = None,
    hf_names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    has_gate: bool = True,
) -> list[Row]:
    """Return the bridge rows of an MLP, which can be the MLP of a layer, an expert, or the shared experts.

    Args:
        mcore_prefix: prefix of the Megatron names; None if it equals `hf_prefix`.
        hf_names: names of the matrices gate, up and down in files.
    """
    prefix = hf_prefix if mcore_prefix is None else mcore_prefix
    gate, up, down = (f"{hf_prefix}{name}.weight" for name in hf_names)
    first = Row(f"{prefix}linear_fc1.weight", {up: (ffn, hidden)})
    if has_gate:
        first = replace(first, hf={gate: (ffn, hidden), **first.hf}, join=GATE_UP)
    return [first, Row(f"{prefix}linear_fc2.weight", {down: (hidden, ffn)})]


def _matrices(hidden: int, ffn: int, activation: str) -> int:
    """Count the parameters of gate (if there is one), up and down."""
    return (2 + is_gated(activation)) * hidden * ffn


def _saved_activation_bytes(rank: Rank, ffn: int, activation: str, limit: float | None = None) -> int:
    """Return the bytes of the results between the matrices.

    With a gate, there are three: gate and up in one tensor, the activated gate (unless kernels are fused, or there is a
    limit), and the product. Without, there are relu(up) and its square.
    """
    num_tensors = 3 if limit is None and not rank.is_fused else 2
    if not is_gated(activation):
        num_tensors = 1
    return rank.tokens * num_tensors * ffn * rank.itemsize + rank.input_activation_bytes(rank.tokens, ffn)
