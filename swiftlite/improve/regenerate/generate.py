"""Generate all missing answers with an engine: the first turns of all conversations, then the second ones, and so on.

The prompt of a turn contains the model's previous answers."""

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, replace
from functools import cache, partial

from tqdm import tqdm

from swiftlite.engines.engine import Completion, Engine, EngineConfig, Sampling, start_engine
from swiftlite.engines.prompts import PromptEncoder
from swiftlite.improve.regenerate.dialogue import Dialogues, RegeneratedTurn
from swiftlite.serve.answers import AnswersFile
from swiftlite.serve.infer import Answers, decode

Asked = tuple[int, Sequence[int]]
"""The index of a request in `Dialogues.requests`, and the tokens of its prompt."""


def names_of(dialogues: Dialogues) -> list[str]:
    """Return the name of each request in answers.jsonl, such as "rows.jsonl:7 turn 1 answer 2"."""
    names = []
    for request in dialogues.requests:
        source = dialogues.chats[request.row].source
        names.append(f"{source} turn {request.turn + 1} answer {request.answer + 1}")
    return names


def read_answers(file: AnswersFile, dialogues: Dialogues) -> None:
    """Add the answers in a file to `dialogues`, so that the conversations continue after these answers.

    Raises:
        UserError: a line is not an answer.
    """
    for place, answer in file.typed_records(RegeneratedTurn):
        dialogues.answers[dialogues.requests[place]] = answer


@contextmanager
def engine_on_demand(backend: str, config: EngineConfig) -> Iterator[Callable[[], Engine]]:
    """Yield a function that starts the engine at its first call and returns it; close the engine at the end."""
    with ExitStack() as stack:

        @cache
        def start() -> Engine:
            return stack.enter_context(closing(start_engine(backend, config)))

        yield start


def generate_all(
    engine: Callable[[], Engine],
    max_length: int,
    dialogues: Dialogues,
    file: AnswersFile,
    encoder: PromptEncoder,
    sampling: Sampling,
) -> Answers | None:
    """Generate the missing answers.

    Args:
        engine: starts the engine, or returns the running one.
        max_length: maximum length of a sequence in tokens. A conversation ends if its prompt leaves no room for an
            answer.
        file: file with the answers of `dialogues`; each new answer is appended when it is complete.
        sampling: sampling settings. The random numbers of an answer depend on the index of its request in
            `dialogues.requests`.

    Returns:
        The new answers in the order of their requests. None if no answer was missing; then no engine was started.
    """
    rounds = _rounds(dialogues, encoder, max_length)
    first = next(rounds, None)
    if first is None:
        return None
    names = names_of(dialogues)
    completions: list[Completion] = []
    num_tokens = 0
    running = engine()
    before = running.draft_counts()
    with tqdm(total=dialogues.num_open, desc="answers", unit="answer") as bar:
        start = time.perf_counter()

        def keep(asked: Sequence[Asked], number: int, completion: Completion) -> None:
            nonlocal num_tokens
            place, prompt = asked[number]
            text = decode(encoder.template.tokenizer, completion)
            answer = RegeneratedTurn(text, completion.finish_reason, len(prompt), len(completion.token_ids))
            file.add(place, {"source": names[place], **asdict(answer)})
            dialogues.answers[dialogues.requests[place]] = answer
            num_tokens += answer.completion_tokens
            bar.set_postfix_str(f"{num_tokens / (time.perf_counter() - start):.0f} tokens/s", refresh=False)
            bar.update()

        for asked in itertools.chain([first], rounds):
            bar.total = bar.n + dialogues.num_open
            numbers = tuple(place for place, _ in asked)
            prompts = [prompt for _, prompt in asked]
            completions += running.generate(prompts, replace(sampling, numbers=numbers), partial(keep, asked))
        return Answers(completions, time.perf_counter() - start, running.draft_counts().since(before))


def _rounds(dialogues: Dialogues, encoder: PromptEncoder, max_length: int) -> Iterator[list[Asked]]:
    """Yield, for each turn, the requests without an answer.

    The requests of a turn are computed after the previous turns have been answered.

    Args:
        max_length: maximum length of prompt and answer. A conversation without room for an answer ends.
    """
    for turn in range(dialogues.longest):
        asked = []
        for place, request in enumerate(dialogues.requests):
            if request.turn != turn or request in dialogues.answers:
                continue
            chat = dialogues.prompt(request)
            if chat is None:
                continue
            prompt = encoder(chat)
            if len(prompt) < max_length:
                asked.append((place, prompt))
        if asked:
            yield asked
