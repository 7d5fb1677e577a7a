"""Define `Family`, which describes everything that is specific to a `model_type` of Hugging Face."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any

from swiftlite.base.drafting import Drafting
from swiftlite.base.errors import UserError
from swiftlite.base.heads import MTP, Heads, kind_of
from swiftlite.bridge.rows import HfConfig, Row
from swiftlite.families.architecture import Architecture, Outside
from swiftlite.families.drafter import Drafter
from swiftlite.families.drafters import DRAFTERS
from swiftlite.families.layer import Layer
from swiftlite.families.reward_model import reward_keys
from swiftlite.families.serving.convention import Serving
from swiftlite.families.tower import Tower
from swiftlite.families.vision import VisionTower


def no_copies(hf_config: HfConfig, head: int) -> dict[str, str]:
    """Return an empty mapping, for families whose heads contain no copies of the trunk's tensors."""
    return {}


@dataclass(frozen=True)
class MtpLayout:
    """The names of MTP heads in a family's HF files. Heads are numbered from 0.

    Args:
        head_of: returns the number of the head that an HF key (name of a tensor in HF files) belongs to; None for the
            trunk's keys. An unknown key with the prefix of a head also belongs to that head, so that errors list it
            there.
        block: returns the HF prefix of the decoder layer in head k.
        frame_rows: returns the bridge rows of head k without its decoder layer: projection and norms.
        copies: returns the HF keys of head k that copy a tensor of the trunk, each with the trunk's key.
        drafting: default inputs of the heads, which are the inputs that vLLM passes to them.
        config: returns further keys of config.json for a number of heads.
    """

    head_of: Callable[[HfConfig, str], int | None]
    block: Callable[[HfConfig, int], str]
    frame_rows: Callable[[HfConfig, int], list[Row]]
    copies: Callable[[HfConfig, int], dict[str, str]] = no_copies
    drafting: Drafting = Drafting()
    config: Callable[[HfConfig, int], dict[str, Any]] = lambda hf_config, number: {}


