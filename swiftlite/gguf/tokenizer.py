"""Convert the tokenizer of a Hugging Face directory to the metadata of a GGUF file.

llama.cpp implements byte-level BPE with a fixed list of pre-tokenizers, which split text before the merges. Each has a
name, and a file contains only the name. It is found by comparing the regular expressions of tokenizer.json.

It also implements the BPE of Gemma 4, whose symbols are characters: spaces become U+2581, and a character without a
token becomes tokens of its bytes.
"""

import re
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from swiftlite.base.errors import UserError
from swiftlite.base.json_file import read_json
from swiftlite.gguf.special_tokens import optional_json, special_tokens

Metadata = dict[str, Any]

_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 3, 4, 5, 6  # llama.cpp's types of tokens
_OF_CHARACTERS = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
"""The normalizer of the BPE of Gemma 4. Texts without spaces are not split before the merges."""
_NO_SPLIT = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}
_BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")
_SHOWN = ("<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>", '<|"|>')
"""Special tokens of Gemma 4 in answers. llama.cpp finds thoughts and tool calls only if they are user-defined."""
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_END = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|"
    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEEPSEEK = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
_KEEP_MATCHES = (("Isolated", False), ("Isolated", True), ("Removed", True))
"""`behavior` and `invert` of a Split whose pieces are the matches, if the expression matches everything."""
DIGITS, GPT2 = "<digits>", "<gpt2>"
PRE_TOKENIZERS: dict[tuple[str, ...], str] = {
    (GPT2,): "gpt-2",
    (DIGITS, GPT2): "smollm",
    (rf"{_CONTRACTIONS}|{_LETTERS}|\p{{N}}{{1,3}}|{_END}",): "llama-bpe",
    (rf"{_CONTRACTIONS}|{_LETTERS}|\p{{N}}|{_END}",): "qwen2",
    (
        rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|"
        r"\s*[\r\n]+|\s+(?!\S)|\s+",
    ): "qwen35",
    (rf"{_CONTRACTIONS}|{_LETTERS}|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+",): "seed-coder",
    (_TEKKEN,): "tekken",
    (r"\p{N}{1,3}", r"[一-龥぀-ゟ゠-ヿ]+", _DEEPSEEK): "deepseek-v3",
}
"""The regular expressions of tokenizer.json, in order -> llama.cpp's name."""
OTHER_PIECES = {"tekken": "combining marks, as in Hindi and Thai, or capital letters outside ASCII"}
"""llama.cpp's name -> in which texts its pieces differ from those of the regular expressions, with b11549."""


def tokenizer_metadata(directory: Path, vocab_size: int) -> Metadata:
    """Return the metadata of a tokenizer, and its chat template.

    Args:
        directory: Hugging Face directory with tokenizer.json.
        vocab_size: number of rows of the embedding. Tokens without a text get a placeholder.

    Raises:
        UserError: llama.cpp does not support the tokenizer.
    """
    file = directory / "tokenizer.json"
    if not file.is_file():
        raise UserError(
            f"{directory} has no tokenizer.json, from which a GGUF file is written", "copy it from the model's source"
        )
    content = read_json(file)
    kind = _kind(content, file)
    texts, types = _tokens(content, vocab_size, file)
    metadata: Metadata = {
        **kind,
        "tokenizer.ggml.tokens": texts,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": [
            merge if isinstance(merge, str) else " ".join(merge) for merge in content["model"]["merges"]
        ],
    }
    metadata |= special_tokens(directory, content.get("post_processor"), texts)
    if _is_of_characters(content) and not metadata["tokenizer.ggml.add_bos_token"]:
        raise UserError(
            f"{directory}: llama.cpp starts every text with the bos token, and this tokenizer does not",
            'set "add_bos_token" to true in tokenizer_config.json',
        )
    return metadata | _chat_template(directory)


