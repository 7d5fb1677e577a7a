"""Run `swiftlite regenerate`: generate answers, store them, and write a dataset with them.

Answers are appended to answers.jsonl as they finish, one line per turn (`serve/answers.py`); running the same command
again continues after them. dataset.jsonl and report.json depend only on the rows, the options and these answers.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from swiftlite.args.commands import RegenerateArgs
from swiftlite.atomic import atomic_write, check_writable
from swiftlite.data.dataset import load_prompts
from swiftlite.data.rows.conversation import Conversation
from swiftlite.engines.interrupt import raises_at_sigterm
from swiftlite.engines.prompts import encode_prompt, sequence_length
from swiftlite.engines.served_model import resolve_served
from swiftlite.errors import UserError
from swiftlite.log import logger
from swiftlite.regenerate.dataset_rows import NumberedRow, gold_rows, make_rows
from swiftlite.regenerate.dialogue import Dialogues, answered_turns, distinct, longest_prompt
from swiftlite.regenerate.generate import generate_all, names_of, read_answers
from swiftlite.regenerate.report import make_report, summary_line
from swiftlite.serve.answers import AnswersFile, as_line, describe
from swiftlite.serve.infer import engine_config, logs_how_to_resume, read_for_asking, summary

ANSWERS, DATASET, REPORT = "answers.jsonl", "dataset.jsonl", "report.json"


def run(args: RegenerateArgs) -> None:
    """Regenerate.

    Raises:
        UserError: an option or file is invalid; before the engine starts if possible.
    """
    model = resolve_served(args.model)
    template, sampling = read_for_asking(args, model)
    chats = load_prompts(args.dataset, system=args.system, seed=args.seed, max_bad_rows=args.max_bad_rows)
    asking = _asking(chats)
    gold = _gold(chats, args.gold_fraction)
    dialogues = Dialogues(distinct(asking), args.num_answers, args.drop_truncated)

    longest = [longest_prompt(chat) for chat in dialogues.chats.values()]
    prompts = [encode_prompt(template, chat) for chat in longest]
    # In every turn, the model's answer can be longer than that of the row.
    longest_sequence = max(map(len, prompts)) + dialogues.longest * args.max_new_tokens
    length = sequence_length(model, longest_sequence, args.num_speculative_tokens, args.max_model_len)
    config = engine_config(args, model, length)
    made_with = describe(args, model, longest, prompts, sampling)
    output_dir = Path(args.output_dir)
    _check_output_dir(output_dir)
    with (
        raises_at_sigterm(),
        AnswersFile(output_dir / ANSWERS, names_of(dialogues), made_with, "--output_dir") as file,
    ):
        if file.num_answers and file.missing:
            logger.info("%s; generating the remaining ones", file)
        read_answers(file, dialogues)
        with logs_how_to_resume(file):
            result = generate_all(args.infer_backend, config, dialogues, file, template, sampling)
        file.finish()
        if result:
            for line in summary(result):
                logger.info("%s", line)
        rows = make_rows(dialogues, gold, args.gold_fraction, args.seed)
        report = make_report(dialogues, rows, chats, len(asking))
        for line in summary_line(report, args):
            logger.info("%s", line)
        if not rows.regenerated:
            raise UserError("--dataset: no answer was kept", "see the counts above")
        _write(output_dir / DATASET, b"".join(map(as_line, rows.in_order)))
        _write(output_dir / REPORT, json.dumps(report, indent=2).encode() + b"\n")
    logger.info("wrote %s", output_dir / DATASET)


def _asking(chats: Sequence[Conversation]) -> dict[int, Conversation]:
    """Return the rows with a prompt, by row number; in all other rows the assistant only calls tools."""
    asking = {row: chat for row, chat in enumerate(chats) if answered_turns(chat)}
    if not asking:
        raise UserError("--dataset: no row has a prompt, the assistant only calls tools", "use other rows")
    return asking


def _gold(chats: Sequence[Conversation], gold_fraction: float) -> list[NumberedRow]:
    """Return the original rows that can be mixed in."""
    if not gold_fraction:
        return []
    gold = gold_rows(chats)
    if not gold:
        problem = f"--gold_fraction {gold_fraction} requires rows of --dataset that end with an answer"
        raise UserError(problem, "remove --gold_fraction")
    return gold


def _check_output_dir(directory: Path) -> None:
    if (directory / "args.json").exists():
        raise UserError(f"--output_dir {directory} contains a training run", "use another directory")
    check_writable("--output_dir", directory)
    answers = directory / ANSWERS
    has_answers = answers.exists() and (not answers.is_file() or answers.stat().st_size > 0)
    for name in (DATASET, REPORT):
        if (directory / name).exists() and not has_answers:
            problem = f"--output_dir {directory} contains {name}, but not its {ANSWERS}"
            raise UserError(problem, "use another directory")


def _write(path: Path, content: bytes) -> None:
    try:
        atomic_write(path, content)
    except OSError as error:
        problem = f"--output_dir: {path} cannot be written: {error.strerror}"
        raise UserError(problem, "free disk space and run the same command again; all answers are stored") from None
