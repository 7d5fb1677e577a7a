"""Let the model write prompts: sample the user's turns of conversations.

If the prompt is only the chat template's text up to the start of a user turn, an instruct model continues it with a
plausible question (Magpie, Xu et al. 2024). In conversations of several turns the model also answers each question
before it writes the next one; these answers are only context, and `regenerate` answers all turns again.

Each message is appended to prompts.jsonl when it is complete. If the same command runs again, it generates only the
missing messages.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from tqdm import tqdm

from swiftlite.args.commands import RegenerateArgs
from swiftlite.base.log import logger
from swiftlite.data.rows.conversation import Conversation
from swiftlite.data.template import ChatTemplate, special_tokens_of
from swiftlite.data.user_turn import UserTurn
from swiftlite.engines.engine import Completion, Engine, Sampling
from swiftlite.engines.prompts import PromptEncoder
from swiftlite.families.resolved import HfModel
from swiftlite.improve.regenerate.self_dialogues import SelfDialogues, SelfPrompts, WrittenMessage
from swiftlite.improve.regenerate.steering import read_steering
from swiftlite.serve.answers import AnswersFile, describe
from swiftlite.serve.infer import decode, logs_how_to_resume

PROMPTS = "prompts.jsonl"
TEMPERATURE = 0.8
"""Temperature of user turns. Of the first drafts of heads that were fitted to 192 conversations of
SmolLM2-135M-Instruct, 24.4 % were accepted on scripts/results/prompts.jsonl; at 0.6 24.2 %; at temperature 1.0 and
top-p 0.95, where small models write more nonsense, 22.8 %. Top-p sorts all logits, which took vLLM on a CPU a third of
the time."""


class SelfPromptWriter:
    """Writes `--self_prompts` conversations of `--self_turns` user turns each.

    Args:
        template: chat template of `model`.
        sampling: sampling settings of the answers between user turns.

    Attributes:
        longest: maximum length, in tokens, of the prompt for the last answer of a conversation.

    Raises:
        UserError: --topics or --openings cannot be read, or the chat template does not support prompts for a user turn.
    """

    def __init__(self, args: RegenerateArgs, model: HfModel, template: ChatTemplate, sampling: Sampling):
        self._template = template
        self._encode_prompt = PromptEncoder(template)
        self._user_turn = UserTurn(template)
        steering = read_steering(args)
        special_token = special_tokens_of(template.tokenizer)
        self._dialogues = SelfDialogues(args.self_prompts, args.self_turns, steering, special_token)
        self._names = []
        for number in range(args.self_prompts):
            for position in range(self._dialogues.num_messages):
                self._names.append(f"prompt {number + 1} message {position + 1}")
        stops = (self._user_turn.end_token_id, *sampling.stop_token_ids)
        self._sampling = {
            "user": Sampling(args.max_prompt_tokens, TEMPERATURE, seed=args.seed, stop_token_ids=stops),
            "assistant": sampling,
        }
        # The first conversations with each topic and each opening; the next ones begin in the same ways.
        numbers = range(min(args.self_prompts, steering.period))
        # A template may refuse a system prompt: name the option that it comes from.
        origin = "--self_prompts"
        if args.system:
            origin = "--system"
        elif args.topics:
            origin = f"--topics {args.topics}"
        beginnings = [Conversation(self._dialogues.context(number), source=origin) for number in numbers]
        prompts = []
        for number, chat in zip(numbers, beginnings, strict=True):
            prompts.append(self._user_turn.encode_prompt(chat, steering.opening(number)))
        self._made_with = describe(args, model, beginnings, prompts, self._sampling["user"])
        self.longest = self._longest(args, beginnings)

    def _longest(self, args: RegenerateArgs, beginnings: Sequence[Conversation]) -> int:
        """Return the length in tokens of a conversation whose messages all have their maximum length.

        The text that the template adds around messages is measured with messages of one letter, after the opening.
        """
        lengths = []
        for number, chat in enumerate(beginnings):
            letters = []
            for position in range(self._dialogues.num_messages):
                text = f"{self._dialogues.opening(number, position)} a"
                letters.append({"role": self._dialogues.role(position), "content": text.strip()})
            with_letters = replace(chat, messages=[*chat.messages, *letters])
            lengths.append(len(self._encode_prompt(with_letters)))
        texts = args.self_turns * args.max_prompt_tokens + (args.self_turns - 1) * args.max_new_tokens
        return max(lengths) + texts

    def write(self, directory: Path, engine: Callable[[], Engine], max_length: int) -> SelfPrompts:
        """Generate the messages that are missing in prompts.jsonl, and return the usable conversations.

        Args:
            engine: starts the engine, or returns the running one.
            max_length: maximum length of a sequence in tokens; a conversation without room for a message ends.

        Raises:
            UserError: prompts.jsonl cannot be written or was written with other settings, or the run was interrupted.
        """
        with AnswersFile(directory / PROMPTS, self._names, self._made_with, "--output_dir") as file:
            for place, message in file.typed_records(WrittenMessage):
                self._dialogues.written[divmod(place, self._dialogues.num_messages)] = message
            if file.num_answers:
                logger.info("resuming: %s", file)
            with logs_how_to_resume(file):
                for position in range(self._dialogues.num_messages):
                    self._write_messages(position, file, engine, max_length)
            file.finish()
        return self._dialogues.select()

    def _write_messages(self, position: int, file: AnswersFile, engine: Callable[[], Engine], max_length: int) -> None:
        """Generate the next message of all conversations that have exactly `position` messages."""
        role = self._dialogues.role(position)
        asked = []
        prompts = []
        for number in self._dialogues.unfinished(position):
            prompt = self._encode(number, position)
            if len(prompt) < max_length:
                asked.append(number)
                prompts.append(prompt)
        if not asked:
            return
        places = [number * self._dialogues.num_messages + position for number in asked]
        with tqdm(total=len(asked), desc=f"{role} turns", unit="turn") as bar:

            def keep(index: int, completion: Completion) -> None:
                message = WrittenMessage(self._text(asked[index], position, completion), completion.finish_reason)
                file.add(places[index], {"source": self._names[places[index]], **asdict(message)})
                self._dialogues.written[asked[index], position] = message
                bar.update()

            engine().generate(prompts, replace(self._sampling[role], numbers=tuple(places)), keep)

    def _encode(self, number: int, position: int) -> Sequence[int]:
        chat = Conversation(self._dialogues.context(number), source=f"prompt {number + 1}")
        if self._dialogues.role(position) == "user":
            return self._user_turn.encode_prompt(chat, self._dialogues.opening(number, position))
        return self._encode_prompt(chat)

    def _text(self, number: int, position: int, completion: Completion) -> str:
        if self._dialogues.role(position) == "assistant":
            return decode(self._template.tokenizer, completion)
        ids = completion.token_ids
        if completion.finish_reason == "stop":
            ids = ids[:-1]
        opening = self._dialogues.opening(number, position)
        # Decoded after the opening, because tokenizers may drop the space in front of a text.
        before = self._template.tokenize(opening)
        return opening + self._template.decode([*before, *ids])[len(self._template.decode(before)) :]
