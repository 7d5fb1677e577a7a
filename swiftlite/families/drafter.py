"""Define `Drafter`, a kind of module that drafts tokens from the states of the trunk.

At each position s, a drafter computes `Heads.drafts` states. State k (from 1) predicts token s + k + 1. Labels, losses,
metrics and acceptance depend only on these states. `drafters.py` lists all kinds, and `model/specs.py` has the module
of each kind.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any

from swiftlite.base.drafting import Drafting
from swiftlite.base.heads import DRAFTER_KEY, FEATURES_KEY
from swiftlite.bridge.join import PadEnd
from swiftlite.bridge.rows import HfConfig, Row
from swiftlite.families.layer import Layer
from swiftlite.families.rank import ParameterCount, Rank

if TYPE_CHECKING:
    from swiftlite.families.family import Family


_IN_LAYER = re.compile(r"\.(decoder_layer_\d+|transformer_layer)\.")
_OF_MLP = ("mlp.", "pre_mlp_layernorm.", "post_mlp_layernorm.")
"""Prefixes of the parameters of a decoder layer that belong to its MLP, or to a norm of the MLP's input or output."""


def no_copies(family: "Family", hf_config: HfConfig, layer: int) -> dict[str, str]:
    """Return an empty mapping, for drafters whose layers contain no copies of the trunk's tensors, or start without
    copies.
    """
    return {}


def feature_problems(hf_config: HfConfig) -> list[str]:
    """Return a problem if config.json declares no features, or layer 0, whose input is the embedding."""
    features = hf_config[DRAFTER_KEY].get(FEATURES_KEY)
    if not features:
        return [f"{FEATURES_KEY} is missing"]
    if isinstance(features, list) and features[0] == 0:
        return [f"{FEATURES_KEY} has layer 0, whose input is the embedding"]
    return []


def layer_problems(hf_config: HfConfig) -> list[str]:
    """Return a problem if config.json declares several layers, for drafters that consist of a single one."""
    if hf_config[DRAFTER_KEY].get("layers") in (0, 1):
        return []
    return ["layers is not 0 or 1"]


def sources_of_head(family: "Family", hf_config: HfConfig, head: int) -> dict[str, str]:
    """Return the parameters of the trunk's last decoder layer with the same attention and MLP, or of two layers, one
    for each, and of what follows the last layer."""
    attention, mlp = family.architecture(hf_config).mtp_sources
    prefix = f"mtp.layers.{head}."
    sources = {f"{prefix}final_layernorm.weight": "decoder.final_layernorm.weight"}
    sources[f"{prefix}output_layer.weight"] = "output_layer.weight"  # of heads that have their own output layers
    for row in family.block_rows(hf_config):
        layer = mlp if row.mcore.startswith(_OF_MLP) else attention
        sources[f"{prefix}transformer_layer.{row.mcore}"] = f"decoder.layers.{layer}.{row.mcore}"
    return sources


