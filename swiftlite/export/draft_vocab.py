"""`export --draft_vocab`: heads that were trained to draft any token get a draft vocabulary."""

from dataclasses import replace
from pathlib import Path

from swiftlite.args.commands import ExportArgs, PtArgs, SftArgs, training_command
from swiftlite.args.config import from_config
from swiftlite.data.dataset import Data
from swiftlite.data.template import load_tokenizer
from swiftlite.errors import UserError
from swiftlite.heads import Heads
from swiftlite.json_file import read_json
from swiftlite.model.open import HfModel
from swiftlite.train.pt import make_document_encoder
from swiftlite.train.report import REPORT_FILE
from swiftlite.train.rows import load_data, make_conversation_encoder
from swiftlite.train.sft import choose_draft_vocab


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
        trained_with = from_config(_command_of(run / "args.json"), run / "args.json")
        data = _rows_of(trained_with, hf_model)
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


def _command_of(file: Path) -> type[SftArgs]:
    try:
        return training_command(read_json(file))
    except (OSError, ValueError, TypeError):
        return SftArgs  # reading its options says what is wrong with the file


def _rows_of(args: SftArgs, hf_model: HfModel) -> Data:
    tokenizer = load_tokenizer(hf_model.directory, args.trust_remote_code)
    vocab_size = hf_model.config["vocab_size"]
    if isinstance(args, PtArgs):
        return load_data(args, make_document_encoder(args, tokenizer, vocab_size), vocab_size)
    return load_data(args, make_conversation_encoder(args, tokenizer, vocab_size), vocab_size)


def _digest_of_run(run: Path) -> str | None:
    """The digest of the rows that the run learned from; None before it has ended."""
    try:
        return read_json(run / REPORT_FILE)["data_sha256"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
