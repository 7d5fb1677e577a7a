"""What MTP heads are fed, as a value: training feeds them the same as the engine that will run them."""

from dataclasses import asdict, dataclass, fields

from swiftlite.errors import UserError


@dataclass(frozen=True)
class Drafting:
    """What MTP heads are fed.

    Attributes:
        takes_before_norm: the trunk's state before its final norm; otherwise the one after it.
        recycles_before_norm: when a head goes on alone, its own state before its output norm; otherwise after it.
        zeroes_first_embedding: zeros for the embedding at a sequence's position 0.
    """

    takes_before_norm: bool = False
    recycles_before_norm: bool = False
    zeroes_first_embedding: bool = False

    def to_json(self) -> dict[str, bool]:
        """The value as config.json has it."""
        return asdict(self)

    @classmethod
    def from_json(cls, content: object) -> "Drafting":
        """The value that `to_json` wrote.

        Raises:
            UserError: it is something else.
        """
        names = [field.name for field in fields(cls)]
        given = content if isinstance(content, dict) else {}
        if sorted(given) != sorted(names) or not all(isinstance(value, bool) for value in given.values()):
            raise UserError(
                f"config.json: mtp_drafting is {str(content)[:80]}; it should say true or false for {', '.join(names)}"
            )
        return cls(**given)

    def difference(self, other: "Drafting") -> str:
        """What heads get otherwise by `other`, in words; "" where nothing."""
        words = {
            "takes_before_norm": "the trunk's state",
            "recycles_before_norm": "their own state",
            "zeroes_first_embedding": "the embedding at position 0",
        }
        mine, theirs = asdict(self), asdict(other)
        return ", ".join(text for name, text in words.items() if mine[name] != theirs[name])
