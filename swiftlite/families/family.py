"""What a family is: the answers that differ from one HF `model_type` to the next, as one value."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from swiftlite.args.rules import MTP_DEPTH_KEY
from swiftlite.bridge.rows import Row, lift

HfConfig = Mapping[str, Any]


@dataclass(frozen=True)
class MtpLayout:
    """How a family's HF files name its MTP heads; heads count from 0.

    Args:
        prefix: every HF key of a head begins so, and no other key does.
        block: HF prefix of the decoder layer inside a head, with `{head}` for its number.
        frame_rows: bridge rows of the rest of head k: projection and norms.
    """

    prefix: str
    block: str
    frame_rows: Callable[[HfConfig, int], list[Row]]


@dataclass(frozen=True)
class Family:
    """One family of models. Every function takes the content of config.json.

    Args:
        name: HF `model_type`.
        check: refuses, with a UserError, every setting that would change the mathematics and is not supported.
        transformer_config: keyword arguments of megatron-core's TransformerConfig that the architecture fixes.
        layer_rows: bridge rows of one decoder layer, names relative to the layer; MTP heads hold one too.
        outer_rows: bridge rows of the trunk outside its layers: embedding, final norm, head.
        mtp: names of the MTP heads.
        is_derived: whether an HF key holds nothing but what follows from the config, so it is neither read nor written.
    """

    name: str
    check: Callable[[HfConfig], None]
    transformer_config: Callable[[HfConfig], dict[str, Any]]
    layer_rows: Callable[[HfConfig], list[Row]]
    outer_rows: Callable[[HfConfig], list[Row]]
    mtp: MtpLayout
    is_derived: Callable[[str], bool]

    def trunk_rows(self, hf_config: HfConfig) -> list[Row]:
        """Everything but MTP."""
        rows, layer = self.outer_rows(hf_config), self.layer_rows(hf_config)
        for number in range(hf_config["num_hidden_layers"]):
            rows += lift(layer, f"decoder.layers.{number}.", f"model.layers.{number}.")
        return rows

    def head_rows(self, hf_config: HfConfig, head: int) -> list[Row]:
        """One MTP head: the decoder layer's rows lifted, and the frame around it."""
        block = lift(
            self.layer_rows(hf_config), f"mtp.layers.{head}.transformer_layer.", self.mtp.block.format(head=head)
        )
        return self.mtp.frame_rows(hf_config, head) + block

    def rows(self, hf_config: HfConfig, depth: int | None = None) -> list[Row]:
        """The whole table for `depth` MTP heads (unset: as many as the config promises)."""
        heads = range(self.mtp_depth(hf_config) if depth is None else depth)
        return self.trunk_rows(hf_config) + [row for head in heads for row in self.head_rows(hf_config, head)]

    def mtp_depth(self, hf_config: HfConfig) -> int:
        """MTP heads that config.json promises."""
        return hf_config.get(MTP_DEPTH_KEY) or 0

    def mtp_depth_change(self, hf_config: HfConfig, depth: int) -> dict[str, int]:
        """The change of config.json that promises `depth` heads; empty when it does already."""
        return {} if self.mtp_depth(hf_config) == depth else {MTP_DEPTH_KEY: depth}

    def is_mtp(self, hf_key: str) -> bool:
        """Whether an HF key belongs to an MTP head."""
        return hf_key.startswith(self.mtp.prefix)