def _kind(content: Mapping[str, Any], file: Path) -> Metadata:
    """Return llama.cpp's names of the tokenizer.

    Raises:
        UserError: llama.cpp does not have it.
    """
    if _is_of_characters(content):
        if mixed := [merge for merge in content["model"]["merges"] if _joins_lines(merge)]:
            raise UserError(
                f"{file}: llama.cpp does not merge newlines with other characters, as {mixed[0]!r} does",
                "use another --infer_backend",
            )
        return {"tokenizer.ggml.model": "gemma4"}
    pre = _pre_tokenizer(content, file)
    if other := [kind for kind in _normalizers(content.get("normalizer") or {}) if kind != "NFC"]:
        raise UserError(
            f"{file}: llama.cpp does not change texts as the normalizer {other[0]} does", "use another --infer_backend"
        )
    return {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": pre}


def _is_of_characters(content: Mapping[str, Any]) -> bool:
    """Return whether a tokenizer is the BPE of Gemma 4."""
    model = content.get("model") or {}
    is_whole = content.get("pre_tokenizer") in (None, _NO_SPLIT)
    is_bpe = model.get("type") == "BPE" and bool(model.get("byte_fallback"))
    return is_bpe and is_whole and content.get("normalizer") == _OF_CHARACTERS


def _joins_lines(merge: str | Sequence[str]) -> bool:
    """Return whether a merge joins newlines with other characters."""
    first, second = merge.split(" ", 1) if isinstance(merge, str) else merge
    return "\n" in first + second and set(first + second) != {"\n"}


def other_tokens(directory: Path) -> list[str]:
    """Return for which texts llama.cpp has other tokens than a supported tokenizer, as phrases."""
    file = directory / "tokenizer.json"
    content = read_json(file)
    found = []
    if _is_of_characters(content):
        return found
    if "NFC" in _normalizers(content.get("normalizer") or {}):
        found.append("letters that are not in Unicode's form NFC")
    pre = _pre_tokenizer(content, file)
    if pre in OTHER_PIECES:
        found.append(OTHER_PIECES[pre])
    return found


def _normalizers(normalizer: Mapping[str, Any]) -> list[str]:
    """Return the types of normalizers, in order."""
    kind = normalizer.get("type")
    if kind == "Sequence":
        return list(chain.from_iterable(map(_normalizers, normalizer["normalizers"])))
    return [] if kind is None else [kind]


def _pre_tokenizer(content: Mapping[str, Any], file: Path) -> str:
    """Return llama.cpp's name of the pre-tokenizer."""
    model = content.get("model") or {}
    if model.get("type") != "BPE" or model.get("byte_fallback"):
        raise UserError(
            f"{file}: GGUF files are supported for byte-level BPE tokenizers and that of Gemma 4, not for "
            f"{model.get('type')}{' with byte_fallback' if model.get('byte_fallback') else ''}",
            "use another --infer_backend",
        )
    expressions = tuple(expressions_of(content.get("pre_tokenizer") or {}))
    found = PRE_TOKENIZERS.get(expressions)
    if found is None:
        raise UserError(
            f"{file}: llama.cpp has no pre-tokenizer with these regular expressions: {list(expressions)}",
            "use another --infer_backend",
        )
    return found


def expressions_of(pre_tokenizer: Mapping[str, Any]) -> list[str]:
    """Return the regular expressions of a pre-tokenizer, in order."""
    kind = pre_tokenizer.get("type")
    if kind == "Sequence":
        found: list[str] = []
        for part in pre_tokenizer["pretokenizers"]:
            found += expressions_of(part)
        return found
    if kind == "ByteLevel" and not pre_tokenizer.get("add_prefix_space"):
        return [GPT2] if pre_tokenizer.get("use_regex", True) else []
    if kind == "Digits" and pre_tokenizer.get("individual_digits"):
        return [DIGITS]
    pieces = pre_tokenizer.get("behavior", "Isolated"), pre_tokenizer.get("invert", False)
    if kind == "Split" and "Regex" in (pre_tokenizer.get("pattern") or {}) and pieces in _KEEP_MATCHES:
        return [pre_tokenizer["pattern"]["Regex"]]
    return [f"<{kind}>"]


def _tokens(content: Mapping[str, Any], vocab_size: int, file: Path) -> tuple[list[str], list[int]]:
    """Return the text and the type of each token of the vocabulary."""
    texts = [f"[PAD{number}]" for number in range(vocab_size)]
    types = [_UNUSED] * vocab_size
    of_characters = _is_of_characters(content)
    for text, number in content["model"]["vocab"].items():
        kind = _BYTE if of_characters and _BYTE_TOKEN.fullmatch(text) else _NORMAL
        _set(texts, types, number, text, kind, file)
    for token in content.get("added_tokens") or ():
        is_control = token.get("special") and not (of_characters and token["content"] in _SHOWN)
        kind = _CONTROL if is_control else _USER_DEFINED
        _set(texts, types, token["id"], token["content"], kind, file)
    return texts, types


def _set(texts: list[str], types: list[int], number: int, text: str, kind: int, file: Path) -> None:
    if not 0 <= number < len(texts):
        raise UserError(f"{file}: token {text!r} has the number {number}, but the model has {len(texts)} tokens")
    texts[number], types[number] = text, kind


def _chat_template(directory: Path) -> Metadata:
    template = directory / "chat_template.jinja"
    if template.is_file():
        return {"tokenizer.chat_template": template.read_text(encoding="utf-8")}
    stated = optional_json(directory / "tokenizer_config.json").get("chat_template")
    return {"tokenizer.chat_template": stated} if isinstance(stated, str) else {}
