"""Add a draft vocabulary to heads that were trained with the whole vocabulary (`export --draft_vocab`)."""

from dataclasses import replace
from pathlib import Path

from swiftlite.args.commands import ExportArgs, SftArgs
from swiftlite.args.config import from_config
from swiftlite.base.errors import UserError
from swiftlite.base.heads import Heads
from swiftlite.base.json_file import read_json
from swiftlite.data import draft_vocab
from swiftlite.data.dataset import Data
from swiftlite.data.template import load_tokenizer
from swiftlite.families.resolved import HfModel
from swiftlite.methods.index import command_of_run
from swiftlite.train.methods.training import training_of
from swiftlite.train.metrics.run_report import REPORT_FILE


def restrict_heads(args: ExportArgs, run: Path, hf_model: HfModel, heads: Heads) -> Heads:
    """Return the heads with a draft vocabulary: the most frequent tokens in the answers of the run's training rows.

    The run's rows are read again. The share of labels that these tokens cover is logged.

    Args:
        run: directory of the run.
        hf_model: source model of the run.
        heads: heads of the result.

    Raises:
        UserError: the run's options or rows cannot be read.
    """
    if args.draft_vocab is None:
        return heads
    flag = f"--draft_vocab {args.draft_vocab} requires the training rows of the run"
    try:
        trained_with = _options_of(run / "args.json")
        data = _rows_of(trained_with, hf_model)
    except UserError as error:
        hint = "export in the directory where the run was started, with the same data; or train with --draft_vocab"
        raise UserError(f"{flag}, which cannot be read: {error.problem}", hint) from None
    if _digest_of_run(run) not in (None, data.digest):
        raise UserError(f"{flag}, but its --dataset has changed", "restore the run's data, or train with --draft_vocab")
    if trained_with.streaming or trained_with.sft_mock_dataset_config_json:
        raise UserError(f"{flag} as files, without --streaming", "train with --draft_vocab, from files")
    vocab_size = hf_model.config["vocab_size"]
    chosen = draft_vocab.choose_from(data, args.draft_vocab, vocab_size, args.tensor_model_parallel_size)
    if not heads.layers:
        return heads
    return replace(heads, draft_vocab=chosen)


def _options_of(file: Path) -> SftArgs:
    """Return the options of a run, from its args.json.

    Raises:
        UserError: the file cannot be read.
    """
    try:
        args_class = command_of_run(read_json(file)).args_class
    except (OSError, ValueError, TypeError):
        args_class = SftArgs  # reading the options with this class reports the problem
    return from_config(args_class, file)


def _rows_of(args: SftArgs, hf_model: HfModel) -> Data:
    training = training_of(args)
    tokenizer = load_tokenizer(hf_model.directory, args.trust_remote_code, args.chat_template_kwargs)
    vocab_size = hf_model.config["vocab_size"]
    return training.load(args, training.encoder(args, tokenizer, hf_model), vocab_size)


def _digest_of_run(run: Path) -> str | None:
    """Return the digest of the run's training rows; None for an unfinished run."""
    try:
        return read_json(run / REPORT_FILE)["data_sha256"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
