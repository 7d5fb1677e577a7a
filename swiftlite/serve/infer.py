"""Run `swiftlite infer`: answer prompts from files or chat lines from stdin, and count accepted drafts.

Each answer is written to --result_path when it is complete (`answers.py`), or to stdout. All other output is written to
stderr.
"""

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from swiftlite.acceptance.counts import DraftCounts
from swiftlite.acceptance.report import add_engine_acceptance, read_acceptance
from swiftlite.args.commands import GenerationCommand, InferArgs
from swiftlite.args.data_file import split_sample
from swiftlite.args.serving_fields import WITH_HEADS
from swiftlite.base.atomic import atomic_write
from swiftlite.base.errors import UserError
from swiftlite.base.log import logger
from swiftlite.data.dataset import load_prompts
from swiftlite.data.rows.conversation import Conversation
from swiftlite.data.template import load_tokenizer, stop_token_ids
from swiftlite.engines.engine import Completion, EngineConfig, OnAnswer, Sampling, filters_of, start_engine
from swiftlite.engines.index import ENGINES
from swiftlite.engines.interrupt import Terminated, raises_at_sigterm
from swiftlite.engines.ngram import ngrams_of
from swiftlite.engines.prompts import PromptEncoder, most_images, needed_length
from swiftlite.engines.served_model import log_untrained_drafts, resolve_served
from swiftlite.engines.stop_strings import stop_strings
from swiftlite.families.resolved import HfModel
from swiftlite.serve.adapters import with_adapters
from swiftlite.serve.answers import AnswersFile, as_line, describe

# Maximum length of a chat without --max_model_len; engines reserve memory for the longest sequence.
CHAT_LENGTH = 8192


@dataclass(frozen=True)
class Answers:
    """One engine's answers to all prompts.

    Attributes:
        completions: one for each prompt, in order.
        seconds: time of generation, excluding the start of the engine.
        counts: draft counts of these answers.
    """

    completions: list[Completion]
    seconds: float
    counts: DraftCounts

    @property
    def num_tokens(self) -> int:
        return sum(len(completion.token_ids) for completion in self.completions)

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds


def run(args: InferArgs) -> None:
    """Answer the prompts, and write or print the answers.

    Raises:
        UserError: an option or file is invalid. This is detected before the engine starts where possible.
    """
    _check_result_path(args)
    if args.acceptance_json:
        read_acceptance(Path(args.acceptance_json))
    base = resolve_served(args.model)
    with raises_at_sigterm(), with_adapters(base, args.adapters) as model:
        encoder, sampling = read_for_asking(args, model)
        if args.val_dataset:
            _answer_files(args, model, encoder, sampling)
        else:
            _chat(args, model, encoder, sampling)


def read_for_asking(args: GenerationCommand, model: HfModel) -> tuple[PromptEncoder, Sampling]:
    """Return the encoder of prompts and the sampling settings of a model."""
    tokenizer = load_tokenizer(model.directory, args.trust_remote_code, args.chat_template_kwargs)
    encoder = PromptEncoder.open(args, model, tokenizer, ENGINES[args.infer_backend])
    stops = stop_token_ids(encoder.template, model.directory)
    if args.speculative in WITH_HEADS:
        log_untrained_drafts(model, args.num_speculative_tokens)
    sampling = Sampling(
        args.max_new_tokens,
        args.temperature,
        seed=args.seed,
        stop_token_ids=stops,
        draft_confidence=args.draft_confidence or 0.0,
        stop_strings=stop_strings(args.stop_strings, tokenizer),
        **filters_of(args),
    )
    return encoder, sampling


def _answer_files(args: InferArgs, model: HfModel, encoder: PromptEncoder, sampling: Sampling) -> None:
    chats = load_prompts(args.val_dataset, system=args.system, seed=args.seed, no_images=encoder.no_images)
    asked = [encoder.with_absolute_paths(chat.prompt()) for chat in chats]
    prompts = [encoder(chat) for chat in asked]
    length = needed_length(model, asked, prompts, args.max_new_tokens, args.num_speculative_tokens, args.max_model_len)
    config = engine_config(args, model, length, most_images(prompts))

    def record(place: int, completion: Completion) -> dict[str, Any]:
        return _record(asked[place], len(prompts[place]), completion, encoder.template.tokenizer)

    if args.result_path is None:
        result, plain = _answer(args, config, prompts, sampling)
        for place, completion in enumerate(result.completions):
            sys.stdout.buffer.write(as_line(record(place, completion)))
        sys.stdout.buffer.flush()
        _report(args, result, plain)
        return
    made_with = describe(args, model, asked, prompts, sampling)
    with AnswersFile(Path(args.result_path), [chat.source for chat in asked], made_with) as file:
        missing = file.missing
        if len(missing) < len(prompts):
            logger.info("%s; generating the remaining ones", file)
        if missing:
            with logs_how_to_resume(file):
                result, plain = _answer(
                    args,
                    config,
                    [prompts[place] for place in missing],
                    replace(sampling, numbers=tuple(missing)),
                    lambda number, completion: file.add(missing[number], record(missing[number], completion)),
                )
            _report(args, result, plain)
        file.finish()
        logger.info("%s", file)


