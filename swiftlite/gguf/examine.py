"""Find out whether llama.cpp can draft with a GGUF file of any origin, without reading numbers."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swiftlite.base.errors import UserError
from swiftlite.gguf.drafters import DRAFT_ARCHITECTURES
from swiftlite.gguf.read import open_reader, readable
from swiftlite.gguf.tokenizer import PRE_TOKENIZERS

if TYPE_CHECKING:
    from gguf import ReaderTensor

DRAFTING = (
    "bailingmoe3",
    "cohere2moe",
    "deepseek2",
    "deepseek32",
    "deepseek4",
    "glm-dsa",
    "glm4moe",
    "glm5-next",
    "hy_v3",
    "mimo2",
    "nemotron_h_moe",
    "qwen35",
    "qwen35moe",
    "qwen3next",
    "qwen4exp",
    "step35",
)
"""Architectures in which llama.cpp b11549 drafts with MTP heads."""
SEVERAL_HEADS = ("hy_v3", "mimo2", "step35")
"""Architectures with several heads; in the others, llama.cpp ends with an assertion."""
FINE = ("F32", "F16", "BF16", "Q8_0")
"""Types of heads that are not reported as coarse."""
_TRUNK_SIZES = ("target_hidden_size", "embedding_length_out", "embedding_length")
"""Keys of a drafter's file; the first one that it has is the hidden size of its trunk."""
_LONG = ("tokenizer.ggml.tokens", "tokenizer.ggml.merges", "tokenizer.ggml.token_type", "swiftlite.")
_REQUIRED = ("nextn.eh_proj.weight", "nextn.enorm.weight", "nextn.hnorm.weight")
_BLOCK = re.compile(r"blk\.(\d+)\.(.+)")


@dataclass(frozen=True)
class TrunkSizes:
    """The hidden size, the number of tokens, and the number of decoder layers of a trunk."""

    hidden: int
    vocab: int
    layers: int


@dataclass(frozen=True)
class Examined:
    """The result of an examination.

    Attributes:
        architecture: general.architecture.
        heads: number of declared MTP heads.
        sizes: sizes that a drafter must be made for.
        types: number of tensors by type, in the trunk and in the heads.
        problems: why llama.cpp does not load the file or accepts no drafts, one line each.
        notes: what lowers acceptance, one line each.
    """

    architecture: str
    heads: int
    sizes: "TrunkSizes"
    types: Mapping[str, Mapping[str, int]]
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def examine(file: Path) -> Examined:
    """Compare the metadata and the tensors of a file.

    Raises:
        UserError: the file is damaged.
    """
    with readable(file):
        return _examine(file)


def _examine(file: Path) -> Examined:
    reader = open_reader(file)
    values = {name: value.contents() for name, value in reader.fields.items() if not _is_long(name)}
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    architecture = str(values.get("general.architecture", ""))
    content = _Content(architecture, values, tensors)
    types: dict[str, dict[str, int]] = {"trunk": {}, "heads": {}}
    for name, tensor in tensors.items():
        counted = types["heads" if content.is_of_head(name) else "trunk"]
        counted[tensor.tensor_type.name] = counted.get(tensor.tensor_type.name, 0) + 1
    embedding = tensors.get("token_embd.weight")
    vocab = int(embedding.shape[-1]) if embedding is not None else 0
    layers = content.number("block_count") - content.heads
    sizes = TrunkSizes(content.number("embedding_length"), vocab, layers)
    return Examined(architecture, content.heads, sizes, types, list(content.problems()), list(content.notes()))


def check_drafter(draft: Path, trunk: str, sizes: TrunkSizes) -> None:
    """Check that a drafter's file is for a trunk with these sizes; with another one, llama.cpp crashes.

    Args:
        draft: the file; a model of its own, which drafts with its own embedding, can have any size.
        trunk: name of the trunk's file or directory.

    Raises:
        UserError: the drafter is for a trunk of other sizes, or its file is damaged.
    """
    with readable(draft):
        fields = open_reader(draft).fields
        architecture = str(fields["general.architecture"].contents())
        names = (*_TRUNK_SIZES, "vocab_size", "target_layers")
        stated = {name: fields[key].contents() for name in names if (key := f"{architecture}.{name}") in fields}
    if architecture not in {known.name for known in DRAFT_ARCHITECTURES.values()}:
        return
    hidden = next((stated[name] for name in _TRUNK_SIZES if name in stated), sizes.hidden)
    vocab = stated.get("vocab_size", sizes.vocab)
    layers = [*stated.get("target_layers", ()), 0]
    reason = ""
    if hidden != sizes.hidden:
        reason = f"the hidden size {hidden}, but {trunk} has {sizes.hidden}"
    elif vocab != sizes.vocab:
        reason = f"{vocab} tokens, but {trunk} has {sizes.vocab}"
    elif max(layers) >= sizes.layers:
        reason = f"more than {max(layers)} layers, but {trunk} has {sizes.layers}"
    if reason:
        raise UserError(
            f"{draft} drafts for a trunk with {reason}",
            "give the drafter's file of this model, which swiftlite export --to_gguf writes next to it",
        )


def _is_long(name: str) -> bool:
    return name.startswith(_LONG)


