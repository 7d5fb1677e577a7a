"""Define `Method`, the description of a training method. It is available without importing torch.

Commands, rules, plans and pages look up methods in `index.py`. Only `doctor --plan` and the rules of a method refer to
a method by name. Functions and classes that require torch are strings "module:attribute", which are imported when a run
starts.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any

from swiftlite.args.commands import SftArgs

Lines = list[tuple[str, str]]
"""Lines of a plan: pairs of a label and a value."""


def always(args: Any) -> bool:
    """Return True, for example for a method that is the only method of its command."""
    return True


def unscaled(args: Any) -> float:
    """Return 1, for methods whose losses are those of the model's logits."""
    return 1.0


def once(args: Any) -> int:
    """Return 1, for methods in which a row of the dataset is one sample of a batch."""
    return 1


def no_lines(args: Any) -> Lines:
    """Return an empty list, for methods without additional lines in the plan."""
    return []


@dataclass(frozen=True)
class Method:
    """One training method.

    Attributes:
        name: key of the method in `index.METHODS`.
        words: the command that runs the method, such as `megatron dpo`. Methods may share a command.
        args_class: options of the command.
        line: one line of help for the command.
        training: name of the method's `Training` (`swiftlite/train/methods/training.py`).
        rules: name of a module with RULES and NOTES, which check the options (`swiftlite/rules`).
        describe: returns the plan's lines about the training data and the loss, from the options.
        describe_files: returns the plan's lines about files that only this method writes to --output_dir.
        applies: whether a run with these options of the command uses this method.
        lr: default peak learning rate if the trunk is trained.
        sequences_per_sample: number of sequences that one sample adds to a micro-batch.
        detaches_heads: whether the losses of the heads have no gradient with respect to the trunk.
        temperature: returns the number by which logits are divided, from the options.
        rows_per_prompt: returns the number of samples of batches that each row of the dataset gives in an epoch.
        evaluates: whether held-out rows are evaluated during training, from the options. Otherwise, they are only
            prompts for acceptance.json.
        evaluates_rows: whether held-out rows have a loss. Otherwise, they are prompts, whose completions are evaluated.
        evaluated: returns the names of the metrics of held-out rows, without those of the heads, from the options.
        imitates_rows: whether the model and its heads learn to generate the rows. Otherwise, `export --draft_vocab`
            does not count the rows' tokens, and heads alone cannot be trained on the rows.
        splits_long_rows: whether a row longer than --max_length can be split into several samples.
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
    detaches_heads: bool = False
    temperature: Callable[[Any], float] = unscaled
    rows_per_prompt: Callable[[Any], int] = once
    evaluates: Callable[[Any], bool] = always
    evaluates_rows: bool = True
    evaluated: Callable[[Any], Sequence[str]] = lambda args: ("loss",)
    imitates_rows: bool = True
    splits_long_rows: bool = False

    def load_training(self) -> Any:
        """Import and return the method's `Training`. This imports torch."""
        return resolve_name(self.training)

    def load_rules(self) -> Any:
        """Import and return the module of the method's rules."""
        return resolve_name(self.rules)
