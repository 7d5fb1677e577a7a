"""Define `Method`, the description of a training method that is available before torch is loaded.

Commands, rules, plans and pages look up methods in `index.py`; only `doctor --plan` and a method's own rules refer to
one by name. Parts that require torch are named as "module:attribute" and loaded when a run starts."""

from collections.abc import Callable
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any

from swiftlite.args.commands import SftArgs

Lines = list[tuple[str, str]]
"""Lines of a plan: what, and its value."""


def always(args: Any) -> bool:
    """Return True: the method is the only one of its command."""
    return True


def no_lines(args: Any) -> Lines:
    """Return nothing: the method has no lines of its own."""
    return []


@dataclass(frozen=True)
class Method:
    """One training method.

    Attributes:
        name: key of the index.
        words: the command that runs it, such as `megatron dpo`. Methods may share a command.
        args_class: options of the command.
        line: one line of help for the command.
        training: name of its `Training` (`swiftlite/train/methods/training.py`).
        rules: name of a module with RULES and NOTES, which check the options (`swiftlite/rules`).
        describe: returns the lines of the plan that say what the run learns from, from its options.
        describe_files: returns the lines of the plan about files that only this method writes into --output_dir.
        applies: whether a run with these options of the command uses this method.
        lr: peak learning rate where the trunk learns and --lr is not given.
        sequences_per_sample: sequences that one sample adds to a micro-batch.
        imitates_rows: whether the model and its heads learn to write the rows. `export --draft_vocab` counts their
            tokens, and heads alone can learn from them.
        splits_long_rows: whether a row over --max_length may become several samples.
    """

    name: str
    words: str
    args_class: type[SftArgs]
    line: str
    training: str
    rules: str
    describe: Callable[[Any], Lines]
    describe_files: Callable[[Any], Lines] = no_lines
    applies: Callable[[Any], bool] = always
    lr: float = 1e-5
    sequences_per_sample: int = 1
    imitates_rows: bool = True
    splits_long_rows: bool = False

    def load_training(self) -> Any:
        """Import and return its `Training`; this loads torch."""
        return resolve_name(self.training)

    def load_rules(self) -> Any:
        """Import and return the module of its rules."""
        return resolve_name(self.rules)