@dataclass(frozen=True)
class Family:
    """A family of models. The argument of all functions is the content of config.json.

    Args:
        name: HF `model_type`.
        check: raises a UserError for every unsupported setting that would change the computation.
        layer: returns the kinds of attention and MLP of decoder layer n (from 0), with their sizes.
        outside: returns the modules outside of the layers: embedding, final norm, output layer.
        mtp: names of the MTP heads.
        tower: computes embeddings of inputs other than tokens, such as images; None without a tower.
        vision: describes the vision tower in the files of the family; None without a tower. A run without images does
            not compute the tower, and copies its tensors unchanged.
        language_model: prefixes of the HF names of the language model, its heads and its tower, if files contain other
            parts, such as a vision tower that is not computed here; empty otherwise.
        is_unread: returns whether an HF tensor of the language model is not used by the model. Such tensors are copied
            unchanged, like those of other parts.
        memory_names: maps prefixes of HF names (within a layer) to the prefixes that transformers uses in memory. Only
            prefixes that differ are listed.
        renamed: the same family with the names of other files, in which those of the language model start with
            `model.language_model.`; None if all files have the same names.
        norm_start: initial weight of norms: 1, or 0 if norms multiply by 1 + weight.
        numbers_by_layer: lowest and highest number in lists of config.json with a number for each layer, by key.
        serving: how engines run the family.
        is_reward_model: whether the output layer computes one number (`families/reward_model.py`).
        tiny: settings of a tiny model in addition to the sizes of all families, for tests and scripts.
    """

    name: str
    check: Callable[[HfConfig], None]
    layer: Callable[[HfConfig, int], Layer]
    outside: Callable[[HfConfig], Outside]
    mtp: MtpLayout
    tower: Callable[[HfConfig], Tower | None] = lambda hf_config: None
    vision: Callable[[HfConfig], VisionTower] | None = None
    language_model: tuple[str, ...] = ()
    norm_start: float = 1.0
    is_unread: Callable[[HfConfig, str], bool] = lambda hf_config, hf_key: False
    memory_names: Mapping[str, str] = field(default_factory=dict)
    renamed: "Family | None" = None
    numbers_by_layer: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    serving: Serving = field(default_factory=Serving)
    is_reward_model: bool = False
    tiny: Mapping[str, Any] = field(default_factory=dict)

    def with_images(self, hf_config: HfConfig) -> "Family":
        """Return the family of a run whose rows have images: it computes the vision tower, instead of copying it.

        Raises:
            UserError: the family has no vision tower, or config.json does not describe it.
        """
        if self.vision is None:
            problem = f"model_type {self.name!r}: images are not supported"
            raise UserError(problem, "use dataset rows without images, or a vision-language model")
        hf_prefix = self.vision(hf_config).hf_prefix
        return replace(self, tower=self.vision, language_model=(*self.language_model, hf_prefix))

    def as_reward_model(self) -> "Family":
        """Return the family of reward models with this trunk."""
        return replace(self, outside=partial(_with_score, self.outside), is_reward_model=True)

    def architecture(self, hf_config: HfConfig) -> Architecture:
        """Return the architecture without calling `check`; unsupported settings are ignored."""
        outside = self.outside(hf_config)
        layers = tuple(self.layer(hf_config, number) for number in range(outside.num_layers))
        return Architecture(outside, layers, self.tower(hf_config))

    def trunk_rows(self, hf_config: HfConfig) -> list[Row]:
        """Return the bridge rows of everything except MTP heads."""
        return self.architecture(hf_config).rows()

    def head_sources(self, hf_config: HfConfig, head: int) -> dict[str, str]:
        """Return Megatron parameters of an MTP head, or of a layer of another drafter, that can start as copies, each
        with the trunk's parameter.
        """
        return self.drafter(hf_config).sources(self, hf_config, head)

    def block_rows(self, hf_config: HfConfig) -> list[Row]:
        """Return the bridge rows of the decoder layer in an MTP head, with names relative to the layer."""
        return self.architecture(hf_config).mtp_block.rows()

    def drafter(self, hf_config: HfConfig) -> Drafter:
        """Return the kind of drafter that config.json declares: MTP heads, unless it declares another one."""
        return DRAFTERS[kind_of(hf_config)]

    def drafting_of(self, hf_config: HfConfig, heads: Heads) -> Drafting:
        """Return the inputs of these heads."""
        if heads.drafting is None:
            return DRAFTERS[heads.kind].drafting(self, hf_config)
        return heads.drafting

    def head_rows(self, hf_config: HfConfig, head: int) -> list[Row]:
        """Return the bridge rows of one MTP head, or of one layer of another drafter."""
        return self.drafter(hf_config).rows(self, hf_config, head)

    def copies(self, hf_config: HfConfig, head: int) -> dict[str, str]:
        """Return the HF keys of a head that copy a tensor of the trunk, each with the trunk's key."""
        return self.drafter(hf_config).copies(self, hf_config, head)

    def rows(self, hf_config: HfConfig, mtp_num_layers: int | None = None) -> list[Row]:
        """Return the bridge rows of the whole model with `mtp_num_layers` MTP layers (default: the number in
        config.json).
        """
        if mtp_num_layers is None:
            mtp_num_layers = Heads.from_config(hf_config).layers
        heads = range(mtp_num_layers)
        copies: dict[str, list[str]] = {}
        for head in heads:
            for copy, original in self.copies(hf_config, head).items():
                copies.setdefault(original, []).append(copy)
        rows = self.trunk_rows(hf_config)
        if copies:
            rows = [_with_copies(row, copies) for row in rows]
        for head in heads:
            rows += self.head_rows(hf_config, head)
        return rows

    def config_with(self, hf_config: HfConfig, heads: Heads) -> dict[str, Any]:
        """Return the change of a config.json that makes it declare these heads and, if it is one, a reward model."""
        of_heads = heads.config_change(hf_config) | DRAFTERS[heads.kind].config(self, hf_config, heads.layers)
        return of_heads | reward_keys(hf_config)

    def head_of(self, hf_config: HfConfig, hf_key: str) -> int | None:
        """Return the number (from 0) of the head, or layer of another drafter, that an HF key belongs to; None for
        other keys.
        """
        return self.drafter(hf_config).layer_of(self, hf_config, hf_key)

    def is_mtp(self, hf_config: HfConfig, hf_key: str) -> bool:
        """Return whether an HF key belongs to an MTP head or another drafter.

        If config.json declares another drafter, it replaces the MTP heads, or the drafter, whose tensors are in the
        files.
        """
        drafters = [self.drafter(hf_config)]
        if kind_of(hf_config) != MTP:
            drafters += DRAFTERS.values()
        return any(drafter.layer_of(self, hf_config, hf_key) is not None for drafter in drafters)

    def is_carried(self, hf_config: HfConfig, hf_key: str) -> bool:
        """Return whether an HF tensor is not part of the language model, or not used by it.

        Such tensors are not read, and an export copies them unchanged from the source model.
        """
        if self.language_model and not hf_key.startswith(self.language_model):
            return True
        return self.is_unread(hf_config, hf_key)

    def is_derived(self, hf_key: str) -> bool:
        """Return whether an HF tensor is neither read nor written.

        Its values are derived from the config, such as the rotary frequencies in old Llama files; or it is the output
        layer of the model that a reward model starts from.
        """
        return hf_key.endswith(".rotary_emb.inv_freq") or (self.is_reward_model and hf_key == "lm_head.weight")


def _with_score(outside: Callable[[HfConfig], Outside], hf_config: HfConfig) -> Outside:
    """Return the modules outside of the layers, with an output layer that computes one number."""
    return replace(outside(hf_config), is_tied=False, has_score=True)


def _with_copies(row: Row, copies: Mapping[str, list[str]]) -> Row:
    """Return the bridge row with the names of its tensor's copies in MTP heads added.

    A tied output layer counts as the embedding.
    """
    found = chain.from_iterable(copies.get(key, ()) for key in (*row.hf, *row.hf_copies))
    return replace(row, hf_copies=(*row.hf_copies, *found))
