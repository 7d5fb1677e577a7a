"""Add adapters to megatron-core's linear layers with `add_adapters`, and merge them into weights with `merged`.

A layer keeps its module, name and weight. The adapter is a child module; a forward hook adds its output to the output
of the layer, so every kind of layer supports it. With B = 0 the output is bitwise identical to that of the base model.

Shapes: S sequence, B batch, R the LoRA rank times the number of the layer's HF parts. The HF parts are the Hugging Face
modules that the layer fuses, such as q_proj, k_proj and v_proj.
"""

import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from math import sqrt
from typing import Any, NamedTuple, Protocol, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from torch import nn

from swiftlite.base.lora import Lora, is_adapter
from swiftlite.bridge import placement
from swiftlite.bridge.adapters.rows import (
    HF_MAGNITUDE,
    MAGNITUDE,
    A,
    B,
    adapted_modules,
    adapted_rows,
    adapter_rows,
    leaf_of,
    module_of,
    saved_names,
)
from swiftlite.bridge.binding import Binding, bind
from swiftlite.bridge.join import InterleaveBlocks
from swiftlite.bridge.rows import Row
from swiftlite.bridge.saving import gather_hf
from swiftlite.model.gpt import GPTModel


class Linear(Protocol):
    """The attributes of a layer of megatron-core or Transformer Engine that its adapter uses.

    Attributes:
        weight: [out, in]; a rank can hold a part of the rows (`partition_dim` 0) or of the columns (1).
        explicit_expert_comm: whether the layer's caller reduces the output over ranks, and not the layer.
    """

    weight: nn.Parameter
    tp_group: dist.ProcessGroup
    sequence_parallel: bool
    is_expert: bool
    explicit_expert_comm: bool


class Base(NamedTuple):
    """A layer's output without the adapter, its weight and its bias. The adapter computes its output from them.

    Attributes:
        output: [S, B, out].
        weight: weight of the layer.
        bias: bias of the layer; None if `output` does not include a bias.
    """

    output: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None


