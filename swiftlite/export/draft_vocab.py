"""`export --draft_vocab`: heads that were trained to draft any token get a draft vocabulary."""

from dataclasses import replace
from pathlib import Path

from swiftlite.args.commands import ExportArgs, SftArgs
from swiftlite.args.config import from_config
from swiftlite.data import draft_vocab
from swiftlite.data.dataset import Data
from swiftlite.data.template import load_tokenizer
from swiftlite.errors import UserError
from swiftlite.families.resolved import HfModel
from swiftlite.heads import Heads
from swiftlite.json_file import read_json
from swiftlite.methods.index import command_of_run
from swiftlite.train.methods.training import training_of
from swiftlite.train.metrics.run_report import REPORT_FILE


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
        trained_with = _options_of(run / "args.json")
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
    vocab_size = hf_model.config["vocab_size"]
    chosen = draft_vocab.choose_from(data, args.draft_vocab, vocab_size, args.tensor_model_parallel_size)
    return replace(heads, draft_vocab=chosen) if heads.layers else heads


def _options_of(file: Path) -> SftArgs:
    """Return the options of a run, from its args.json.

    Raises:
        UserError: it cannot be read.
    """
    try:
        args_class = command_of_run(read_json(file)).args_class
    except (OSError, ValueError, TypeError):
        args_class = SftArgs  # reading its options says what is wrong with the file
    return from_config(args_class, file)


def _rows_of(args: SftArgs, hf_model: HfModel) -> Data:
    training = training_of(args)
    tokenizer = load_tokenizer(hf_model.directory, args.trust_remote_code)
    vocab_size = hf_model.config["vocab_size"]
    return training.load(args, training.make_encoder(args, tokenizer, vocab_size), vocab_size)


def _digest_of_run(run: Path) -> str | None:
    """The digest of the rows that the run learned from; None before it has ended."""
    try:
        return read_json(run / REPORT_FILE)["data_sha256"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
