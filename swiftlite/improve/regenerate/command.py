"""Run `swiftlite regenerate`: generate answers, store them, and write a dataset with them.

The prompts come from --dataset or are written by the model (`self_prompts.py`). Each answer is appended to
answers.jsonl when it is complete, one line per turn (`serve/answers.py`). If the same command runs again, it generates
only the missing answers. dataset.jsonl and report.json depend only on the prompts, the options and the answers.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from swiftlite.args.commands import RegenerateArgs
from swiftlite.base.atomic import check_writable
from swiftlite.base.errors import UserError
from swiftlite.base.log import logger
from swiftlite.data.dataset import load_prompts
from swiftlite.data.rows.conversation import Conversation
from swiftlite.engines.interrupt import raises_at_sigterm
from swiftlite.engines.prompts import PromptEncoder, most_images, sequence_length
from swiftlite.engines.served_model import resolve_served
from swiftlite.improve.regenerate.dataset_rows import NumberedRow, gold_rows, make_rows
from swiftlite.improve.regenerate.dialogue import Dialogues, answered_turns, distinct, longest_prompt
from swiftlite.improve.regenerate.generate import engine_on_demand, generate_all, names_of, read_answers
from swiftlite.improve.regenerate.report import make_report, summary_line
from swiftlite.improve.regenerate.self_dialogues import SelfPrompts
from swiftlite.improve.regenerate.self_prompts import SelfPromptWriter
from swiftlite.improve.resumable import write_result
from swiftlite.serve.answers import AnswersFile, as_line, describe
from swiftlite.serve.infer import engine_config, logs_how_to_resume, read_for_asking, summary

ANSWERS, DATASET, REPORT = "answers.jsonl", "dataset.jsonl", "report.json"


def run(args: RegenerateArgs) -> None:
    """Generate the missing answers, and write the dataset.

    Raises:
        UserError: an option or file is invalid. This is detected before the engine starts where possible.
    """
    model = resolve_served(args.model)
    encoder, sampling = read_for_asking(args, model)
    chats: list[Conversation] = []
    if args.dataset:
        chats = load_prompts(
            args.dataset,
            system=args.system,
            seed=args.seed,
            max_bad_rows=args.max_bad_rows,
            no_images=encoder.no_images,
        )
        chats = [encoder.with_absolute_paths(chat) for chat in chats]
        if not _asking(chats):
            raise UserError("--dataset: no row has a prompt, the assistant only calls tools", "use other rows")
    gold = _gold(chats, args.gold_fraction)
    prompts = _last_prompts(encoder, chats, {})
    # The model's answers may be longer than those of the rows, in every turn.
    turns = max((len(answered_turns(chats[row])) for row in prompts), default=0)
    longest = max(map(len, prompts.values()), default=0) + turns * args.max_new_tokens
    writer = None
    if args.self_prompts:
        writer = SelfPromptWriter(args, model, encoder.template, sampling)
        longest = max(longest, writer.longest + args.max_new_tokens)
    length = sequence_length(model, longest, args.num_speculative_tokens, args.max_model_len)
    config = engine_config(args, model, length, most_images(prompts.values()))
    output_dir = Path(args.output_dir)
    _check_output_dir(output_dir)
    with raises_at_sigterm(), engine_on_demand(args.infer_backend, config) as engine:
        written = SelfPrompts()
        if writer:
            written = writer.write(output_dir, engine, length)
            logger.info("%s", written)
            chats += written.conversations
            if not _asking(chats):
                raise UserError(
                    "--self_prompts: no prompt is usable",
                    "increase --max_prompt_tokens or --max_model_len, or use --dataset",
                )
            prompts = _last_prompts(encoder, chats, prompts)
        dialogues = Dialogues({row: chats[row] for row in prompts}, args.num_answers, args.drop_truncated)
        asked = [longest_prompt(chat) for chat in dialogues.chats.values()]
        made_with = describe(args, model, asked, list(prompts.values()), sampling)
        with AnswersFile(output_dir / ANSWERS, names_of(dialogues), made_with, "--output_dir") as file:
            if file.num_answers and file.missing:
                logger.info("%s; generating the remaining ones", file)
            read_answers(file, dialogues)
            with logs_how_to_resume(file):
                result = generate_all(engine, length, dialogues, file, encoder, sampling)
            file.finish()
            if result:
                for line in summary(result):
                    logger.info("%s", line)
            _write_dataset(args, dialogues, chats, gold, written)


def _write_dataset(
    args: RegenerateArgs,
    dialogues: Dialogues,
    chats: Sequence[Conversation],
    gold: Sequence[NumberedRow],
    written: SelfPrompts,
) -> None:
    """Write dataset.jsonl and report.json from all answers."""
    rows = make_rows(dialogues, gold, args.gold_fraction, args.seed)
    report = make_report(dialogues, rows, chats, len(_asking(chats)), written)
    for line in summary_line(report, args):
        logger.info("%s", line)
    if not rows.regenerated:
        raise UserError("no answer was kept", "see the counts above")
    directory = Path(args.output_dir)
    write_result(directory / DATASET, b"".join(map(as_line, rows.in_order)), "; all answers are stored")
    write_result(directory / REPORT, json.dumps(report, indent=2).encode() + b"\n", "; all answers are stored")
    logger.info("wrote %s", directory / DATASET)


def _last_prompts(
    encoder: PromptEncoder, chats: Sequence[Conversation], known: Mapping[int, Sequence[int]]
) -> dict[int, Sequence[int]]:
    """Return the tokens of the prompt of each conversation's last turn, by row number.

    A row is left out if its last prompt equals the last prompt of an earlier row.

    Args:
        known: prompts that a previous call has returned; they are not tokenized again.
    """
    prompts = {}
    for row, chat in distinct(_asking(chats)).items():
        prompts[row] = known.get(row) or encoder(longest_prompt(chat))
    return prompts


def _asking(chats: Sequence[Conversation]) -> dict[int, Conversation]:
    """Return the rows with a prompt, by row number. Rows without a prompt are those in which the assistant only calls
    tools.
    """
    return {row: chat for row, chat in enumerate(chats) if answered_turns(chat)}


def _gold(chats: Sequence[Conversation], gold_fraction: float) -> list[NumberedRow]:
    """Return the original rows that can be mixed into the dataset; an empty list if `gold_fraction` is 0."""
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
