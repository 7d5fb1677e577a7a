"""Describe the GGUF files of drafters other than MTP heads.

llama.cpp reads such a drafter from a file of its own (`--model-draft`) and shares the embedding and the output layer of
the trunk. Features are the inputs of the decoder layers in `target_layers`, as in `Heads.features`. An assistant of
Gemma 4 has an output layer of its own, and reads the trunk's cache instead of features.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from swiftlite.base.errors import UserError
from swiftlite.base.heads import MTP, Heads, kind_of
from swiftlite.families import dense, dflash, eagle3, gemma4_assistant
from swiftlite.families.architecture import Architecture
from swiftlite.families.family import Family
from swiftlite.families.layer import Layer
from swiftlite.families.serving.llamacpp import why_no_drafter
from swiftlite.gguf import gemma4
from swiftlite.gguf.architectures import Metadata, rope_scaling, why_no_heads
from swiftlite.gguf.tensors import Conversion, Naming, layer_conversions

HfConfig = Mapping[str, Any]
_PREFIX = "mtp.layers.0."
FROM_ANCHOR = "sample_from_anchor"
"""Key of a DSpark drafter's file."""


@dataclass(frozen=True)
class DraftArchitecture:
    """An architecture of llama.cpp that drafts.

    Attributes:
        name: value of general.architecture.
        method: value of `--spec-type` without the prefix `draft-`.
        layers: returns the start of the Megatron names of each decoder layer.
        layer_of: returns the description of a decoder layer; all have the same tensors.
        outside: GGUF names outside of decoder layers, by Megatron name.
        naming: names in decoder layers.
        metadata: returns the keys of this architecture, and keys with a dot at the start, which are not below its name.
        constants: returns tensors of which no Hugging Face tensor is the source.
        why_not: returns why llama.cpp does not run the drafter of a model; empty if it does.
        unused: start of the Megatron names of tensors that llama.cpp does not use, so that files do not have them.
    """

    name: str
    method: str
    layers: Callable[[HfConfig], list[str]]
    layer_of: Callable[[Architecture, HfConfig], Layer]
    outside: Mapping[str, str]
    naming: Naming
    metadata: Callable[[Family, HfConfig], Metadata]
    constants: Callable[[Family, HfConfig], list[Conversion]] = lambda family, hf_config: []
    why_not: Callable[[Family, HfConfig], str] = lambda family, hf_config: ""
    unused: str | None = None


def _dflash_metadata(family: Family, hf_config: HfConfig) -> Metadata:
    heads, is_anchor_used = Heads.from_config(hf_config), dflash.samples_from_anchor(hf_config)
    block: Metadata = {"block_size": heads.drafts + 1}  # with the last known token
    if is_anchor_used:
        block = {"block_size": heads.drafts, FROM_ANCHOR: True}
    own = _reading_features(family, hf_config)
    return {**own, **block, ".tokenizer.ggml.mask_token_id": dflash.mask_token(hf_config)}


def _eagle3_metadata(family: Family, hf_config: HfConfig) -> Metadata:
    return {**_reading_features(family, hf_config), "target_hidden_size": hf_config["hidden_size"]}


def _reading_features(family: Family, hf_config: HfConfig) -> Metadata:
    """Return the keys of drafters that read features."""
    own_config = family.drafter(hf_config).own_config
    assert own_config is not None  # kinds in `DRAFT_ARCHITECTURES` have one
    own = own_config(family, hf_config)
    return {
        "block_count": own["num_hidden_layers"],
        "context_length": own["max_position_embeddings"],
        "embedding_length": own["hidden_size"],
        "feed_forward_length": own["intermediate_size"],
        "attention.head_count": own["num_attention_heads"],
        "attention.head_count_kv": own["num_key_value_heads"],
        "attention.key_length": own["head_dim"],
        "attention.value_length": own["head_dim"],
        "attention.layer_norm_rms_epsilon": float(own["rms_norm_eps"]),
        "rope.dimension_count": own["head_dim"],
        "rope.freq_base": float(dense.rope_theta(own) or 10000.0),
        "vocab_size": own["vocab_size"],
        "target_layers": [*Heads.from_config(hf_config).features],
        **rope_scaling(own),
    }