def _answer(
    args: InferArgs,
    config: EngineConfig,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    on_answer: OnAnswer | None = None,
) -> tuple[Answers, Answers | None]:
    """Return the answers and, with --compare, the answers without speculation; else None.

    With --compare, the answers without speculation are generated first.
    """
    plain = None
    if args.compare:
        logger.info("generating without speculation")
        without_drafts = replace(config, num_speculative_tokens=0, speculative_config=None)
        plain = answer(args.infer_backend, without_drafts, prompts, sampling)
    return answer(args.infer_backend, config, prompts, sampling, on_answer), plain


def _report(args: InferArgs, result: Answers, plain: Answers | None) -> None:
    if args.acceptance_json:
        prompts = len(result.completions)
        add_engine_acceptance(Path(args.acceptance_json), args.infer_backend, prompts, result.counts, args.temperature)
    for line in summary(result, plain, args.temperature):
        logger.info("%s", line)


@contextmanager
def logs_how_to_resume(file: object) -> Iterator[None]:
    """If an exception ends the block, log what is finished and how to resume.

    Args:
        file: its text says what is finished, as that of `AnswersFile`.

    Raises:
        UserError: the process received SIGINT or SIGTERM; the error has the exit code of the signal.
    """
    hint = "run the same command again to resume"
    try:
        yield
    except KeyboardInterrupt:
        raise UserError(f"interrupted; {file}", hint, 130) from None
    except Terminated as end:
        raise UserError(f"interrupted; {file}", hint, int(end.code or 1)) from None
    except UserError:
        raise
    except Exception:
        logger.warning("%s; %s", file, hint)
        raise


def answer(
    backend: str,
    config: EngineConfig,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    on_answer: OnAnswer | None = None,
) -> Answers:
    """Start an engine, warm it up, complete the prompts, and stop it.

    Args:
        on_answer: called with each finished answer.
    """
    engine = start_engine(backend, config)
    try:
        if engine.num_speculative_tokens:
            logger.info("drafting up to %d tokens per step", engine.num_speculative_tokens)
        # The first pass allocates memory and compiles kernels, which is not measured.
        engine.generate(prompts[:1], Sampling(2, stop_token_ids=sampling.stop_token_ids))
        before = engine.draft_counts()
        start = time.perf_counter()
        with tqdm(total=len(prompts), desc="answers") as bar:

            def count(place: int, completion: Completion) -> None:
                if on_answer:
                    on_answer(place, completion)
                bar.update()

            completions = engine.generate(prompts, sampling, count)
        seconds = time.perf_counter() - start
        return Answers(completions, seconds, engine.draft_counts().since(before))
    finally:
        engine.close()


def summary(result: Answers, plain: Answers | None = None, temperature: float = 0.0) -> list[str]:
    """Return the lines printed at the end of a run.

    Args:
        plain: answers to the same prompts without speculation, with --compare.
    """
    lines = [
        f"{len(result.completions)} answers, {result.num_tokens} tokens, {result.seconds:.1f} s, "
        f"{result.tokens_per_second:.1f} tokens/s"
    ]
    counts = result.counts
    if counts.drafts:
        per_position = ", ".join(f"{count / counts.drafts:.1%}" for count in counts.accepted_per_position)
        lines.append(
            f"drafted {counts.drafted}, accepted {counts.accepted} ({counts.accepted / counts.drafted:.1%}); "
            f"by position {per_position}; mean accepted length {1 + counts.accepted / counts.drafts:.2f}"
        )
    if ngram := counts.ngram.drafts:
        of_heads = counts.drafts - ngram
        accepted = counts.accepted - counts.ngram.accepted
        lines.append(
            f"steps drafted from the text {ngram}, with {counts.ngram.accepted / ngram:.2f} accepted drafts each; "
            f"by the heads {of_heads}, with {accepted / max(of_heads, 1):.2f}"
        )
    if plain is not None:
        ratio = result.tokens_per_second / plain.tokens_per_second
        line = f"without speculation {plain.tokens_per_second:.1f} tokens/s: speculation is {ratio:.2f}x as fast"
        if counts.drafts and ratio > 1 + counts.accepted / counts.drafts:
            line += ", which exceeds its tokens per step: the load of the machine changed"
        lines.append(line)
        lines.append(_equality(result, plain, temperature))
    return lines


