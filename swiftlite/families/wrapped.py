"""Derive families of vision-language models whose files contain a known language model under `language_model.`.

Their towers are not computed: an export copies the tensors of the tower and its projector unchanged, and rows have no
images. The settings of the language model are under `text_config` in config.json (`bridge/hf_config.py`). Files that
transformers saves since 4.52 have the names of other vision-language models.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from swiftlite.bridge.rows import HfConfig, Row
from swiftlite.families import dense
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
    changed |= {"name": name, "serving": serving}
    published = _named(family, _as_published, (PREFIX, "mtp."))
    return replace(published, **changed, renamed=nested(family, **changed))


def nested(family: Family, name: str, serving: Serving, **changed: Any) -> Family:
    """Return the family `name`, whose files have the names that transformers saves since 4.52.

    Args:
        serving, changed: as for `wrapped`.
    """
    renamed = _named(family, _since_4_52, (dense.IN_WRAPPER, "lm_head.", "mtp."))
    return replace(renamed, name=name, serving=serving, **changed)


def is_wrapped(family: Family) -> bool:
    """Return whether the files of the family contain a language model, and a tower that is not computed."""
    return bool(family.language_model) and family.vision is None


def text_name(hf_key: str) -> str:
    """Return the name of a tensor in files of the language model alone."""
    if hf_key.startswith(dense.IN_WRAPPER):
        return "model." + hf_key.removeprefix(dense.IN_WRAPPER)
    return hf_key.removeprefix(PREFIX)


def _as_published(name: str) -> str:
    return name if name.startswith("mtp.") else PREFIX + name


def _since_4_52(name: str) -> str:
    return dense.IN_WRAPPER + name.removeprefix("model.") if name.startswith("model.") else name


def _named(family: Family, in_wrapper: Callable[[str], str], language_model: tuple[str, ...]) -> Family:
    return replace(
        family,
        outside=partial(_outside, family.outside, in_wrapper),
        mtp=_heads(family.mtp, in_wrapper),
        language_model=language_model,
    )


def _outside(of_text: Any, in_wrapper: Callable[[str], str], hf_config: HfConfig) -> Outside:
    outside: Outside = of_text(hf_config)
    return replace(
        outside,
        hf_layers=in_wrapper(outside.hf_layers),
        hf_embedding=in_wrapper(outside.hf_embedding),
        hf_final_norm=in_wrapper(outside.hf_final_norm),
        hf_output_layer=in_wrapper(outside.hf_output_layer),
    )


def _heads(mtp: MtpLayout, in_wrapper: Callable[[str], str]) -> MtpLayout:
    def head_of(hf_config: HfConfig, hf_key: str) -> int | None:
        return mtp.head_of(hf_config, text_name(hf_key))

    def block(hf_config: HfConfig, head: int) -> str:
        return in_wrapper(mtp.block(hf_config, head))

    def frame_rows(hf_config: HfConfig, head: int) -> list[Row]:
        rows = mtp.frame_rows(hf_config, head)
        return [replace(row, hf={in_wrapper(key): shape for key, shape in row.hf.items()}) for row in rows]

    def copies(hf_config: HfConfig, head: int) -> dict[str, str]:
        found = mtp.copies(hf_config, head)
        return {in_wrapper(copy): in_wrapper(original) for copy, original in found.items()}

    return replace(mtp, head_of=head_of, block=block, frame_rows=frame_rows, copies=copies)
