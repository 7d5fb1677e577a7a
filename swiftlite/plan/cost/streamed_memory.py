"""Estimate the memory and the time of `--stream_trunk`. Does not import torch."""

from dataclasses import dataclass

from swiftlite.families.family import HfConfig
from swiftlite.families.index import architecture_of
from swiftlite.plan.cost import memory
from swiftlite.plan.cost.flops import training_flops
from swiftlite.plan.cost.gpus import GPUS
from swiftlite.plan.cost.setup import Setup, rank_of
from swiftlite.plan.cost.timing import PRODUCT_EFFICIENCY
from swiftlite.plan.trunk import Trunk

GB = 1e9
READS_FOR_CHECKS = 2
"""Number of times that all layers are read for the hashes in cache.json, and for the digest that an export verifies."""


@dataclass(frozen=True)
class StreamedMemory:
    """A run of heads whose trunk is read layer by layer.

    Attributes:
        trunk: bytes of all decoder layers of one rank, in the precision of the run.
        layers: bytes of the two largest decoder layers, which are in memory together.
        rest: bytes of everything else in training: embedding, output layer, heads, optimizer and activations.
        flops_per_token: operations of the trunk per token.
        state: bytes per token of the hidden states that wait between two layers.
    """

    trunk: int
    layers: int
    rest: int
    flops_per_token: float
    state: int

    def passes(self, num_tokens: float, states_gb: float) -> int:
        """Return how often the decoder layers are read: once for each group of rows, and for the checks."""
        return max(1, -int(-num_tokens * self.state // (states_gb * 1e9))) + READS_FOR_CHECKS

    @property
    def peak(self) -> int:
        """Peak memory in bytes without the waiting states, which are in the memory of the host."""
        return self.layers + self.rest

    @property
    def line(self) -> str:
        """The memory of a rank, for --dry_run."""
        return f"{self.peak / GB:.2f} GB (1e9 bytes) on one rank, with --stream_trunk"


def estimate_streamed(hf_config: HfConfig, setup: Setup) -> StreamedMemory:
    """Estimate a run of heads with a streamed trunk, without pipeline parallelism."""
    architecture = architecture_of(hf_config)
    rank = rank_of(architecture, setup)
    layers = sorted(layer.parameters(rank).total * setup.parameter_bytes for layer in architecture.layers)
    (stage,) = memory.estimate(hf_config, setup)
    with_trunk = training_flops(hf_config, setup.heads, heads_only=True).per_token
    without_trunk = training_flops(hf_config, setup.heads, heads_only=True, trunk_is_read=True).per_token
    return StreamedMemory(
        trunk=sum(layers),
        layers=sum(layers[-2:]),
        rest=stage.total - sum(layers),
        flops_per_token=with_trunk - without_trunk,
        state=architecture.outside.hidden * setup.parameter_bytes,
    )


def describe_streamed(hf_config: HfConfig, setup: Setup, trunk: Trunk) -> str:
    """Return a description of the estimated memory and time of a run of heads with a streamed trunk."""
    streamed = estimate_streamed(hf_config, setup)
    flops = 1e6 * streamed.flops_per_token
    seconds = flops / (GPUS["H100"].peak_flops * PRODUCT_EFFICIENCY * setup.num_gpus)
    passes = streamed.passes(1e6, trunk.waiting_gb)
    return (
        f"--stream_trunk: {streamed.peak / GB:.2f} GB on one rank; for one million tokens, layers of "
        f"{streamed.trunk / GB:.1f} GB are read {passes} times, and {flops:.2g} FLOPs take about "
        f"{seconds:.0f} s on {setup.num_gpus} H100"
    )
