"""Describe the MTP heads of a model as one value: their number of layers, and the number and ids of the tokens that
they draft.

The plan, the model, a run's report, an export's config.json and the flags of an engine use this value. A model can have
another kind of drafter instead of MTP heads (`families/drafters.py`), which has the same value.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from swiftlite.base import draft_vocab
from swiftlite.base.drafting import Drafting

DEPTH_KEY = "num_nextn_predict_layers"
"""Key of config.json for the number of MTP layers. Engines read it."""
QWEN3_5_DEPTH_KEY = "mtp_num_hidden_layers"
"""Key of config.json for the number of MTP layers in Qwen3.5 and 3.6."""
UNROLL_KEY = "mtp_unroll"
"""Key of an export's config.json for the number of tokens that its single MTP layer was trained to draft. No engine
reads it."""
DRAFT_VOCAB_KEY = "mtp_draft_vocab"
"""Key of an export's config.json for the ids of the tokens that its heads can draft, see
`swiftlite.base.draft_vocab`."""
DRAFTING_KEY = "mtp_drafting"
"""Key of an export's config.json for the inputs of its heads, if --draft_for was used. No engine reads it."""

DRAFTER_KEY = "drafter"
"""Key of an export's config.json for a drafter other than MTP heads: an object with the drafter's `kind`, its number of
`layers`, and settings of the kind. The number has another key than that of MTP layers, from which engines would load
MTP heads."""
FEATURES_KEY = "feature_layers"
"""Key of this object for `Heads.features`."""
OWN_CONFIG_KEY, OWN_GENERATION_KEY = "config", "generation_config"
"""Keys of this object for the content of config.json and generation_config.json in a drafter's own directory, if it is
published in one."""
MTP = "mtp"
"""The kind of drafter of a config.json without DRAFTER_KEY: MTP heads."""
MTP_FEATURES = "mtp_features"
"""The kind of drafter of an MTP head that also reads inputs of decoder layers."""
GEMMA4_ASSISTANT = "gemma4_assistant"
"""The kind of drafter of an assistant of Gemma 4."""
GEMMA4_ASSISTANTS = (GEMMA4_ASSISTANT, "gemma4_unified_assistant")
"""The values of `model_type` in the own config.json of assistants of Gemma 4; the second is that of the 12B."""

REMOVE: Any = object()
"""A change of a config.json that removes the key."""

KEYS = (DEPTH_KEY, QWEN3_5_DEPTH_KEY, UNROLL_KEY, DRAFT_VOCAB_KEY, DRAFTING_KEY, DRAFTER_KEY)
"""All keys of a config.json that describe heads only."""


def depth_key(hf_config: Mapping[str, Any]) -> str:
    """Return the key of a config.json for the number of MTP layers."""
    if str(hf_config.get("model_type")).startswith("qwen3_5"):
        return QWEN3_5_DEPTH_KEY
    return DEPTH_KEY


def kind_of(hf_config: Mapping[str, Any]) -> str:
    """Return the kind of drafter that a config.json declares."""
    declared = hf_config.get(DRAFTER_KEY)
    if not isinstance(declared, dict):
        return MTP
    return str(declared.get("kind"))