_BLOCK_DRAFTER = DraftArchitecture(
    name="dflash",
    method="dflash",
    layers=lambda hf_config: [f"decoder_layer_{layer}." for layer in range(dflash.num_decoder_layers(hf_config))],
    layer_of=dflash.layer_of,
    outside={
        "fc.weight": "fc.weight",
        "hidden_norm.weight": "enc.output_norm.weight",
        "final_layernorm.weight": "output_norm.weight",
        "markov_embedding.weight": "markov_w1.weight",
        "markov_output.weight": "markov_w2.weight",
    },
    naming=Naming(),
    metadata=_dflash_metadata,
)
DRAFT_ARCHITECTURES = {
    dflash.KIND: _BLOCK_DRAFTER,
    dflash.DSPARK: replace(_BLOCK_DRAFTER, method="dspark"),
    eagle3.KIND: DraftArchitecture(
        name="eagle3",
        method="eagle3",
        layers=lambda hf_config: ["transformer_layer."],
        layer_of=eagle3.layer_of,
        outside={"fc.weight": "fc.weight", "final_layernorm.weight": "output_norm.weight"},
        naming=Naming(
            {
                "input_layernorm.embedding_norm.weight": ("attn_norm.weight",),
                "input_layernorm.state_norm.weight": ("attn_norm_2.weight",),
            },
            pairs_channels=True,
        ),
        metadata=_eagle3_metadata,
    ),
    gemma4_assistant.KIND: DraftArchitecture(
        name="gemma4-assistant",
        method="mtp",
        layers=lambda hf_config: [
            f"decoder_layer_{number}." for number in range(gemma4_assistant.text_config(hf_config)["num_hidden_layers"])
        ],
        layer_of=lambda architecture, hf_config: gemma4_assistant.layers_of(architecture, hf_config)[0],
        outside={
            "pre_projection.weight": "nextn.pre_projection.weight",
            "post_projection.weight": "nextn.post_projection.weight",
            "final_layernorm.weight": "output_norm.weight",
            "output_layer.weight": "token_embd.weight",
        },
        naming=Naming(),
        metadata=gemma4.assistant_metadata,
        constants=gemma4.constants,
        why_not=gemma4.why_no_assistant,
        unused="clusters.",  # its graph computes the logits of all tokens
    ),
}
"""Kind of drafter -> its architecture."""


def check_has_trunk(architecture: str) -> None:
    """Check that a file is not that of a drafter.

    Raises:
        UserError: it is.
    """
    if architecture in {known.name for known in DRAFT_ARCHITECTURES.values()}:
        raise UserError(
            f"this GGUF file has only a drafter ({architecture})",
            "use the file of its model, such as X.gguf for X-draft.gguf",
        )


def why_no_drafts(family: Family, hf_config: HfConfig) -> str:
    """Return why llama.cpp does not draft with the drafter of a model, by default an MTP head; empty if it does."""
    if kind_of(hf_config) == MTP:
        return why_no_heads(family, hf_config)
    return why_no_drafter(family, hf_config) or DRAFT_ARCHITECTURES[kind_of(hf_config)].why_not(family, hf_config)


def draft_architecture_of(family: Family, hf_config: HfConfig) -> DraftArchitecture:
    """Return the architecture of llama.cpp that runs the drafter of a model.

    Raises:
        UserError: llama.cpp does not run the drafter.
    """
    if reason := why_no_drafts(family, hf_config):
        raise UserError(reason, "use --infer_backend vllm or transformers")
    return DRAFT_ARCHITECTURES[kind_of(hf_config)]


def draft_metadata_of(family: Family, hf_config: HfConfig) -> Metadata:
    """Return the metadata of a drafter, without those of the tokenizer.

    Raises:
        UserError: llama.cpp does not support the drafter.
    """
    architecture = draft_architecture_of(family, hf_config)
    named: Metadata = {"general.architecture": architecture.name}
    for key, value in architecture.metadata(family, hf_config).items():
        named[key[1:] if key.startswith(".") else f"{architecture.name}.{key}"] = value
    return named


def unused_tensors_of(family: Family, hf_config: HfConfig) -> list[str]:
    """Return the Hugging Face tensors of a drafter that llama.cpp does not use."""
    unused = draft_architecture_of(family, hf_config).unused
    if unused is None:
        return []
    rows = family.head_rows(hf_config, 0)
    return [name for row in rows if row.mcore.startswith(_PREFIX + unused) for name in row.hf]


def draft_conversions_of(family: Family, hf_config: HfConfig) -> list[Conversion]:
    """Return all tensors of a drafter as Hugging Face and as GGUF tensors."""
    architecture = draft_architecture_of(family, hf_config)
    rows = family.head_rows(hf_config, 0)
    found = []
    for row in rows:
        name = architecture.outside.get(row.mcore.removeprefix(_PREFIX))
        if name is not None:
            found.append(Conversion(tuple(row.hf), (name,), is_exact=row.is_exact))
    layer = architecture.layer_of(family.architecture(hf_config), hf_config)
    for number, start in enumerate(architecture.layers(hf_config)):
        prefix = _PREFIX + start
        of_layer = [row for row in rows if row.mcore.startswith(prefix)]
        found += layer_conversions(of_layer, prefix, number, layer, family, architecture.naming)
    return [*found, *architecture.constants(family, hf_config)]
