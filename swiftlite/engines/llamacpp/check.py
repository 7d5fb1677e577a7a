"""Check a GGUF file with a server of llama.cpp: it loads the file, and its tokens are those of the HF tokenizer."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swiftlite.base.errors import UserError, clip
from swiftlite.data.rows.conversation import Conversation
from swiftlite.data.template import ChatTemplate
from swiftlite.engines.llamacpp.program import SHORT_LOG
from swiftlite.engines.llamacpp.request import post
from swiftlite.engines.server.process import serve_with_short_log
from swiftlite.engines.server_command import ServerCommand, flags

TEXTS = (
    "It's 1234567 o'clock, isn't it?  Two spaces,\ttab\n\n\nthree lines.",
    "def f(x):\n    return x**2  # 3.14159e-05\n",
    "Größe, naïve, Ελληνικά, русский, 你好，世界！ ありがとう 한국어 🙂🚀",
    "http://example.com/a?b=1&c=%20 <tag attr='x'/> {\"k\": [1, 2.5, null]}",
)
"""Texts on which pre-tokenizers differ."""


@dataclass(frozen=True)
class Checked:
    """The result of a check.

    Attributes:
        problems: one line each.
        num_texts: number of compared texts.
        num_prompts: number of compared prompts with the chat template.
    """

    problems: list[str]
    num_texts: int
    num_prompts: int


def check_file(
    words: Sequence[str],
    file: Path,
    template: ChatTemplate,
    prompts: Sequence[Conversation],
    texts: Sequence[str] = TEXTS,
) -> Checked:
    """Load a file in a server, and compare its tokens and its chat template with those of the HF tokenizer.

    Args:
        words: command of a server (`program.py`).
        prompts: conversations whose prompts are compared.
        texts: further texts that are compared.

    Raises:
        UserError: the server cannot load the file.
    """
    problems: list[str] = []
    with _serve(words, file) as url:
        for text in texts:
            problems += _compare(url, template, text, with_special_tokens(template, text))
        for prompt in prompts:
            turns = prompt.prompt()
            text = template.render(turns.messages, turns.tools, add_generation_prompt=True)
            problems += _compare(url, template, text)
            request: dict[str, Any] = {"messages": turns.messages}
            if turns.tools:
                request["tools"] = turns.tools
            theirs = json.loads(post(url, "/apply-template", request))["prompt"]
            # llama.cpp removes a token in front of a prompt that it adds to every text.
            if theirs not in (text, text.removeprefix(str(template.tokenizer.bos_token or ""))):
                problems.append(f"the chat template gives {clip(repr(theirs), 200)}, not {clip(repr(text), 200)}")
    return Checked(problems, len(texts) + len(prompts), len(prompts))


def with_special_tokens(template: ChatTemplate, text: str) -> list[int] | None:
    """Return the tokens of a text with special tokens that are not in the text, such as bos.

    Returns:
        None if there are special tokens that llama.cpp cannot add.
    """
    tokenizer = template.tokenizer
    plain, whole = tokenizer.encode(text, add_special_tokens=False), tokenizer.encode(text)
    flag = tokenizer.init_kwargs.get("add_bos_token")
    if flag is False:  # llama.cpp's converter follows the flag, which transformers 5 ignores
        return plain
    if tokenizer.bos_token_id is None:
        return None
    with_bos = [tokenizer.bos_token_id, *plain]
    if flag is True:
        return with_bos
    return whole if whole in (plain, with_bos) else None


def _compare(url: str, template: ChatTemplate, text: str, whole: list[int] | None = None) -> Iterator[str]:
    """Yield a problem if llama.cpp divides a text into other tokens.

    Args:
        whole: the expected tokens with special tokens in front; None: compare without these.
    """
    mine = whole or template.tokenizer.encode(text, add_special_tokens=False)
    request = {"content": text, "parse_special": True, "add_special": whole is not None}
    theirs = json.loads(post(url, "/tokenize", request))["tokens"]
    if mine != theirs:
        # The first difference, with some text around it: a pre-tokenizer that is wrong differs at a few places only.
        place = next((n for n, pair in enumerate(zip(mine, theirs, strict=False)) if pair[0] != pair[1]), len(mine))
        around = template.tokenizer.decode(mine[max(0, place - 2) : place + 3])
        yield f"other tokens than the HF tokenizer at {around!r} in {clip(repr(text), 100)}"


def load(words: Sequence[str], file: Path, drafter: str = "", draft_file: Path | None = None) -> None:
    """Start a server with a file and its heads or drafter, and stop it.

    Args:
        drafter: llama.cpp's name of the drafter, such as "mtp"; "" without one.
        draft_file: file of the drafter, if it is not in `file`.

    Raises:
        UserError: the server cannot load the file.
    """
    options: dict[str, Any] = {}
    if drafter:
        options = {"spec_type": f"draft-{drafter}", "spec_draft_n_max": 1}
    if draft_file is not None:
        options["model_draft"] = str(draft_file)
    with _serve(words, file, options):
        pass


@contextmanager
def _serve(words: Sequence[str], file: Path, more: Mapping[str, Any] | None = None) -> Iterator[str]:
    """Yield the address of a server of a file, with the smallest context.

    Args:
        more: further options of the server.
    """
    options: dict[str, Any] = {"model": str(file), "host": "127.0.0.1", "port": 0, "ctx_size": 256, "parallel": 1}
    # Nothing is generated here, so the smallest context and no warmup are enough.
    options |= {"jinja": True, "no_warmup": True, **(more or {})}
    command = ServerCommand([*words, *flags(options)], SHORT_LOG)
    with serve_with_short_log(command, f"llama.cpp cannot load {file.name}") as server:
        try:
            yield server.url
        except OSError as error:
            raise UserError(f"llama.cpp's server does not answer: {error}") from None
