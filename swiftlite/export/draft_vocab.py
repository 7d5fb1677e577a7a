"""`export --draft_vocab`: heads that were trained to draft any token get a draft vocabulary."""

from dataclasses import replace
from pathlib import Path

from swiftlite.args.commands import ExportArgs, SftArgs
from swiftlite.args.config import from_config
from swiftlite.data.template import load_tokenizer
from swiftlite.errors import UserError
from swiftlite.heads import Heads
from swiftlite.json_file import read_json
from swiftlite.model.open import HfModel
from swiftlite.train.report import REPORT_FILE
from swiftlite.train.sft import choose_draft_vocab, load_data


def restrict_heads(args: ExportArgs, run: Path, hf_model: HfModel, heads: Heads) -> Heads:
    """The heads, to draft the --draft_vocab tokens that the answers of the run's training rows hold most often.

    The run's rows are read again; how much of them these tokens are is logged.

    Args:
        run: directory of the run.
        hf_model: its source.
        heads: of the result.

    Raises:
        UserError: the run's options or rows cannot be read any more.
    """
    if args.draft_vocab is None:
        return heads
    flag = f"--draft_vocab {args.draft_vocab} counts the answers that the run has learned from, and"
    try:
        trained_with = from_config(SftArgs, run / "args.json")
        tokenizer = load_tokenizer(hf_model.directory, trained_with.trust_remote_code)
        data = load_data(trained_with, tokenizer, hf_model)
    except UserError as error:
        hint = "export where the run was started, with its data where it was; or train with --draft_vocab"
        raise UserError(f"{flag} they cannot be read again: {error.problem}", hint) from None
    if _digest_of_run(run) not in (None, data.digest):
        raise UserError(
            f"{flag} its --dataset has other rows now", "put the run's data back, or train with --draft_vocab"
        )
    if trained_with.streaming or trained_with.sft_mock_dataset_config_json:
        raise UserError(f"{flag} it has not read them as a whole", "train with --draft_vocab, from files")
    asked = replace(
        trained_with, draft_vocab=args.draft_vocab, tensor_model_parallel_size=args.tensor_model_parallel_size
    )
    return choose_draft_vocab(asked, hf_model, heads, data)


def _digest_of_run(run: Path) -> str | None:
    """The digest of the rows that the run learned from; None before it has ended."""
    try:
        return read_json(run / REPORT_FILE)["data_sha256"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
