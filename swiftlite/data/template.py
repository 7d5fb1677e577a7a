"""Convert conversations to tokens and labels with the tokenizer's chat template.

The whole conversation is rendered once. Each assistant turn is located in the text by the template's `{% generation %}`
blocks. Without these blocks, a turn is the text between two other parts of the rendered conversation. The first part is
the messages before the turn, rendered with the generation prompt; the second part is everything after the turn. The
text is tokenized once, and the tokens of trained turns become labels. If a turn cannot be located exactly, an error is
raised.
"""

import bisect
import itertools
import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from swiftlite.base.errors import UserError, clip
from swiftlite.base.json_file import read_json
from swiftlite.base.log import logger
from swiftlite.data.image_sizes import ImageSizes
from swiftlite.data.rows.conversation import HALF_A_PAIR, SURROGATE, Conversation, Message, RowError
from swiftlite.data.rows.image_parts import texts_of
from swiftlite.data.sample import Sample, make_sample
from swiftlite.data.sandbox import check_length, running_the_template
from swiftlite.data.template_kwargs import with_kwargs

LossScale = Literal["default", "last_round", "all"]
Tools = list[Any]  # JSON schemas; Any because transformers declares an invariant list of dicts or functions
Span = tuple[int, int]

KNOWN_TAILS = 64
"""Maximum number of texts in the cache of tokenized answer headers. If a template has no special tokens, every row has
a different header."""
MARK = "@@swiftlite marks this turn@@"
GENERATION_BLOCK = re.compile(r"\{%-?\s*generation\s*-?%\}")
OTHER_WAYS = 'use --loss_scale last_round to train on the last answer only, or give that turn "loss": false'


def load_tokenizer(
    hf_dir: str | Path, trust_remote_code: bool = False, chat_template_kwargs: Mapping[str, Any] | None = None
) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model's directory.

    Args:
        chat_template_kwargs: values of variables of its chat template.

    Raises:
        UserError: the tokenizer is missing (transformers would create an empty one) or cannot be read.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(hf_dir, trust_remote_code=trust_remote_code)
    except Exception as error:  # many kinds, including plain Exception from the Rust library
        if str(error) == _config_problem(hf_dir, trust_remote_code):
            problem = " ".join(str(error).split())
            path = Path(hf_dir) / "config.json"
            raise UserError(f"{path}: transformers rejects it: {problem}", "copy it from the model's source") from error
        raise UserError(f"the tokenizer in {hf_dir} cannot be read: {error}", "copy its files again") from error
    names = {"tokenizer.json", *tokenizer.vocab_files_names.values()}
    if not any((Path(hf_dir) / name).is_file() for name in names):
        raise UserError(
            f"{hf_dir} has no tokenizer: none of {', '.join(sorted(names))} exists",
            "copy the tokenizer's files from the base model",
        )
    if chat_template_kwargs and tokenizer.chat_template:
        _set_variables(tokenizer, chat_template_kwargs)
    return tokenizer


