"""The table: a row says which HF tensors one Megatron parameter is made of. Families write it; both directions read it.

Names are whole and global: no pipeline-local layer numbers, no wrappers, no ranks. See also `join.py`, `transfer.py`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

from swiftlite.bridge.join import COPY, Join

Shape = tuple[int, ...]
HfConfig = Mapping[str, Any]
"""The content of a config.json."""
HfPart = Literal["trunk", "heads"]
"""The tensors of a checkpoint that verify draft tokens, or those of the MTP heads."""


@dataclass(frozen=True)
class Row:
    """One Megatron parameter <-> one or more HF tensors.

    Args:
        mcore: Megatron name, e.g. `self_attention.linear_qkv.weight` within a layer.
        hf: HF names with the shapes that the config promises, in the order the join counts them.
        join: how they are joined.
        hf_copies: further HF names that may hold the very same numbers as the row's one HF tensor (`lm_head.weight`
            of a tied model, the embedding inside a DeepSeek-V3 head). Read only to check that they are equal. Written
            when the source model had them; those of MTP heads always, because some engines ask for them.
        mcore_copies: further Megatron names that hold the same parameter (`output_layer.weight` of a tied model on a
            later pipeline stage). Filled on load, never written.
        is_exact: whether the parameter is float32 in a model of 16 bits too. Files have it in float32, unless the
            source model had it otherwise.
    """

    mcore: str
    hf: Mapping[str, Shape]
    join: Join = COPY
    hf_copies: tuple[str, ...] = ()
    mcore_copies: tuple[str, ...] = ()
    is_exact: bool = False

    def hf_shapes(self) -> dict[str, Shape]:
        """Return the shapes of the row's HF names, copies included."""
        if not self.hf_copies:
            return dict(self.hf)
        (shape,) = self.hf.values()  # a row with copies has one name
        return {**self.hf, **dict.fromkeys(self.hf_copies, shape)}


def shapes_of(rows: Iterable[Row]) -> dict[str, Shape]:
    """Return the shape of every HF name of these rows, in their order; without copies."""
    shapes: dict[str, Shape] = {}
    for row in rows:
        shapes |= row.hf
    return shapes


def renamed(name: str, beginnings: Mapping[str, str]) -> str:
    """Return the name with a prefix in `beginnings` replaced; other names are unchanged."""
    for begin, own in beginnings.items():
        if name.startswith(begin):
            return own + name.removeprefix(begin)
    return name


def lift(rows: Iterable[Row], mcore_prefix: str, hf_prefix: str) -> list[Row]:
    """Return the rows with prefixes, so that one table of a decoder layer serves every layer and every MTP block."""

    def lifted(row: Row) -> Row:
        return replace(
            row,
            mcore=mcore_prefix + row.mcore,
            hf={hf_prefix + name: shape for name, shape in row.hf.items()},
            hf_copies=tuple(hf_prefix + name for name in row.hf_copies),
            mcore_copies=tuple(mcore_prefix + name for name in row.mcore_copies),
        )

    return list(map(lifted, rows))


class RowTable(Protocol):
    """The interface of a family (`families/family.py`) for the bridge: its rows and the owners of HF keys.

    `hf_config` is the content of config.json.
    """

    @property
    def norm_start(self) -> float:
        """Initial weight of norms."""
        ...

    def mtp_block_number(self, hf_config: HfConfig, /) -> int:
        """Return the decoder layer (from 0) whose kinds an MTP head has."""
        ...

    def head_of(self, hf_config: HfConfig, hf_key: str, /) -> int | None:
        """Return the MTP head that an HF key belongs to, from 0; None for the trunk's keys."""
        ...

    def is_mtp(self, hf_config: HfConfig, hf_key: str, /) -> bool:
        """Return whether an HF key belongs to an MTP head."""
        ...

    def is_derived(self, hf_key: str, /) -> bool:
        """Return whether an HF key holds nothing but what follows from the config (rotary `inv_freq`)."""
        ...

    def is_carried(self, hf_key: str, /) -> bool:
        """Return whether an HF key belongs to another part than the language model, which is carried through
        unchanged."""
        ...

    def head_rows(self, hf_config: HfConfig, head: int, /) -> list[Row]:
        """Return the rows of MTP head number `head`, from 0."""
        ...

    def rows(self, hf_config: HfConfig, mtp_num_layers: int, /) -> list[Row]:
        """Return the whole table with this many MTP layers."""
        ...
