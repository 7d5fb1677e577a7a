"""Define `Row`: one Megatron parameter and the Hugging Face tensors that form it.

Families define rows; loading and saving use them. Names are those of the whole model: layers are numbered over all
pipeline stages, and there are no wrappers or ranks. See also `join.py` and `transfer.py`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

from swiftlite.bridge.join import COPY, Join

Shape = tuple[int, ...]
HfConfig = Mapping[str, Any]
"""The content of a config.json."""
HfPart = Literal["trunk", "heads"]
"""A part of a checkpoint: the tensors of the trunk, or the tensors of the MTP heads."""


@dataclass(frozen=True)
class Row:
    """A Megatron parameter and the HF tensors that form it.

    Args:
        mcore: Megatron name, such as `self_attention.linear_qkv.weight` within a layer.
        hf: shapes of the HF tensors for this config, by name, in the order of the join's arguments.
        join: how the HF tensors are joined.
        hf_copies: further HF names that may contain a copy of the row's single HF tensor (`lm_head.weight` of a tied
            model, the embedding in a DeepSeek-V3 head). Loading checks that copies are equal to the tensor. Saving
            writes the copies that the source model had. Copies in MTP heads are always written, because some engines
            require them.
        mcore_copies: further Megatron parameters with the same values (`output_layer.weight` of a tied model on a later
            pipeline stage). They are filled on load and never written.
        is_exact: whether the parameter is float32 even in a 16-bit model. An export writes it as float32, unless the
            source model had another dtype.
        is_frozen: whether the parameter is not trained, except those of indexers (--indexer_mode). New MTP heads always
            copy it from the trunk.
        is_integer: whether the parameter consists of integers, such as ids of tokens: a buffer in int64, which an
            export writes in the dtype of the source model.
        can_be_new: whether the parameter is random if the files do not contain its HF tensors.
    """

    mcore: str
    hf: Mapping[str, Shape]
    join: Join = COPY
    hf_copies: tuple[str, ...] = ()
    mcore_copies: tuple[str, ...] = ()
    is_exact: bool = False
    is_frozen: bool = False
    is_integer: bool = False
    can_be_new: bool = False

    def hf_shapes(self) -> dict[str, Shape]:
        """Return the shapes of the row's HF tensors by name, including copies."""
        if not self.hf_copies:
            return dict(self.hf)
        (shape,) = self.hf.values()  # a row with copies has a single HF tensor
        return {**self.hf, **dict.fromkeys(self.hf_copies, shape)}


def shapes_of(rows: Iterable[Row]) -> dict[str, Shape]:
    """Return the shape of every HF tensor of these rows, in order, without copies."""
    shapes: dict[str, Shape] = {}
    for row in rows:
        shapes |= row.hf
    return shapes


def renamed(name: str, beginnings: Mapping[str, str]) -> str:
    """Return the name with its prefix replaced as specified by `beginnings`.

    Names with other prefixes are unchanged.
    """
    for begin, own in beginnings.items():
        if name.startswith(begin):
            return own + name.removeprefix(begin)
    return name


def lift(rows: Iterable[Row], mcore_prefix: str, hf_prefix: str) -> list[Row]:
    """Return the rows with prefixes added to their names.

    Thus the rows of one decoder layer can be used for every layer and for the decoder layers of MTP heads.
    """

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
    """The methods of a family (`families/family.py`) that `bridge` uses: its rows, and the meaning of HF keys.

    `hf_config` is the content of config.json.
    """

    @property
    def norm_start(self) -> float:
        """Initial weight of norms."""
        ...

    def head_sources(self, hf_config: HfConfig, head: int, /) -> dict[str, str]:
        """Return Megatron parameters of an MTP head, or of a layer of another drafter, that can start as copies, each
        with the trunk's parameter.
        """
        ...

    def head_of(self, hf_config: HfConfig, hf_key: str, /) -> int | None:
        """Return the number (from 0) of the MTP head that an HF key belongs to; None for keys of the trunk."""
        ...

    def is_mtp(self, hf_config: HfConfig, hf_key: str, /) -> bool:
        """Return whether an HF key belongs to an MTP head."""
        ...

    def is_derived(self, hf_key: str, /) -> bool:
        """Return whether the HF tensor with this key contains values that are derived from the config (rotary
        `inv_freq`).
        """
        ...

    def is_carried(self, hf_config: HfConfig, hf_key: str, /) -> bool:
        """Return whether an HF tensor is not part of the language model, or not used by it. Such tensors are copied
        unchanged."""
        ...

    def head_rows(self, hf_config: HfConfig, head: int, /) -> list[Row]:
        """Return the bridge rows of MTP head number `head`, from 0."""
        ...

    def rows(self, hf_config: HfConfig, mtp_num_layers: int, /) -> list[Row]:
        """Return the bridge rows of the whole model with `mtp_num_layers` MTP layers."""
        ...