@dataclass(frozen=True)
class DrafterSizes:
    """Describe what one layer of a drafter computes per position of the trunk, to estimate memory, FLOPs and time.

    Attributes:
        rows: its bridge rows. Tensor-parallel ranks split the matrices of decoder layers, and those with one row per
            token of the vocabulary (`PadEnd`); each rank has all other parameters.
        layers: its decoder layers.
        passes: number of times that they are computed, one after the other.
        queries: number of queries per position in each pass.
        exceptions: for matrices that are not multiplied with each of the `runs` states: a part of their HF name, and
            the number of products per position.
        stored: number of values that are stored for the backward pass, in addition to those of decoder layers.
        output: number of inputs of the trunk's output layer.
        own_output: number of inputs of an output layer of the drafter.
        read_macs: multiply-adds per position of the trunk's matrices that are computed again, without gradients.
    """

    rows: Sequence[Row]
    layers: Sequence[Layer]
    passes: int
    queries: int
    exceptions: Mapping[str, int]
    stored: int
    output: int
    own_output: int = 0
    read_macs: int = 0

    @property
    def runs(self) -> int:
        """Number of states that each decoder layer computes per position."""
        return self.passes * self.queries

    def parameters(self, rank: Rank) -> ParameterCount:
        """Count the parameters on a rank."""
        count = ParameterCount()
        for row in self.rows:
            number = sum(prod(shape) for shape in row.hf.values())
            (size, *others), *_ = row.hf.values()
            if isinstance(row.join, PadEnd):
                number = -(-size // rank.tp) * prod(others)
            elif others and _IN_LAYER.search(row.mcore):
                number //= rank.tp
            count += ParameterCount(frozen=number) if row.is_frozen else ParameterCount(number)
        return count

    def macs(self) -> int:
        """Count the multiply-adds per position of a forward pass, without attention scores and output layers."""
        return sum(size_out * size_in * times for _, size_out, size_in, times in self._matrices())

    def projections(self) -> list[tuple[int, int]]:
        """List output and input size of the matrices outside of decoder layers, as often as they are multiplied."""
        found = []
        for mcore, size_out, size_in, times in self._matrices():
            if not _IN_LAYER.search(mcore):
                found += [(size_out, size_in)] * times
        return found

    def _matrices(self) -> Iterator[tuple[str, int, int, int]]:
        """Yield Megatron name, output size, input size and number of products per position of every matrix."""
        for row in self.rows:
            for hf_key, shape in row.hf.items():
                if len(shape) == 2:
                    found = [times for part, times in self.exceptions.items() if part in hf_key]
                    yield row.mcore, *shape, (found or [self.runs])[0]


@dataclass(frozen=True)
class Drafter:
    """A kind of drafter.

    It consists of `Heads.layers` layers, numbered from 0. All functions get the family of the trunk, except for
    `problems`, and the content of config.json, whose object DRAFTER_KEY can have further settings of the kind. Decoder
    layers whose inputs it reads are among them (FEATURES_KEY).

    Args:
        rows: returns the bridge rows of layer k. Megatron names start with `mtp.layers.{k}.`.
        layer_of: returns the number of the layer that an HF key belongs to; None for keys of the trunk.
        copies: returns the HF keys of layer k that copy a tensor of the trunk, each with the trunk's key.
        sources: returns Megatron parameters of layer k that start as copies (`--mtp_init copy_last_layer`), each with
            the trunk's parameter. Without any, a new drafter starts from random values.
        config: returns further keys of config.json for a number of layers.
        drafting: returns which of the trunk's states the layers read, if `Heads.drafting` is None.
        problems: returns a problem (one line) for every invalid setting of the kind.
        why_not: returns why a model cannot have this drafter; empty if it can.
        own_config: returns the config.json of the drafter in a directory of its own, from which vLLM drafts; None for
            drafters that no engine reads.
        own_prefix: prefix of the HF keys that the tensors in this directory do not have.
        published: returns what config.json declares for a drafter that is published in such a directory, from the
            content of its files (OWN_CONFIG_KEY, OWN_GENERATION_KEY) and of the trunk's config.json; None for drafters
            that are not read from one.
        vllm_trunks, sglang_trunks: families of trunks that the engine drafts for with it.
        llamacpp_trunks: the same of llama.cpp, each with the architecture of published files, whose graph keeps what
            the drafter reads.
        vllm_method, sglang_method: the engine's name of the kind; empty: the same.
        needs_plugin: whether vLLM drafts with a class of swiftlite's plugin, and not without it.
        sizes: returns sizes and work of a layer that drafts a number of tokens; None: those of an MTP head.
        is_block: whether it drafts all tokens in one pass, so that --drafter_layers and --drafter_anchors apply.
        is_fitted: whether `--mtp_init fit_last_layer` can fit new layers (`train/head_fit.py`).
    """

    rows: Callable[["Family", HfConfig, int], list[Row]]
    layer_of: Callable[["Family", HfConfig, str], int | None]
    copies: Callable[["Family", HfConfig, int], dict[str, str]] = no_copies
    sources: Callable[["Family", HfConfig, int], dict[str, str]] = no_copies
    config: Callable[["Family", HfConfig, int], dict[str, Any]] = lambda family, hf_config, layers: {}
    drafting: Callable[["Family", HfConfig], Drafting] = lambda family, hf_config: Drafting()
    problems: Callable[[HfConfig], list[str]] = lambda hf_config: []
    why_not: Callable[["Family", HfConfig], str] = lambda family, hf_config: ""
    own_config: Callable[["Family", HfConfig], dict[str, Any]] | None = None
    own_prefix: str = ""
    published: Callable[[HfConfig, HfConfig], dict[str, Any]] | None = None
    vllm_trunks: tuple[str, ...] = ()
    sglang_trunks: tuple[str, ...] = ()
    llamacpp_trunks: Mapping[str, str] = field(default_factory=dict)
    vllm_method: str = ""
    sglang_method: str = ""
    needs_plugin: bool = False
    sizes: Callable[["Family", HfConfig, int], DrafterSizes] | None = None
    is_block: bool = False
    is_fitted: bool = False

    @property
    def starts_with_copies(self) -> bool:
        """Whether a new drafter starts with copies of the trunk's parameters, and not with random values."""
        return self.sources is not no_copies