class Adapter(nn.Module):
    """The adapter of one linear layer: two matrices A and B for each adapted HF part.

    If ranks split the layer's rows, they split B in the same way and each rank has the whole A. If they split the
    columns, they split A and each rank has the whole B. Ranks exchange only the values between A and B: as many per
    token as the LoRA rank. For experts, and for layers whose caller reduces over ranks, the gradient of the matrix that
    is not split is reduced instead.

    Attributes:
        has_halves: whether a rank's rows of B are a part of each half of one HF tensor, such as a fused gate and up.
    """

    def __init__(self, linear: Linear, layer: Binding, lora: Lora):
        """Create an adapter with uninitialized parameters.

        Args:
            layer: the layer's weight on this rank, and the bridge row that maps the weight to HF tensors.
        """
        super().__init__()
        weight: Any = linear.weight
        self.scaling, self.dropout = lora.scaling, lora.dropout
        self.group, self.is_expert = linear.tp_group, linear.is_expert
        self.is_column = weight.partition_dim == 0
        join = layer.row.join
        self.has_halves = isinstance(join, InterleaveBlocks) and join.units is None
        # A row-parallel layer of experts sets this even if the expert is not split.
        self.sequence_parallel = linear.sequence_parallel and self.group.size() > 1
        self.caller_sums = linear.explicit_expert_comm or getattr(linear, "disable_grad_reduce", False)

        parts = [(key and module_of(key), length) for key, length in _parts(layer)]
        lengths = Counter[str | None]()
        for module, length in parts:
            lengths[module] += length
        modules = adapted_modules(layer.row, lora)
        # Not in a ParameterDict: with overlap_param_gather, parameters are gathered when their module is called.
        for module in modules:
            self._add_part(leaf_of(module), weight, lengths[module], lora.rank)
        order = _order(parts, modules, lengths)
        is_ordered = torch.equal(order, torch.arange(sum(lengths[module] for module in modules)))
        kept_order = None if is_ordered else order.to(weight.device)
        self.register_buffer("order", kept_order, persistent=False)

        self._describe_split(weight, A, 1, not self.is_column)
        self._describe_split(weight, B, 0, self.is_column)

    def _add_part(self, leaf: str, weight: torch.Tensor, length: int, rank: int) -> None:
        """Register uninitialized parameters for one Hugging Face module of this layer, with `length` output rows."""
        self.register_parameter(f"{A}{leaf}", nn.Parameter(weight.new_empty(rank, weight.size(1))))
        self.register_parameter(f"{B}{leaf}", nn.Parameter(weight.new_empty(length, rank)))

    def _describe_split(self, weight: torch.Tensor, kind: str, dim: int, is_split: bool) -> None:
        """Mark for megatron-core along which axis the parameters of one kind (A, B or magnitudes) are split."""
        # Experts that are not split over tensor-parallel ranks are not duplicates of each other.
        all_differ = self.is_expert and self.group.size() == 1
        for parameter in self.parts(kind):
            set_tensor_model_parallel_attributes(parameter, is_split or all_differ, dim, 1)
            parameter.allreduce = getattr(weight, "allreduce", True)  # type: ignore[attr-defined]
            # megatron-core sums these gradients over tensor-parallel ranks, each of which has a part of the row.
            is_cut = self.sequence_parallel and not self.caller_sums and not is_split
            parameter.sequence_parallel = is_cut  # type: ignore[attr-defined]

    def forward(self, input: torch.Tensor, base: Base) -> torch.Tensor:
        """Return the term [S, B, out] that is added to the layer's output.

        Args:
            input: input of the layer, [S, B, in].
        """
        a_parts, b_parts = self.parts(A), self.parts(B)
        a, b = a_parts[0], b_parts[0]
        if len(a_parts) > 1:  # one product for queries, keys and values
            # Block-diagonal: each B reads the values of its own A only.
            a, b = torch.cat(a_parts), torch.block_diag(*b_parts)
        b = self._in_order(b)
        if self.caller_sums and self.is_column:
            a = _summed(a, self.group)
        elif self.caller_sums:
            b = _summed(b, self.group)
        hidden_SBR = F.linear(self.drop(input), a)
        return F.linear(self._exchange(hidden_SBR) * self.scaling, b)

    def drop(self, input: torch.Tensor) -> torch.Tensor:
        """Return the input with dropout, with the same mask on ranks that have the same input.

        The seed of the mask is one number from the host's generator, combined with the rank if ranks have different
        inputs. The trainer seeds this generator and recomputation restores it. Nothing waits for the device.
        """
        if not self.training or not self.dropout:
            return input
        draw = int(torch.randint(2**62, ()))
        place = dist.get_rank()
        if self.is_column and not self.sequence_parallel:  # every rank has the whole input
            place = dist.get_global_rank(self.group, 0)
        generator = torch.Generator(input.device).manual_seed(zlib.crc32(f"{draw}/{place}".encode()))
        is_kept = torch.empty_like(input, dtype=torch.bool).bernoulli_(1 - self.dropout, generator=generator)
        return input * is_kept / (1 - self.dropout)

    def merged(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the layer's weight on this rank plus the adapter, added in float32; not used in a backward pass."""
        pairs = zip(self.parts(A), self.parts(B), strict=True)
        return weight.float() + self._in_order(torch.cat([(b.float() @ a.float()) * self.scaling for a, b in pairs]))

    def parts(self, kind: str) -> list[torch.Tensor]:
        """Return the parameters of one kind (A, B or magnitudes) in the order of the layer's HF parts."""
        named: Iterable[tuple[str, torch.Tensor]] = self.named_parameters()
        return [parameter for name, parameter in named if name.startswith(kind)]

    def _in_order(self, rows: torch.Tensor) -> torch.Tensor:
        """Reorder concatenated rows of HF parts to the layer's order; zeros for parts without an adapter."""
        order = cast(torch.Tensor | None, self.order)
        if order is None:
            return rows
        return F.pad(rows, (0, 0, 0, 1)).index_select(0, order)

    def _exchange(self, hidden_SBR: torch.Tensor) -> torch.Tensor:
        if self.caller_sums:
            return hidden_SBR
        if self.is_column and self.sequence_parallel:
            return gather_from_sequence_parallel_region(hidden_SBR, group=self.group)
        if self.is_column:
            # Each rank's rows of B give a part of the gradient of these values, which the backward pass sums.
            return copy_to_tensor_model_parallel_region(hidden_SBR, group=self.group)
        if self.sequence_parallel:
            return reduce_scatter_to_sequence_parallel_region(hidden_SBR, group=self.group)
        return reduce_from_tensor_model_parallel_region(hidden_SBR, group=self.group)


class DoraAdapter(Adapter):
    """An adapter that also learns the magnitude of each row of W + B A (DoRA).

    The layer's output is multiplied per row by m / |W + B A|, where m are the learned magnitudes. As in PEFT, there is
    no gradient through |W + B A|.
    """

    def __init__(self, linear: Linear, layer: Binding, lora: Lora):
        super().__init__(linear, layer, lora)
        self._describe_split(linear.weight, MAGNITUDE, 0, self.is_column)

    def _add_part(self, leaf: str, weight: torch.Tensor, length: int, rank: int) -> None:
        super()._add_part(leaf, weight, length, rank)
        self.register_parameter(f"{MAGNITUDE}{leaf}", nn.Parameter(weight.new_empty(length)))

    def forward(self, input: torch.Tensor, base: Base) -> torch.Tensor:
        """Return the term that is added to the layer's output: B A x + (m / |W + B A| - 1) (W + B A) x, [S, B, out]."""
        added = super().forward(input, base)
        product = base.output + added
        if base.bias is not None:
            product = product - base.bias
        with torch.no_grad():
            whole = super().merged(base.weight)
        change = self.factors(whole) - 1  # subtract 1 before rounding: bfloat16 has about two digits
        return added + change.to(base.output.dtype) * product

    def merged(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the layer's weight on this rank with the adapter, its rows scaled to the learned magnitudes."""
        whole = super().merged(weight)
        return whole * self.factors(whole)[:, None]

    def factors(self, whole: torch.Tensor) -> torch.Tensor:
        """Return the factors m / |W + B A| of rows [out]; 1 for rows without an adapter.

        Args:
            whole: W + B A, float32.
        """
        magnitudes = torch.cat(self.parts(MAGNITUDE))
        if self.caller_sums and not self.is_column:
            magnitudes = _summed(magnitudes, self.group)
        # In the precision of the magnitudes, so that the initial factors are 1.
        lengths = self._lengths(whole).to(magnitudes.dtype).float()
        order = cast(torch.Tensor | None, self.order)
        if order is None:
            return magnitudes.float() / lengths
        factors = F.pad(magnitudes.float(), (0, 1)).index_select(0, order) / lengths
        return torch.where(order < len(magnitudes), factors, 1.0)

    @torch.no_grad()
    def begin_magnitudes(self, weight: torch.Tensor) -> None:
        """Initialize the magnitudes with the norms of the weight's rows."""
        lengths = self._lengths(weight.float())
        order = torch.arange(len(lengths)) if self.order is None else cast(torch.Tensor, self.order)
        magnitudes = self.parts(MAGNITUDE)
        module_lengths = lengths.new_zeros(
            sum(map(len, magnitudes)) + 1
        )  # the last entry is for rows without an adapter
        module_lengths[order] = lengths
        for magnitude, own in zip(
            magnitudes, module_lengths[:-1].split([len(each) for each in magnitudes]), strict=True
        ):
            magnitude.copy_(own)

    def _lengths(self, whole: torch.Tensor) -> torch.Tensor:
        """Compute the norms [out] of rows, which may be split over ranks."""
        lengths = torch.linalg.norm(whole, dim=1)
        if self.is_column or self.group.size() == 1:
            return lengths
        squares = lengths.square()
        dist.all_reduce(squares, group=self.group)
        return squares.sqrt()


def _summed(whole: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the tensor unchanged; the backward pass sums its gradient over ranks."""
    if group.size() == 1:
        return whole
    copied = copy_to_tensor_model_parallel_region(whole, group=group)
    if copied.requires_grad:  # a non-contiguous gradient would silently not be summed (mappings.py:31 of 0.16.1)
        copied.register_hook(torch.Tensor.contiguous)
    return copied


def _parts(layer: Binding) -> list[tuple[str | None, int]]:
    """Return the parts of a layer on this rank in row order, as (HF tensor or None for padding, number of rows)."""
    if layer.row.join.axis == 1:
        (key,) = layer.row.hf
        return [(key, layer.shard.tensor.size(0))]
    return [(key, index[0].stop - index[0].start) for _, index, key, _ in layer.slices()]


def _order(parts: Sequence[tuple[str | None, int]], modules: Sequence[str], lengths: Counter) -> torch.Tensor:
    """Return, for each row of the layer, its index in the concatenated rows of `modules`.

    Rows of modules that are not in `modules` get the index after the last row, where `_in_order` adds a row of zeros.
    """
    places: dict[str | None, int] = {}
    behind = 0
    for module in modules:
        places[module] = behind
        behind += lengths[module]
    order = []
    for module, length in parts:
        if module in places:
            order.append(torch.arange(places[module], places[module] + length))
            places[module] += length
        else:
            order.append(torch.full((length,), behind))
    return torch.cat(order)


def add_adapters(chunks: Sequence[GPTModel], lora: Lora, rows: Sequence[Row], seed: int = 42) -> int:
    """Add adapters to the model's linear layers. At first they do not change the output. Collective.

    Args:
        chunks: the model's chunks with loaded weights, not wrapped in Float16Module or DistributedDataParallel.
        rows: the bridge's rows of the whole model.
        seed: seed of the initial A's, which are the same for every layout.

    Returns:
        The number of adapters on this rank, one per HF part.
    """
    layers = {row.mcore: row for row in adapted_rows(rows, lora)}
    adapter_class = DoraAdapter if lora.has_magnitudes else Adapter
    for chunk in chunks:
        shards = {shard.name: shard for shard in placement.shards_of([chunk])}
        linear: Any
        # A list, because adapters become modules of the chunk in the loop.
        for name, linear in list(chunk.named_modules()):
            full_name = placement.global_name(f"{name}.weight", chunk)
            if full_name in layers:
                binding = Binding(layers[full_name], shards[full_name], is_copy=False)
                linear.add_module("adapter", adapter_class(linear, binding, lora))
                linear.register_forward_hook(_add)
    bindings = bind_adapters(chunks, lora, rows)
    for binding in bindings:
        _draw(binding, seed)
    for linear in _adapted(chunks):
        if isinstance(linear.adapter, DoraAdapter):
            linear.adapter.begin_magnitudes(linear.weight)
    keys = chain.from_iterable(binding.row.hf for binding in bindings)
    return sum(key.endswith(".lora_A.weight") for key in keys)


def _add(linear: Any, inputs: tuple[torch.Tensor, ...], outputs: tuple[torch.Tensor, Any]) -> tuple:
    output, bias = outputs
    adapter = getattr(linear, "adapter", None)  # None if merged
    if adapter is None:
        return outputs
    added_bias = None
    if bias is None and linear.bias is not None and linear.bias.numel():  # empty in Transformer Engine
        added_bias = linear.bias
    added = adapter(inputs[0], Base(output, linear.weight, added_bias))
    return output + added, bias  # bitwise the base's output if `added` is 0


def bind_adapters(chunks: Sequence[nn.Module], lora: Lora, rows: Sequence[Row]) -> list[Binding]:
    """Return the adapters of this rank, bound to their bridge rows."""
    held = [shard for shard in placement.shards_of(chunks) if is_adapter(shard.name)]
    return bind(held, adapter_rows(rows, lora), others_hold=lambda name: True)


@torch.no_grad()
def _draw(binding: Binding, seed: int) -> None:
    """Initialize like PEFT: A uniform, B zero.

    Each HF tensor has a separate generator, so the values do not depend on the layout.
    """
    ((key, shape),) = binding.row.hf.items()
    if key.endswith(HF_MAGNITUDE):
        return
    # The whole tensor on each rank, which keeps its slices.
    tensor = torch.zeros(shape)
    if key.endswith(".lora_A.weight"):
        generator = torch.Generator().manual_seed(seed ^ zlib.crc32(key.encode()))
        nn.init.kaiming_uniform_(tensor, a=sqrt(5), generator=generator)
    for shard, local_index, _, hf_index in binding.slices():
        shard.tensor[local_index] = tensor[hf_index].to(shard.tensor)


@torch.no_grad()
def merge(chunks: Sequence[nn.Module]) -> None:
    """Merge the adapters into the weights permanently, and remove them."""
    for linear in _adapted(chunks):
        linear.weight.data = _sum(linear)
        del linear.adapter


@contextmanager
@torch.no_grad()
def merged(chunks: Sequence[nn.Module]) -> Iterator[None]:
    """Merge the adapters inside this context. Afterwards the weights are restored from copies, bitwise identical."""
    # `merge` replaces these by new tensors, so they keep their values.
    taken = [(linear, linear.adapter, linear.weight.data) for linear in _adapted(chunks)]
    try:
        merge(chunks)
        yield
    finally:
        for linear, adapter, data in taken:
            linear.weight.data = data
            linear.add_module("adapter", adapter)


@contextmanager
def without_adapters(chunks: Sequence[nn.Module]) -> Iterator[None]:
    """Compute without the adapters inside this context."""
    taken = [(linear, linear.adapter) for linear in _adapted(chunks)]
    try:
        for linear, _ in taken:
            del linear.adapter
        yield
    finally:
        for linear, adapter in taken:
            linear.add_module("adapter", adapter)


def _adapted(chunks: Sequence[nn.Module]) -> list[Any]:
    """Return the linear layers that have an adapter."""
    modules = chain.from_iterable(chunk.modules() for chunk in chunks)
    return [module for module in modules if isinstance(getattr(module, "adapter", None), Adapter)]


def _sum(linear: Any) -> torch.Tensor:
    """Return the weight merged with its adapter."""
    return linear.adapter.merged(linear.weight.data).to(linear.weight.dtype)


def gather_adapters(chunks: Sequence[nn.Module], lora: Lora, rows: Sequence[Row]) -> dict[str, torch.Tensor]:
    """Return, on the first rank, the whole adapter tensors by their HF names. Collective.

    The result is empty on all other ranks.

    Args:
        rows: bridge rows of the layers whose adapters are gathered.
    """
    return _gather(chunks, adapter_rows(rows, lora))


def gather_saved(chunks: Sequence[nn.Module], lora: Lora, rows: Sequence[Row]) -> dict[str, torch.Tensor]:
    """Return, on the first rank, the whole tensors that are trained in full, by their HF names. Collective.

    The result is empty on all other ranks.
    """
    names = saved_names(lora, rows)
    return _gather(chunks, [row for row in rows if row.mcore in names])


def _gather(chunks: Sequence[nn.Module], rows: Sequence[Row]) -> dict[str, torch.Tensor]:
    names = {row.mcore for row in rows}
    held = [shard for shard in placement.shards_of(chunks) if shard.name in names]
    return gather_hf(bind(held, rows, others_hold=lambda name: True), rows)
