"""Conversations to tokens and labels, through the tokenizer's own chat template.

The whole conversation is rendered once. The characters of each assistant turn are found in that text by the template's
`{% generation %}` blocks where it has them, else by what the text gains when the turn is added; the text is tokenized
once, and tokens inside a trained turn become labels. What cannot be located exactly is refused, never guessed.
"""

import re
from typing import Any, Literal

import jinja2
import numpy as np
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from swiftlite.data.conversation import Conversation, Message, RowError
from swiftlite.data.sample import Sample, make_sample
from swiftlite.errors import UserError

LossScale = Literal["default", "last_round", "all"]
Tools = list[Any]  # JSON schemas; Any because transformers declares an invariant list of dicts or functions
Span = tuple[int, int]

MARK = "@@swiftlite marks this turn@@"
GENERATION_BLOCK = re.compile(r"\{%-?\s*generation\s*-?%\}")
OTHER_WAYS = '--loss_scale last_round trains the last answer alone; or give that turn "loss": false'


class ChatTemplate:
    """A tokenizer's chat template, for training (`encode`) and for asking (`encode_prompt`).

    Args:
        tokenizer: any transformers tokenizer; one without offsets (not "fast") is tokenized piece by piece.
        loss_scale: `default` trains every assistant turn, `last_round` those after the last user turn, `all` every
            token.
    Raises:
        UserError: the tokenizer has no chat template, or one that does not render a plain exchange.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, loss_scale: LossScale = "default"):
        self.tokenizer = tokenizer
        self.loss_scale = loss_scale
        self._added_tokens = set(tokenizer.added_tokens_decoder)
        self._tails: dict[str, list[int]] = {}
        if not tokenizer.chat_template:
            raise UserError(
                f"the tokenizer of {tokenizer.name_or_path or 'this model'} has no chat template",
                "put a chat_template.jinja into the model's directory, as its instruct version has",
            )
        found = self._find_turn_end()
        self._appends_eos = not found
        self._turn_end = found or str(tokenizer.eos_token or "")

    def encode_prompt(self, messages: list[Message], tools: Tools | None = None) -> list[int]:
        """Tokens to ask a model with: the start of what `encode` makes of the same turns, up to the answer.

        Raises:
            RowError: the template refuses these turns.
        """
        return self._ids(self._render(messages, tools, add_generation_prompt=True))

    def encode(self, conversation: Conversation) -> Sample:
        """Tokens, labels and weights of a conversation that ends with the assistant's turn.

        The end-of-turn token trains with its turn. Where a template ends turns by nothing, the tokenizer's eos token
        is put after the last one, or the model would never learn to stop.

        Raises:
            RowError: the template refuses or changes these turns, or a trained turn cannot be located exactly.
        """
        messages = conversation.messages
        text = self._render(messages, conversation.tools)
        if self._appends_eos:
            text = text.rstrip() + self._turn_end
        self._check_complete(conversation, text)

        weights = self._turn_weights(conversation)
        turns = [i for i, weight in weights.items() if weight != (1.0 if self.loss_scale == "all" else 0.0)]
        if self.loss_scale != "all" and not turns:
            raise RowError("messages", "nothing trains: the assistant's turns all have loss false")
        spans = [self._trim(text, span) for span in self._locate(conversation, turns, text)]
        if self.loss_scale != "all":
            for turn, (start, end) in zip(turns, spans, strict=True):
                _check_turn(messages[turn], f"messages[{turn}]", text[start:end])

        ids, ranges = self._tokenize(text, spans, [f"messages[{turn}]" for turn in turns])
        token_weights = np.full(len(ids), 1.0 if self.loss_scale == "all" else 0.0, np.float32)
        for turn, (first, last) in zip(turns, ranges, strict=True):
            token_weights[first:last] = weights[turn]
        return make_sample(ids, token_weights, conversation.source, conversation.channel)

    # Rendering

    def _render(self, messages: list[Message], tools: Tools | None, add_generation_prompt: bool = False) -> str:
        try:
            text = self.tokenizer.apply_chat_template(
                messages, tools=tools, tokenize=False, add_generation_prompt=add_generation_prompt
            )
        except (jinja2.TemplateError, TypeError) as error:  # TypeError: an expression of the template met an odd value
            raise RowError("messages", f"the chat template refuses them: {error}") from None
        assert isinstance(text, str)
        return text

    def _find_turn_end(self) -> str:
        """What the template writes after an assistant's last words, such as `<|im_end|>`, less white space."""
        try:
            text = self._render([{"role": "user", "content": "a"}, {"role": "assistant", "content": MARK}], None)
        except RowError as error:
            raise UserError(f"the chat template cannot render a plain exchange: {error.problem}") from None
        _, mark, end = text.partition(MARK)
        if not mark:
            raise UserError(
                "the chat template leaves out what the assistant says",
                "it may be meant for prompts alone; use the template of an instruct model",
            )
        return end.rstrip()

    def _check_complete(self, conversation: Conversation, text: str) -> None:
        """Templates pass over what they do not know in silence: a system turn, tools, calls."""
        for i, message in enumerate(conversation.messages):
            role = message["role"]
            if role in ("system", "user") and message["content"].strip() not in text:
                raise RowError(f"messages[{i}]", f"the chat template leaves out or changes this {role} turn")
            for call in message.get("tool_calls", ()):
                if call["function"]["name"] not in text:
                    raise RowError(f"messages[{i}].tool_calls", "the chat template does not render tool calls")
        for i, tool in enumerate(conversation.tools or ()):
            function = tool.get("function")
            name = (function if isinstance(function, dict) else tool).get("name")
            if isinstance(name, str) and name not in text:
                raise RowError(f"tools[{i}]", "the chat template does not render tools")

    # Which characters train

    def _turn_weights(self, conversation: Conversation) -> dict[int, float]:
        """Index of each assistant turn that may train, and its weight."""
        messages = conversation.messages
        given = conversation.weights or [1.0] * len(messages)
        first = 0
        if self.loss_scale == "last_round":
            first = max(i for i, message in enumerate(messages) if message["role"] == "user")
        return {i: given[i] for i in range(first, len(messages)) if messages[i]["role"] == "assistant"}

    def _locate(self, conversation: Conversation, turns: list[int], text: str) -> list[Span]:
        """Characters of the given turns in the text."""
        if not turns:
            return []
        messages, tools = conversation.messages, conversation.tools
        blocks = self._generation_blocks(messages, tools)
        assistants = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if len(blocks) == len(assistants):  # else a template marks only some kinds of turn
            return [blocks[assistants.index(turn)] for turn in turns]
        return [self._turn_span(messages, tools, turn, text) for turn in turns]

    def _generation_blocks(self, messages: list[Message], tools: Tools | None) -> list[Span]:
        # Below apply_chat_template, because its return_assistant_tokens_mask rounds blocks to whole tokens (a token
        # shared with the prompt would train) and gives up on a block that starts with a space (transformers 5.19).
        template = self.tokenizer.get_chat_template(None, tools)
        if not GENERATION_BLOCK.search(template):
            return []
        special_tokens: dict[str, Any] = self.tokenizer.special_tokens_map
        _, blocks = render_jinja_template(
            [messages], tools=tools, chat_template=template, return_assistant_tokens_mask=True, **special_tokens
        )
        return [(int(start), int(end)) for start, end in blocks[0]]

    def _turn_span(self, messages: list[Message], tools: Tools | None, turn: int, text: str) -> Span:
        """From the end of the prompt that would ask for this turn to where the rest of the conversation begins."""
        where = f"messages[{turn}]"
        prompt = self._render(messages[:turn], tools, add_generation_prompt=True)
        if not text.startswith(prompt):
            problem = "the chat template renders what comes before this turn otherwise than in the prompt for it"
            raise RowError(where, problem, OTHER_WAYS if turn < len(messages) - 1 else "")
        if turn == len(messages) - 1:
            return len(prompt), len(text)
        so_far = self._render(messages[: turn + 1], tools)
        if text.startswith(so_far):
            return len(prompt), len(so_far)
        # Qwen3 and its like write the last turn otherwise than earlier ones. The rest of the conversation is then found
        # by rendering it after a turn whose end is known.
        marked = [*messages[:turn], {"role": "assistant", "content": MARK}, *messages[turn + 1 :]]
        try:
            rest = self._render(marked, tools).partition(MARK)[2]
        except RowError:
            rest = ""
        end = len(text) - len(rest)
        if not rest or not text.endswith(rest) or end < len(prompt):
            raise RowError(where, "the end of this turn cannot be located in the rendered text", OTHER_WAYS)
        return len(prompt), end

    def _trim(self, text: str, span: Span) -> Span:
        """End a turn right after its end-of-turn token: nothing generated follows that."""
        start, end = span
        end = start + len(text[start:end].rstrip())
        if self._turn_end and not text.endswith(self._turn_end, start, end) and text.startswith(self._turn_end, end):
            end += len(self._turn_end)
        return start, end

    # Which tokens train

    def _tokenize(self, text: str, spans: list[Span], names: list[str]) -> tuple[list[int], list[Span]]:
        """Tokens of the text, and which of them each span is."""
        try:
            if self.tokenizer.is_fast and (whole := self._tokenize_whole(text, spans)):
                return whole
            return self._tokenize_pieces(text, spans, names)
        except UnicodeEncodeError:
            raise RowError("messages", "half of a surrogate pair (such as \\ud83d alone) is no character") from None

    def _tokenize_whole(self, text: str, spans: list[Span]) -> tuple[list[int], list[Span]] | None:
        """The text tokenized at once; None where some token lies across the border of a span."""
        encoding = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        ids = list(encoding["input_ids"])
        offsets = np.asarray(encoding["offset_mapping"], np.int64).reshape(-1, 2)
        ranges = []
        for start, end in spans:
            first, last = _border(offsets, start), _border(offsets, end)
            if first is None or last is None or not self._gives_back(ids, first, last, text[start:end]):
                return None
            # What stands before the span must be the tokens of that text alone, as the engine will see it. A special
            # token divides the text, so it is enough to look back to the last one.
            tail = first
            while tail > 0 and ids[tail] not in self._added_tokens:
                tail -= 1
            if self._tail_ids(text[offsets[tail, 0] if tail else 0 : start]) != ids[tail:first]:
                return None
            ranges.append((first, last))
        return ids, ranges

    def _tokenize_pieces(self, text: str, spans: list[Span], names: list[str]) -> tuple[list[int], list[Span]]:
        """The spans and what lies between them tokenized apart, as when a model writes its answer after a prompt."""
        ids: list[int] = []
        ranges = []
        done = 0
        for name, (start, end) in zip(names, spans, strict=True):
            ids += self._ids(text[done:start])
            first = len(ids)
            ids += self._ids(text[start:end])
            ranges.append((first, len(ids)))
            done = end
            if not self._gives_back(ids, first, len(ids), text[start:end]):
                raise RowError(name, "its tokens do not decode to the text of the turn; the tokenizer loses something")
        return ids + self._ids(text[done:]), ranges

    def _gives_back(self, ids: list[int], first: int, last: int, text: str) -> bool:
        decoded = self._decode(ids[first:last])
        if decoded == text:
            return True
        # SentencePiece decoders drop a leading space unless something stands before it.
        before = max(0, first - 1)
        if self._decode(ids[before:last]) == self._decode(ids[before:first]) + text:
            return True
        # Some tokenizers change text for good, such as Qwen2's, which composes accents: then the turn must at least be
        # what the tokenizer makes of this text alone.
        return decoded == self._decode(self._ids(text))

    def _tail_ids(self, text: str) -> list[int]:
        if text not in self._tails:
            if len(text) > 200 or len(self._tails) > 100:  # a prompt without special tokens: every one is new
                return self._ids(text)
            self._tails[text] = self._ids(text)
        return self._tails[text]

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def _decode(self, ids: list[int]) -> str:
        text = self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text


def _border(offsets: np.ndarray, position: int) -> int | None:
    """Index of the first token that starts at or after a position; None where a token lies across it."""
    starts, ends = offsets[:, 0], offsets[:, 1]
    if np.any((starts < position) & (ends > position)):
        return None
    return int(np.searchsorted(starts, position))


def _check_turn(message: Message, path: str, text: str) -> None:
    """A trained turn must hold all that the row says; templates are free to drop or rewrite it."""
    head, _, answer = message["content"].rpartition("</think>")
    thinking = message.get("reasoning_content") or head.strip().removeprefix("<think>")
    if thinking.strip() not in text:
        raise RowError(
            path,
            "the chat template leaves out the thinking of this turn, so the turn cannot train as it was written",
            OTHER_WAYS + "; or take the thinking out of it",
        )
    if answer.strip() not in text:
        raise RowError(path, "the chat template leaves out or changes the text of this turn")
