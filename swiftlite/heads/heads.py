"""The MTP heads of a model as one value: how many layers, and how many and which tokens they draft.

Everything that speaks of heads is handed this value: the plan, the model, a run's report, an export's config.json, the
flags of an engine.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from swiftlite.heads import draft_vocab
from swiftlite.heads.drafting import Drafting

DEPTH_KEY = "num_nextn_predict_layers"
"""config.json: MTP layers of the model; engines read it."""
QWEN3_5_DEPTH_KEY = "mtp_num_hidden_layers"
"""The same of Qwen3.5 and 3.6."""
UNROLL_KEY = "mtp_unroll"
"""config.json of an export: tokens that its one MTP layer was trained to draft; no engine reads it."""
DRAFT_VOCAB_KEY = "mtp_draft_vocab"
"""config.json of an export: the ids of the tokens that its heads draft, see `swiftlite.heads.draft_vocab`."""
DRAFTING_KEY = "mtp_drafting"
"""config.json of an export: what its heads were fed, where --draft_for said so; no engine reads it."""

KEYS = (DEPTH_KEY, QWEN3_5_DEPTH_KEY, UNROLL_KEY, DRAFT_VOCAB_KEY, DRAFTING_KEY)
"""All keys of a config.json that speak of heads alone."""


def depth_key(hf_config: Mapping[str, Any]) -> str:
    """The key of a config.json that says how many MTP layers the model has."""
    is_qwen3_5 = str(hf_config.get("model_type")).startswith("qwen3_5")
    return QWEN3_5_DEPTH_KEY if is_qwen3_5 else DEPTH_KEY


@dataclass(frozen=True)
class Heads:
    """The MTP heads that a checkpoint declares or a run trains.

    Attributes:
        layers: number of MTP layers, each with separate weights; 0 for a model without heads.
        unroll: number of times that a single MTP layer is applied, each time to its own state; 1 with several layers.
        beta: loss weight of each draft token relative to the previous one, for an unrolled layer.
        draft_vocab: ids of the tokens that they can draft, ascending; empty for the whole vocabulary.
        drafting: their inputs; None means those of vLLM for their family.
    """

    layers: int = 0
    unroll: int = 1
    beta: float = 1.0
    draft_vocab: tuple[int, ...] = field(default=(), repr=False)
    drafting: Drafting | None = None

    @classmethod
    def from_config(cls, hf_config: Mapping[str, Any]) -> "Heads":
        """The heads that a config.json promises; none where the key is not there or not a number."""
        layers, unroll = hf_config.get(depth_key(hf_config)), hf_config.get(UNROLL_KEY)
        drafted, drafting = hf_config.get(DRAFT_VOCAB_KEY), hf_config.get(DRAFTING_KEY)
        return cls(
            layers=layers if isinstance(layers, int) else 0,
            unroll=unroll if isinstance(unroll, int) and unroll else 1,
            draft_vocab=draft_vocab.from_text(drafted, hf_config.get("vocab_size", 0)) if drafted else (),
            drafting=None if drafting is None else Drafting.from_json(drafting),
        )

    @property
    def drafts(self) -> int:
        """Number of draft tokens in one step of an engine, in addition to the next token."""
        return self.layers * self.unroll

    @property
    def weights(self) -> tuple[float, ...]:
        """Weight of each drafted token in the MTP loss; they add up to 1.

        Two layers weigh 1/2 each. One layer unrolled three times with beta 0.5 weighs 4/7, 2/7, 1/7.
        """
        powers = [self.beta**step for step in range(self.unroll)] * self.layers
        return tuple(power / sum(powers) for power in powers)

    def config_change(self, hf_config: Mapping[str, Any]) -> dict[str, Any]:
        """The change of a config.json that makes it promise these heads.

        The number of layers is always among it: the file may leave it to be counted from tensors.
        """
        promised = Heads.from_config(hf_config)
        change: dict[str, Any] = {}
        if self.layers or promised.layers:
            change[depth_key(hf_config)] = self.layers
        if promised.unroll != self.unroll:
            change[UNROLL_KEY] = self.unroll
        if promised.draft_vocab != self.draft_vocab:
            change[DRAFT_VOCAB_KEY] = draft_vocab.to_text(self.draft_vocab)
        if promised.drafting != self.drafting:
            change[DRAFTING_KEY] = self.drafting and self.drafting.to_json()
        return change
