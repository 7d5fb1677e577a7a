"""Derive families of vision-language models whose files contain a known language model under `language_model.`.

Their towers are not computed: an export copies the tensors of the tower and its projector unchanged, and rows have no
images. The settings of the language model are under `text_config` in config.json (`bridge/hf_config.py`).
"""

from dataclasses import replace
from functools import partial
from typing import Any

from swiftlite.bridge.rows import HfConfig, Row
from swiftlite.families.architecture import Outside
from swiftlite.families.family import Family, MtpLayout
from swiftlite.families.serving.convention import Serving

PREFIX = "language_model."


def wrapped(family: Family, name: str, serving: Serving, **changed: Any) -> Family:
    """Return the family `name`, whose files have the names of `family` after `PREFIX`.

    MTP heads that are named as decoder layers of the language model have the prefix too. Heads named `mtp.` have none.

    Args:
        serving: how engines run the family.
        changed: further fields of `Family` that differ.
    """
    return replace(
        family,
        name=name,
        outside=partial(_outside, family.outside),
        mtp=_heads(family.mtp),
        language_model=(PREFIX, "mtp."),
        serving=serving,
        **changed,
    )


def is_wrapped(family: Family) -> bool:
    """Return whether the names of the family's language model have the prefix."""
    return PREFIX in family.language_model


def _outside(of_text: Any, hf_config: HfConfig) -> Outside:
    outside: Outside = of_text(hf_config)
    return replace(
        outside,
        hf_layers=PREFIX + outside.hf_layers,
        hf_embedding=PREFIX + outside.hf_embedding,
        hf_final_norm=PREFIX + outside.hf_final_norm,
        hf_output_layer=PREFIX + outside.hf_output_layer,
    )


def _in_wrapper(hf_key: str) -> str:
    return hf_key if hf_key.startswith("mtp.") else PREFIX + hf_key


def _heads(mtp: MtpLayout) -> MtpLayout:
    def head_of(hf_config: HfConfig, hf_key: str) -> int | None:
        return mtp.head_of(hf_config, hf_key.removeprefix(PREFIX))

    def block(hf_config: HfConfig, head: int) -> str:
        return _in_wrapper(mtp.block(hf_config, head))

    def frame_rows(hf_config: HfConfig, head: int) -> list[Row]:
        rows = mtp.frame_rows(hf_config, head)
        return [replace(row, hf={_in_wrapper(key): shape for key, shape in row.hf.items()}) for row in rows]

    def copies(hf_config: HfConfig, head: int) -> dict[str, str]:
        found = mtp.copies(hf_config, head)
        return {_in_wrapper(copy): _in_wrapper(original) for copy, original in found.items()}

    return replace(mtp, head_of=head_of, block=block, frame_rows=frame_rows, copies=copies)