def _equality(result: Answers, plain: Answers, temperature: float) -> str:
    if temperature:
        return "answers are sampled from the same distribution and not compared"
    same = sum(a.token_ids == b.token_ids for a, b in zip(result.completions, plain.completions, strict=True))
    total = len(plain.completions)
    line = f"answers equal: {same} of {total}"
    if same < total:
        line += f"; {total - same} differ"
    return line


def _chat(args: InferArgs, model: HfModel, encoder: PromptEncoder, sampling: Sampling) -> None:
    """Answer the lines of stdin until its end. Each line is a user turn of one conversation."""
    limit = args.max_model_len or min(model.config["max_position_embeddings"], CHAT_LENGTH)
    engine = start_engine(args.infer_backend, engine_config(args, model, limit))
    messages: list[dict[str, Any]] = []
    if args.system:
        messages.append({"role": "system", "content": args.system})
    try:
        while line := _ask():
            if not line.strip():
                continue
            messages.append({"role": "user", "content": line.strip()})
            prompt = encoder(Conversation(messages, source="stdin"))
            (completion,) = engine.generate([prompt], sampling)
            text = decode(encoder.template.tokenizer, completion)
            messages.append({"role": "assistant", "content": text})
            if args.result_path:
                atomic_write(Path(args.result_path), as_line({"messages": messages}))
            print(text, flush=True)
        counts = engine.draft_counts()
    finally:
        engine.close()
    if counts.drafts:
        logger.info("drafted %d, accepted %d", counts.drafted, counts.accepted)


def _ask() -> str:
    if sys.stdin.isatty():
        print("> ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline()


def engine_config(args: GenerationCommand, model: HfModel, max_model_len: int, max_images: int = 0) -> EngineConfig:
    """Return the engine's configuration as specified by the options.

    Args:
        max_model_len: maximum length of prompt and answer.
        max_images: maximum number of images of a prompt.
    """
    info = ENGINES[args.infer_backend]
    num_tokens: int | None = 0
    if args.speculative != "none":
        num_tokens = args.num_speculative_tokens
    return EngineConfig(
        model=model,
        torch_dtype=args.torch_dtype,
        trust_remote_code=args.trust_remote_code,
        num_speculative_tokens=num_tokens,
        max_model_len=max_model_len,
        max_batch_size=args.max_batch_size,
        in_this_process=True,
        engine_kwargs=info.engine_kwargs(args),
        speculative_config=info.speculative_config(args),
        max_images=max_images,
        draws_drafts=args.temperature > 0,
        ngrams=ngrams_of(args.speculative),
        heads_draft=args.speculative in WITH_HEADS,
    )


def decode(tokenizer: PreTrainedTokenizerBase, completion: Completion) -> str:
    """Return the text of an answer, without its stop token."""
    text = tokenizer.decode(completion.token_ids, skip_special_tokens=True)
    assert isinstance(text, str)
    return text


def _record(chat: Conversation, prompt_tokens: int, completion: Completion, tokenizer: PreTrainedTokenizerBase) -> dict:
    """Return an answer for --result_path: a row for training (`messages`, `tools`, `channel`) and its token counts."""
    response = decode(tokenizer, completion)
    return chat.with_answer(response).as_row() | {
        "response": response,
        "source": chat.source,
        "finish_reason": completion.finish_reason,
        "prompt_tokens": prompt_tokens,
        "completion_tokens": len(completion.token_ids),
    }


def _check_result_path(args: InferArgs) -> None:
    if args.result_path is None:
        return
    path = Path(args.result_path)
    if path.is_dir():
        raise UserError(f"--result_path {path} is a directory", f"give a file: --result_path {path / 'answers.jsonl'}")
    if not path.parent.is_dir():
        problem = f"--result_path {path}: the directory {path.parent} does not exist"
        raise UserError(problem, "create it, or use another path")
    if path.resolve() in {Path(split_sample(name)[0]).resolve() for name in args.val_dataset}:
        raise UserError(f"--result_path {path} is a file of --val_dataset", "use another file for the answers")
    if not args.val_dataset:
        _check_chat_path(path)


def _check_chat_path(path: Path) -> None:
    """Check that the file for a chat is writable, and new or empty, because it is rewritten after each turn."""
    if path.exists() and (not path.is_file() or path.stat().st_size):
        raise UserError(f"--result_path {path} is not empty", "use another file, or delete it")
    try:
        atomic_write(path, b"")
        path.unlink()
    except OSError as error:
        raise UserError(f"--result_path {path} cannot be written: {error.strerror}", "use another file") from None