@dataclass(frozen=True)
class Heads:
    """The MTP heads that a checkpoint declares or a run trains, or another drafter.

    Attributes:
        layers: number of MTP layers, each with separate weights; 0 for a model without heads.
        unroll: number of times that a single MTP layer is applied, each time to its own state; 1 with several layers.
        beta: loss weight of each draft token relative to the previous one, for an unrolled layer.
        has_joint_weights: whether these loss weights are multiplied at each position by those of the chain of drafts
            (`chain_weights` in `train/methods/mtp_loss.py`).
        draft_vocab: ids of the tokens that heads can draft, ascending; empty for the whole vocabulary.
        drafting: inputs of the heads; None means the inputs that vLLM passes to heads of the family.
        kind: kind of drafter (`families/drafters.py`). A layer of another kind than MTP heads is a numbered part of it,
            and `unroll` the number of tokens that the part drafts.
        features: numbers (from 0) of the decoder layers whose inputs the drafter reads, ascending, instead of the last
            state of the trunk, or in addition (`reads_state`). The input of layer n is the output of layer n - 1, that
            of layer 0 the embedding.
    """

    layers: int = 0
    unroll: int = 1
    beta: float = 1.0
    draft_vocab: tuple[int, ...] = field(default=(), repr=False)
    drafting: Drafting | None = None
    kind: str = MTP
    has_joint_weights: bool = False
    features: tuple[int, ...] = ()

    @classmethod
    def from_config(cls, hf_config: Mapping[str, Any]) -> "Heads":
        """Return the heads that a config.json declares; none if the key is missing or its value is not a number."""
        declared: dict[str, Any] = {"kind": kind_of(hf_config)}
        layers, unroll = hf_config.get(depth_key(hf_config)), hf_config.get(UNROLL_KEY)
        if declared["kind"] != MTP:
            layers = hf_config[DRAFTER_KEY].get("layers")
            features = hf_config[DRAFTER_KEY].get(FEATURES_KEY)
            if isinstance(features, list):
                declared["features"] = tuple(features)
        drafted, drafting = hf_config.get(DRAFT_VOCAB_KEY), hf_config.get(DRAFTING_KEY)
        if isinstance(layers, int):
            declared["layers"] = layers
        if isinstance(unroll, int) and unroll:
            declared["unroll"] = unroll
        if drafted:
            declared["draft_vocab"] = draft_vocab.from_text(drafted, hf_config.get("vocab_size", 0))
        if drafting is not None:
            declared["drafting"] = Drafting.from_json(drafting)
        return cls(**declared)

    @property
    def drafts(self) -> int:
        """Number of draft tokens in one step of an engine, in addition to the next token."""
        return self.layers * self.unroll

    @property
    def name(self) -> str:
        """The heads, or the drafter by its kind, in texts for users."""
        if self.kind == MTP:
            return "MTP heads"
        return f"the drafter {self.kind}"

    @property
    def reads_state(self) -> bool:
        """Whether the drafter reads the last state of the trunk."""
        return not self.features or self.kind in (MTP_FEATURES, GEMMA4_ASSISTANT)

    @property
    def has_output_layer(self) -> bool:
        """Whether the drafter has an output layer of its own because of its kind, without a cap of logits."""
        return self.kind == GEMMA4_ASSISTANT

    @property
    def weights(self) -> tuple[float, ...]:
        """Weights of the draft tokens in the MTP loss, which add up to 1.

        For example, two layers have the weights 1/2 and 1/2. One layer unrolled three times with beta 0.5 has 4/7, 2/7
        and 1/7.
        """
        powers = [self.beta**step for step in range(self.unroll)] * self.layers
        return tuple(power / sum(powers) for power in powers)

    def config_change(self, hf_config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the change of a config.json that makes it declare these heads: new values by key, or REMOVE.

        The change always includes the number of layers, because some config.json files do not declare this number.
        """
        declared = Heads.from_config(hf_config)
        change = self._change_of_layers(hf_config, declared)
        if declared.unroll != self.unroll:
            change[UNROLL_KEY] = self.unroll
        if declared.draft_vocab != self.draft_vocab:
            change[DRAFT_VOCAB_KEY] = draft_vocab.to_text(self.draft_vocab)
        if declared.drafting != self.drafting:
            change[DRAFTING_KEY] = self.drafting.to_json() if self.drafting else REMOVE
        return change

    def _change_of_layers(self, hf_config: Mapping[str, Any], declared: "Heads") -> dict[str, Any]:
        """Return the change of a config.json that makes it declare the kind and the number of layers."""
        key = depth_key(hf_config)
        change: dict[str, Any] = {}
        if self.kind == MTP:
            if self.layers or declared.layers:
                change[key] = self.layers
            if declared.kind != MTP:
                change[DRAFTER_KEY] = REMOVE
            return change
        if hf_config.get(key):
            change[key] = 0
        settings = hf_config.get(DRAFTER_KEY) or {}
        change[DRAFTER_KEY] = {**settings, "kind": self.kind, "layers": self.layers}
        return change