@dataclass(frozen=True)
class _Content:
    """Metadata and tensors of a file."""

    architecture: str
    values: Mapping[str, Any]
    tensors: "Mapping[str, ReaderTensor]"

    @property
    def heads(self) -> int:
        return self.number("nextn_predict_layers")

    @property
    def first_head(self) -> int:
        """Number of the first head's decoder layer."""
        return self.number("block_count") - self.heads

    def is_of_head(self, name: str) -> bool:
        match = _BLOCK.match(name)
        return match is not None and self.heads > 0 and int(match[1]) >= self.first_head

    def problems(self) -> Iterator[str]:
        """Yield why llama.cpp does not load the file, or cannot draft with it."""
        if self.values.get("split.count", 1) > 1:
            yield "the file is one of several parts: merge them first (llama-gguf-split --merge)"
            return
        if self.number("block_count") > len(self.tensors):
            yield f"{self.architecture}.block_count is more than the {len(self.tensors)} tensors in the file"
            return
        if self.heads > self.number("block_count"):
            yield f"{self.architecture}.nextn_predict_layers is more than {self.architecture}.block_count"
            return
        yield from self._wrong_blocks()
        if not self.heads:
            yield from self._no_heads()
            return
        if self.architecture not in DRAFTING:
            known = ", ".join(DRAFTING)
            yield f"llama.cpp does not draft in the architecture {self.architecture!r}; it does in: {known}"
        if self.heads > 1 and self.architecture not in SEVERAL_HEADS:
            yield f"{self.heads} MTP heads: llama.cpp supports one in the architecture {self.architecture!r}"
        for head in range(self.heads):
            yield from self._wrong_head(self.first_head + head)
        if self.architecture == "deepseek2" and "deepseek2.expert_gating_func" not in self.values:
            yield (
                "deepseek2.expert_gating_func is missing: llama.cpp guesses it from the number of layers and the size "
                "of the vocabulary; write the file again with the key (1: softmax, 2: sigmoid)"
            )

    def notes(self) -> Iterator[str]:
        """Yield what lowers acceptance."""
        coarse: dict[str, list[str]] = {}
        for name, tensor in self.tensors.items():
            if self.is_of_head(name) and tensor.tensor_type.name not in FINE:
                coarse.setdefault(tensor.tensor_type.name, []).append(name)
        for kind, names in coarse.items():
            yield (
                f"{len(names)} tensors of the heads, such as {names[0]}, are {kind}: fewer drafts may be accepted "
                "than with q8_0. llama-quantize keeps them with --tensor-type"
            )
        pre = self.values.get("tokenizer.ggml.pre")
        if self.values.get("tokenizer.ggml.model") == "gpt2" and pre in (None, "default"):
            known = ", ".join(sorted(PRE_TOKENIZERS.values()))
            yield f"tokenizer.ggml.pre is {pre!r}: llama.cpp may divide text differently; known names: {known}"

    def number(self, key: str) -> int:
        """Return a number of the architecture; 0 if it is missing."""
        value = self.values.get(f"{self.architecture}.{key}", 0)
        return value if isinstance(value, int) else 0

    def _wrong_blocks(self) -> Iterator[str]:
        """Yield a problem if block_count differs from the layers in the file."""
        numbers = {int(match[1]) for match in map(_BLOCK.match, self.tensors) if match}
        count = self.number("block_count")
        missing = sorted(set(range(count)) - numbers)
        unexpected = sorted(numbers - set(range(count)))
        if missing:
            what = "heads" if self.heads and missing[0] >= self.first_head else "layers"
            yield f"{self.architecture}.block_count is {count}, but the file has no tensors of {what} {missing[:5]}"
        if unexpected:
            yield f"{self.architecture}.block_count is {count}, but the file has tensors of layers {unexpected[:5]}"

    def _no_heads(self) -> Iterator[str]:
        found = [name for name in self.tensors if ".nextn." in name]
        key = f"{self.architecture}.nextn_predict_layers"
        if found:
            yield f"the file has {found[0]}, but {key} is missing: llama.cpp does not draft"
        else:
            yield f"the file has no MTP heads ({key} is missing): its converter left them out, or the model has none"

    def _wrong_head(self, number: int) -> Iterator[str]:
        """Yield a problem for each tensor of a head that is missing or has another shape."""
        prefix = f"blk.{number}."
        own = {name.removeprefix(prefix) for name in self.tensors if name.startswith(prefix)}
        if not own:
            return  # reported with the blocks
        for name in _REQUIRED:
            if name not in own:
                yield f"{prefix}{name} is missing: llama.cpp cannot draft"
        layers = [_suffixes(self.tensors, number) for number in range(self.first_head)]
        attention = next((layer for layer in reversed(layers) if _has_attention(layer)), set())
        for name in sorted(attention - own):
            if name.startswith("attn_"):
                yield f"{prefix}{name} is missing, which the trunk's layers have"
        hidden = self.number("embedding_length")
        projection = self.tensors.get(f"{prefix}nextn.eh_proj.weight")
        if projection is not None and [int(length) for length in projection.shape] != [2 * hidden, hidden]:
            shape = [int(length) for length in projection.shape]
            yield f"{prefix}nextn.eh_proj.weight has the shape {shape}, not {[2 * hidden, hidden]}"


def _suffixes(tensors: "Mapping[str, ReaderTensor]", number: int) -> set[str]:
    prefix = f"blk.{number}."
    return {name.removeprefix(prefix) for name in tensors if name.startswith(prefix)}


def _has_attention(suffixes: set[str]) -> bool:
    """Return whether a layer has full attention, as heads have."""
    return "attn_output.weight" in suffixes
