"""Describe the inputs of MTP heads, so that heads are trained with the inputs that the engine will pass to them."""

from dataclasses import asdict, dataclass, fields
from typing import Any

from swiftlite.base.errors import UserError


@dataclass(frozen=True)
class Drafting:
    """The inputs of MTP heads.

    Attributes:
        takes_before_norm: whether heads read the trunk's state before its final norm; otherwise the state after the
            norm.
        recycles_before_norm: whether an unrolled head continues from its state before its output norm; otherwise from
            the state after the norm.
        zeroes_first_embedding: whether the embedding at a sequence's position 0 is zero.
        chains_before_norm: whether a head reads the state of the previous head before its output norm; otherwise the
            state after the norm.
    """

    takes_before_norm: bool = False
    recycles_before_norm: bool = False
    zeroes_first_embedding: bool = False
    chains_before_norm: bool = False

    def to_json(self) -> dict[str, bool]:
        """Return the attributes by name, as in config.json."""
        return asdict(self)

    @classmethod
    def from_json(cls, content: object) -> "Drafting":
        """Build the `Drafting` from the content that `to_json` returned, also in versions with fewer attributes.

        Raises:
            UserError: the content does not have this format.
        """
        names = [field.name for field in fields(cls)]
        given: dict[str, Any] = {}
        if isinstance(content, dict):
            given = content
        if not given or not given.keys() <= set(names) or not all(isinstance(value, bool) for value in given.values()):
            raise UserError(
                f"config.json: invalid mtp_drafting: {str(content)[:80]}; expected true or false for {', '.join(names)}"
            )
        return cls(**given)

    def difference(self, other: "Drafting") -> str:
        """Return a description of the inputs that differ from those in `other`; empty if none differ."""
        words = {
            "takes_before_norm": "the trunk's state",
            "recycles_before_norm": "their own state",
            "zeroes_first_embedding": "the embedding at position 0",
            "chains_before_norm": "the state of the previous head",
        }
        mine, theirs = asdict(self), asdict(other)
        return ", ".join(text for name, text in words.items() if mine[name] != theirs[name])