def pad_token_of(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the token that pads the rows of a reward model: as in TRL the tokenizer's pad token, else its eos token.

    Raises:
        UserError: the tokenizer has neither.
    """
    for token_id in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if isinstance(token_id, int):
            return token_id
    raise UserError("the tokenizer has no pad token and no eos token", "set pad_token in tokenizer_config.json")


def _set_variables(tokenizer: PreTrainedTokenizerBase, kwargs: Mapping[str, Any]) -> None:
    """Set variables of a tokenizer's chat template. Some tokenizers have several templates, by name."""
    given = tokenizer.chat_template
    templates = given if isinstance(given, dict) else {"default": given}
    for name in kwargs:
        if not any(re.search(rf"\b{name}\b", template) for template in templates.values()):
            logger.warning("--chat_template_kwargs: the chat template does not use %s", name)
    changed = {name: with_kwargs(template, kwargs) for name, template in templates.items()}
    tokenizer.chat_template = changed if isinstance(given, dict) else changed["default"]


def _config_problem(hf_dir: str | Path, trust_remote_code: bool) -> str:
    """Return the error that transformers raises for config.json, which it reads before a tokenizer; empty without an
    error."""
    try:
        AutoConfig.from_pretrained(hf_dir, trust_remote_code=trust_remote_code)
    except Exception as error:  # as above
        return str(error)
    return ""


def special_tokens_of(tokenizer: PreTrainedTokenizerBase) -> re.Pattern[str]:
    """Return a pattern that finds special tokens in a text."""
    special = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    return re.compile("|".join(map(re.escape, special)) or "(?!)")


def check_ids(ids: list[int], tokenizer: PreTrainedTokenizerBase, vocab_size: int | None, field: str) -> None:
    """Check that the model has an embedding for every token.

    Args:
        vocab_size: number of embeddings; None disables the check.
        field: field of the row that is named in the error.

    Raises:
        RowError: a token has no embedding.
    """
    largest = max(ids, default=0)
    if vocab_size is not None and largest >= vocab_size:
        token = tokenizer.convert_ids_to_tokens(largest)
        raise RowError(
            field,
            f"token {largest} ({token!r}) is beyond vocab_size {vocab_size} of config.json; "
            f"the tokenizer has {len(tokenizer)} tokens",
            "copy the tokenizer's files that belong to this model",
        )


class ChatTemplate:
    """A tokenizer's chat template, for training (`encode`) and for prompts (`encode_prompt`).

    Args:
        tokenizer: any transformers tokenizer. If it does not return offsets (not "fast"), the pieces of a text are
            tokenized separately.
        loss_scale: `default` trains every assistant turn, `last_round` only the assistant turns after the last user
            turn, `all` every token.
        vocab_size: number of tokens with an embedding; None disables the check.
        images: sizes and tokens of images; None for models without images.

    Raises:
        UserError: the tokenizer has no chat template, or the template cannot render a user and an assistant turn.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        loss_scale: LossScale = "default",
        vocab_size: int | None = None,
        images: ImageSizes | None = None,
    ):
        self.tokenizer = tokenizer
        self.loss_scale: LossScale = loss_scale
        self._vocab_size = vocab_size
        self._images = images
        self._special_tokens = special_tokens_of(tokenizer)
        self._added_tokens = set(tokenizer.added_tokens_decoder)
        self._known_tails: dict[str, list[int]] = {}
        if not tokenizer.chat_template:
            raise UserError(
                f"the tokenizer of {tokenizer.name_or_path or 'this model'} has no chat template",
                "copy chat_template.jinja of the instruct model into the model's directory",
            )
        found = self._find_turn_end()
        self._appends_eos = not found
        self.turn_end = found or str(tokenizer.eos_token or "")

    def encode_prompt(
        self, messages: list[Message], tools: Tools | None = None, image_lengths: Sequence[int] = ()
    ) -> list[int]:
        """Return the tokens of a prompt. They equal the tokens that `encode` returns before the answer.

        Tokens can differ only in a template without special tokens, where an earlier answer can share a token with the
        surrounding text.

        Args:
            image_lengths: for each image of the turns, its number of placeholder tokens.

        Raises:
            RowError: the template does not support these turns, a token has no embedding, or a text contains the
                placeholder token.
        """
        self._check_texts(messages)
        ids = self.tokenize(self.render(messages, tools, add_generation_prompt=True))
        check_ids(ids, self.tokenizer, self._vocab_size, "messages")
        if self._images is None:
            return ids
        widened, _ = self._widen(np.array(ids, np.int32), np.zeros(len(ids), np.float32), image_lengths)
        return widened.tolist()

    def special_token_in(self, conversation: Conversation) -> str:
        """Return a special token in the text of a message, such as `<|im_end|>` in a text about templates; "" without
        one.

        The tokenizer encodes it as the special token, as in transformers, so the model can read the following text as
        another turn.
        """
        for message in conversation.messages:
            for text in (*texts_of(message), message.get("reasoning_content", "")):
                if found := self._special_tokens.search(text):
                    return found[0]
        return ""

    @property
    def settings(self) -> tuple[Any, ...]:
        """The arguments that this object was created with."""
        return self.tokenizer, self.loss_scale, self._vocab_size, self._images

    @property
    def end_token_id(self) -> int | None:
        """The token that ends assistant turns; None if turns do not end with a single token. It is not always the eos
        token."""
        ids = self.tokenize(self.turn_end)
        if len(ids) != 1:
            return None
        return ids[0]

    def encode(self, conversation: Conversation, image_lengths: Sequence[int] = ()) -> Sample:
        """Encode a conversation that ends with an assistant turn: its tokens, labels and weights.

        The end-of-turn token is trained with its turn. If a template does not end turns with a token, the tokenizer's
        eos token is appended to the last turn, so that the model learns to stop.

        Args:
            image_lengths: for each image of the conversation, its number of placeholder tokens, which are never
                trained. The template writes one for each image.

        Raises:
            RowError: the template does not support or changes these turns, a trained turn cannot be located exactly, a
                token has no embedding, or a text contains the placeholder token.
        """
        self._check_texts(conversation.messages)
        messages = conversation.messages
        text = self.render(messages, conversation.tools)
        if self._appends_eos:
            text = text.rstrip() + self.turn_end
        self._check_complete(conversation, text)

        weights = self._turn_weights(conversation)
        trains_all = self.loss_scale == "all"
        usual_weight = 1.0 if trains_all else 0.0
        turns = [turn for turn, weight in weights.items() if weight != usual_weight]
        if not trains_all and not turns:
            raise RowError("messages", "have no turn to train on: every assistant turn has loss false")
        spans = [self._trim(text, span) for span in self._locate(conversation, turns, text)]
        if not trains_all:
            for turn, (start, end) in zip(turns, spans, strict=True):
                _check_turn(messages[turn], f"messages[{turn}]", text[start:end])

        ids, ranges = self._tokenize(text, spans, [f"messages[{turn}]" for turn in turns])
        check_ids(ids, self.tokenizer, self._vocab_size, "messages")
        token_weights = np.full(len(ids), usual_weight, np.float32)
        for turn, (first, last) in zip(turns, ranges, strict=True):
            token_weights[first:last] = weights[turn]
        token_ids, token_weights = self._widen(np.array(ids, np.int32), token_weights, image_lengths)
        return make_sample(token_ids, token_weights, conversation.source, conversation.channel)

    # Rendering

    def render(self, messages: list[Message], tools: Tools | None, add_generation_prompt: bool = False) -> str:
        """Return the text of a conversation.

        Raises:
            RowError: the template raises an error for this conversation.
        """
        with running_the_template():
            text = self.tokenizer.apply_chat_template(
                messages, tools=tools, tokenize=False, add_generation_prompt=add_generation_prompt
            )
        assert isinstance(text, str)
        check_length(text)
        if not text.isascii() and SURROGATE.search(text):
            raise RowError("messages", HALF_A_PAIR)
        return text

    def _find_turn_end(self) -> str:
        """Return the text that the template adds after an assistant turn, such as `<|im_end|>`, without white space."""
        try:
            text = self.render([{"role": "user", "content": "a"}, {"role": "assistant", "content": MARK}], None)
        except RowError as error:
            raise UserError(f"the chat template cannot render a plain exchange: {error.problem}") from None
        _, mark, end = text.partition(MARK)
        if not mark:
            raise UserError(
                "the chat template drops the text of assistant turns",
                "it may be for prompts only; use the template of an instruct model",
            )
        return end.rstrip()

    def _check_complete(self, conversation: Conversation, text: str) -> None:
        """Check that the text contains what templates can silently drop: system turns, tools and tool calls."""
        for i, message in enumerate(conversation.messages):
            role = message["role"]
            if role in ("system", "user") and any(part.strip() not in text for part in texts_of(message)):
                raise RowError(f"messages[{i}]", f"the chat template drops or changes this {role} turn")
            for call in message.get("tool_calls", ()):
                if call["function"]["name"] not in text:
                    raise RowError(f"messages[{i}].tool_calls", "the chat template does not render tool calls")
        for i, tool in enumerate(conversation.tools or ()):
            function = tool.get("function")
            name = (function if isinstance(function, dict) else tool).get("name")
            if isinstance(name, str) and name not in text:
                raise RowError(f"tools[{i}]", "the chat template does not render tools")

    # Images

    def _check_texts(self, messages: list[Message]) -> None:
        """Check that no text contains a token of images or videos, which would stand for one that does not exist."""
        if self._images is None:
            return
        tokens = [str(token) for token in self.tokenizer.convert_ids_to_tokens(self._images.token_ids)]
        for i, message in enumerate(messages):
            texts = (*texts_of(message), message.get("reasoning_content", ""))
            found = [token for token in tokens if any(token in text for text in texts)]
            if found:
                hint = "write <image> where an image stands, or remove the token"
                problem = f"contains {found[0]}, which the model uses for images and videos"
                raise RowError(f"messages[{i}]", problem, hint)

    def _widen(
        self, ids: np.ndarray, weights: np.ndarray, image_lengths: Sequence[int]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Repeat the placeholder of each image, and set the weights of placeholders to 0.

        Raises:
            RowError: the template does not write one placeholder for each image.
        """
        if self._images is None:
            return ids, weights
        is_placeholder = ids == self._images.image_token_id
        num_found = int(is_placeholder.sum())
        if num_found != len(image_lengths):
            problem = f"the chat template writes {num_found} placeholders for {len(image_lengths)} images"
            raise RowError("messages", problem, "use the chat template of the model's source")
        repeats = np.ones(len(ids), np.int64)
        repeats[is_placeholder] = image_lengths
        weights = np.where(is_placeholder, np.float32(0), weights)
        return ids.repeat(repeats), weights.repeat(repeats)

    # Selecting trained characters

    def _turn_weights(self, conversation: Conversation) -> dict[int, float]:
        """Return the weights of the assistant turns that are trained, by index."""
        messages = conversation.messages
        given = conversation.weights or [1.0] * len(messages)
        first = 0
        if self.loss_scale == "last_round":
            first = max(i for i, message in enumerate(messages) if message["role"] == "user")
        return {i: given[i] for i in range(first, len(messages)) if messages[i]["role"] == "assistant"}

    def _locate(self, conversation: Conversation, turns: list[int], text: str) -> list[Span]:
        """Return the character spans of the given turns in the text."""
        if not turns:
            return []
        messages = conversation.messages
        tools = conversation.tools
        blocks = self._generation_blocks(messages, tools)
        assistants = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if len(blocks) == len(assistants):  # otherwise the template marks only some turns
            return [blocks[assistants.index(turn)] for turn in turns]
        return [self._turn_span(messages, tools, turn, text) for turn in turns]

    def _generation_blocks(self, messages: list[Message], tools: Tools | None) -> list[Span]:
        # A lower-level function than apply_chat_template, whose return_assistant_tokens_mask rounds blocks to whole
        # tokens (a token shared with the prompt would be trained) and fails for a block that starts with a space
        # (transformers 5.19).
        template = self.tokenizer.get_chat_template(None, tools)
        if not GENERATION_BLOCK.search(template):
            return []
        special_tokens: dict[str, Any] = self.tokenizer.special_tokens_map
        with running_the_template():
            _, blocks = render_jinja_template(
                [messages], tools=tools, chat_template=template, return_assistant_tokens_mask=True, **special_tokens
            )
        return [(int(start), int(end)) for start, end in blocks[0]]

    def _turn_span(self, messages: list[Message], tools: Tools | None, turn: int, text: str) -> Span:
        """Return the span of a turn in the text: it starts after the prompt and ends where the rest of the conversation
        starts.
        """
        where = f"messages[{turn}]"
        prompt = self.render(messages[:turn], tools, add_generation_prompt=True)
        if not text.startswith(prompt):
            same = next(i for i, character in enumerate(prompt) if text[i : i + 1] != character)
            around = slice(max(0, same - 20), same + 20)
            problem = "the prompt for this turn is not a prefix of the rendered conversation: "
            problem += f"{prompt[around]!r} against {text[around]!r}"
            hint = OTHER_WAYS
            if turn == len(messages) - 1:
                hint = "fix add_generation_prompt in the chat template"
            raise RowError(where, problem, hint)
        if turn == len(messages) - 1:
            return len(prompt), len(text)
        so_far = self.render(messages[: turn + 1], tools)
        if text.startswith(so_far):
            return len(prompt), len(so_far)
        # Templates such as Qwen3's render the last turn differently from earlier turns. Then the rest of the
        # conversation is found by rendering it after a turn with a known end.
        marked = [*messages[:turn], {"role": "assistant", "content": MARK}, *messages[turn + 1 :]]
        try:
            rest = self.render(marked, tools).partition(MARK)[2]
        except RowError:
            rest = ""
        end = len(text) - len(rest)
        if not rest or not text.endswith(rest) or end < len(prompt):
            raise RowError(where, "the end of this turn cannot be located in the rendered text", OTHER_WAYS)
        return len(prompt), end

    def _trim(self, text: str, span: Span) -> Span:
        """Let a span end directly after its end-of-turn token, because nothing after this token is generated."""
        start, end = span
        end = start + len(text[start:end].rstrip())
        if self.turn_end and not text.endswith(self.turn_end, start, end) and text.startswith(self.turn_end, end):
            end += len(self.turn_end)
        return start, end

    # Selecting trained tokens

    def _tokenize(self, text: str, spans: list[Span], names: list[str]) -> tuple[list[int], list[Span]]:
        """Tokenize the text, and return the range of tokens of each span.

        The text is tokenized as a whole under two conditions: no token crosses the border of a span, and the prompt of
        the last span has the same tokens as in an engine, which tokenizes it without the answer. Otherwise, the text is
        split at the borders of spans and the pieces are tokenized separately.
        """
        if self.tokenizer.is_fast:
            tokens = self._tokenize_pieces(text, set())
            ranges = [self._token_range(tokens, text, span) for span in spans]
            cuts = set()
            for span, found in zip(spans, ranges, strict=True):
                if not found:
                    cuts.update(span)
            if spans and not self._prompt_stands_alone(tokens, text, spans[-1][0]):
                cuts.add(spans[-1][0])
            if not cuts:
                return tokens.ids, [found for found in ranges if found]
        else:
            cuts = set(itertools.chain(*spans))
        tokens = self._tokenize_pieces(text, cuts)
        ranges = []
        for name, span in zip(names, spans, strict=True):
            found = self._token_range(tokens, text, span)
            if not found:
                given = text[slice(*span)]
                problem = (
                    f"the tokenizer turns {clip(given, 40)!r} into {clip(self.decode(self.tokenize(given)), 40)!r}"
                )
                raise RowError(name, problem, "its vocabulary lacks these characters")
            ranges.append(found)
        return tokens.ids, ranges

    def _tokenize_pieces(self, text: str, cuts: set[int]) -> "_Tokens":
        """Split the text at these positions, and tokenize each piece separately."""
        tokens = _Tokens([], [], {})
        is_fast = bool(self.tokenizer.is_fast)
        inner_cuts = sorted(cuts - {0, len(text)})
        for start, end in itertools.pairwise([0, *inner_cuts, len(text)]):
            piece = self.tokenizer(
                text[start:end], add_special_tokens=False, return_offsets_mapping=is_fast, verbose=False
            )
            tokens.indices[start] = len(tokens.ids)
            tokens.ids += piece["input_ids"]
            if is_fast:
                tokens.starts += [start + token_start for token_start, _ in piece["offset_mapping"]]
            tokens.indices[end] = len(tokens.ids)
        return tokens

    def _token_range(self, tokens: "_Tokens", text: str, span: Span) -> Span | None:
        """Return the range of tokens of a span; None if a token crosses its border."""
        start, end = span
        first = tokens.index(start)
        last = tokens.index(end)
        if not self._gives_back(tokens.ids, first, last, text[start:end]):
            return None
        return first, last

    def _prompt_stands_alone(self, tokens: "_Tokens", text: str, end: int) -> bool:
        """Return whether the tokens before `end` are the same if the text after `end` is removed.

        The tokens can differ if the next character affects the grouping of white space. For example, GPT-2 encodes two
        newlines as one token at the end of a text, but not before a word. Tokenizers split a text at special tokens.
        Therefore only the text from the last special token on is compared, such as `<|im_start|>assistant\\n`.
        """
        num_before = tokens.index(end)
        special = (i for i in reversed(range(num_before)) if tokens.ids[i] in self._added_tokens)
        first = next(special, 0)
        found = tokens.ids[first:num_before]
        start = tokens.starts[first] if first else 0
        tail = text[start:end]
        if tail not in self._known_tails:
            if len(self._known_tails) == KNOWN_TAILS:
                del self._known_tails[next(iter(self._known_tails))]
            self._known_tails[tail] = self.tokenize(tail)  # usually the header of assistant turns
        return self._known_tails[tail] == found

    def _gives_back(self, ids: list[int], first: int, last: int, text: str) -> bool:
        decoded = self.decode(ids[first:last])
        if decoded == text:
            return True
        # SentencePiece decoders drop a space at the start of a text.
        before = max(0, first - 1)
        if self.decode(ids[before:last]) == self.decode(ids[before:first]) + text:
            return True
        # Some tokenizers change text, such as Qwen2's, which composes accents. Then the turn must decode like this text
        # alone, and only white space and composition may differ.
        return decoded == self.decode(self.tokenize(text)) and _bare(decoded) == _bare(text)

    def tokenize(self, text: str) -> list[int]:
        """Return the tokens of a text that the template rendered. The tokenizer adds no special tokens."""
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def decode(self, ids: list[int]) -> str:
        """Return the text of tokens, including special tokens."""
        text = self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text


@dataclass
class _Tokens:
    """Tokens of a text, the character at which each token starts, and the token index at each position where the text
    is split.
    """

    ids: list[int]
    starts: list[int]
    indices: dict[int, int]

    def index(self, position: int) -> int:
        """Return the first token that starts at or after a position in the text."""
        if position in self.indices:  # exact; the offsets of some tokenizers omit spaces
            return self.indices[position]
        return bisect.bisect_left(self.starts, position)


def _bare(text: str) -> str:
    """Remove white space and normalize characters. Tokenizers can change both."""
    return "".join(unicodedata.normalize("NFKC", text).split())


def _check_turn(message: Message, path: str, text: str) -> None:
    """Check that a trained turn contains the content of the row, because templates can drop or rewrite it."""
    for part in texts_of(message):
        head, _, answer = part.rpartition("</think>")
        thinking = message.get("reasoning_content") or head.strip().removeprefix("<think>")
        if thinking.strip() not in text:
            raise RowError(
                path,
                "the chat template drops the thinking of this turn, so the turn cannot be trained as written",
                OTHER_WAYS + ", or remove its thinking",
            )
        if answer.strip() not in text:
            raise RowError(path, "the chat template drops or changes the text of this turn")


def stop_token_ids(template: ChatTemplate, hf_dir: str | Path) -> tuple[int, ...]:
    """Return the tokens that end an answer.

    These are the template's end-of-turn token, the tokenizer's eos token, and the eos tokens in generation_config.json
    and config.json.
    """
    eos: Any = template.tokenizer.eos_token_id
    ids = {eos, template.end_token_id}
    for name in ("generation_config.json", "config.json"):
        path = Path(hf_dir) / name
        if not path.exists():
            continue
        try:
            content = read_json(path)
            named = (content.get("text_config") or content).get("eos_token_id")  # of the wrapped language model, if any
        except (OSError, ValueError, AttributeError) as error:
            raise UserError(f"{path} cannot be read: {error}", "copy it from the model's source again") from None
        given = named if isinstance(named, list) else [named]
        ids |= {token for token in given if isinstance(token, int)}
    return tuple(sorted(ids - {None}))
