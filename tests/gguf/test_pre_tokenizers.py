"""Test with llama.cpp that each of our names of pre-tokenizers divides texts as the regular expressions of HF do, and
that the BPE of Gemma 4 does.

The vocabulary contains all short substrings of the texts, with all merges that lead to them. So each short piece that a
pre-tokenizer splits off is one token, and equal tokens mean equal pieces.
"""

import json
from pathlib import Path

import pytest
from gguf import GGUFReader
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.normalizers import Replace
from tokenizers.pre_tokenizers import ByteLevel, Split
from tokenizers.trainers import BpeTrainer

from swiftlite.data.template import ChatTemplate, load_tokenizer
from swiftlite.engines.llamacpp.check import TEXTS, check_file
from swiftlite.engines.llamacpp.program import program
from swiftlite.families.resolved import resolve
from swiftlite.gguf.tokenizer import DIGITS, GPT2, OTHER_PIECES, PRE_TOKENIZERS
from swiftlite.gguf.write import write_gguf
from tests.llamacpp_here import needs_llamacpp
from tests.tiny import make_tiny_hf

pytestmark = [pytest.mark.engine, needs_llamacpp]
LONGEST = 8  # characters of a substring
END = "<|end|>"
MORE_TEXTS = (
    "1 12 123 1234 12345 123456 1234567 x1 1x1 0x1F 1e-9 1,234.5",
    "٣٤٥٦ ½¾ ⅧⅨ x²³ 五5 ①②",
    "one\r\ntwo\r\n\r\nthree\r \r\n  \n\r\n!\r\n?\n /\n//\r\n",
    "I'M SHE'LL DON'T WE'VE we'Re y'all'd 'S 'tis it’s 'x '' 'LL' don't's",
    "HTMLParser camelCase iOS ABc aBC ABC123abc",
    "a\u00a0b \u00a0 c\u3000d\u3000\u3000e\u2003f\u200bg\u2028h\u0085i\ufeffj",
    "漢字かなカナー々「引用」、。中文English混合，한국어입니다",
    "👍🏽 👩\u200d👩\u200d👧 🇩🇪 ❤\ufe0f ok🙂x 🙂🙂",
    "$100 +1-2=3 a_b __init__ //!? ¿qué? «x» €5 — … ~`|^ #a @b (c) .d -e",
    "a\tb\t\tc \t d\t \te \n f\n\n\t g",
    "   leading",
    "trailing   ",
    "newlines \n\n",
    " ",
    "\n",
    "ª º ʰa 'ſ don'ſ 'K İi ı ﬁ straße 𝐀𝐁𝐜 𝟙𝟚 ⅷ ǅ",
    "〇一二 ㊀ ১২৩ ௧௨ ３４ ⑤ 1\ufe0f\u20e3 \u00ad \u2060 \u200e \ue000 \ufffd \u0378",
    "\u0001\u001c\u001d\u000b\u000c\u007f x",
)
MARKS_AND_CAPITALS = (
    "cafe\u0301 e\u0301\u0302x X\u0301y",
    "नमस्ते क्षत्रिय",
    "ไทยครับ ล้ำ",
    "1\u0301 !\u0301 \u0301 \n\u0301 a\u0301\u0301",
    "'\u0301s I'S\u0301",
    "ÉtéÉ caféÉtude",
    "ΑΒγΔ",
    "МоскваРФ",
    "ａＢ",
)
"""Texts that llama.cpp's `tekken` divides otherwise, because its expression has no categories of letters and marks."""


def vocabulary(texts: tuple[str, ...]) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Return the numbers of all substrings of up to LONGEST characters, and the merges that lead to them."""
    encoder = ByteLevel(add_prefix_space=False, use_regex=False)
    of_bytes: dict[tuple[str, str], None] = {}
    of_characters: dict[tuple[str, str], None] = {}
    for text in texts:
        characters = [encoder.pre_tokenize_str(character)[0][0] for character in text]
        for symbols in characters:
            for end in range(1, len(symbols)):
                of_bytes[symbols[:end], symbols[end]] = None
        for start in range(len(characters)):
            for end in range(start + 2, min(start + LONGEST, len(characters)) + 1):
                for middle in range(start + 1, end):
                    of_characters["".join(characters[start:middle]), "".join(characters[middle:end])] = None
    merges = [*of_bytes, *of_characters]
    tokens = dict.fromkeys([*sorted(ByteLevel.alphabet()), *map("".join, merges)])
    return {token: number for number, token in enumerate(tokens)}, merges


def pre_tokenizer(expression: str) -> dict:
    if expression == DIGITS:
        return {"type": "Digits", "individual_digits": True}
    if expression == GPT2:
        return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False}


def write_tokenizer(
    directory: Path, expressions: tuple[str, ...], vocab: dict[str, int], merges: list[tuple[str, str]], normalizer
) -> None:
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    parts = [pre_tokenizer(expression) for expression in expressions]
    if GPT2 not in expressions:
        parts.append(level)
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    content = {
        "version": "1.0",
        "added_tokens": [{"id": len(vocab), "content": END, "special": True, **flags}],
        "normalizer": normalizer,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": parts},
        "post_processor": None,
        "decoder": level,
        "model": {"type": "BPE", "vocab": vocab, "merges": merges},
    }
    tokenizer = Tokenizer.from_str(json.dumps(content))
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "chat_template": "{% for message in messages %}{{ message.content }}{% endfor %}",
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config))


def problems(directory: Path, expressions: tuple[str, ...], texts: tuple[str, ...], normalizer=None) -> list[str]:
    """Return in which texts the tokens of llama.cpp differ."""
    vocab, merges = vocabulary(texts)
    size = len(vocab) + 1
    model = make_tiny_hf(directory / "model", "qwen3", vocab_size=size)
    write_tokenizer(model, expressions, vocab, merges, normalizer)
    write_gguf(resolve(model), directory / "model.gguf", "bf16")
    template = ChatTemplate(load_tokenizer(model), vocab_size=size)
    words = program()
    assert words is not None
    return check_file(words, directory / "model.gguf", template, [], texts).problems


@pytest.mark.parametrize("expressions", PRE_TOKENIZERS, ids=PRE_TOKENIZERS.get)
def test_texts_are_divided_as_by_the_hf_tokenizer(tmp_path, expressions):
    found = problems(tmp_path, expressions, (*TEXTS, *MORE_TEXTS, *MARKS_AND_CAPITALS))
    differing = MARKS_AND_CAPITALS if PRE_TOKENIZERS[expressions] in OTHER_PIECES else ()
    assert len(found) == len(differing), found
    for text, problem in zip(differing, found, strict=True):
        assert repr(text) in problem


def test_llamacpp_does_not_normalize(tmp_path):
    texts = ("caf\u00e9", "cafe\u0301", "cafe")
    (found,) = problems(tmp_path, (GPT2,), texts, {"type": "NFC"})
    assert repr(texts[1]) in found


BYTES = [f"<0x{number:02X}>" for number in range(256)]
SPECIAL = ["<pad>", "<eos>", "<bos>", "<unk>", "<|tool_call>"]


def write_gemma_tokenizer(directory: Path, texts: tuple[str, ...]) -> int:
    """Train a tokenizer like that of Gemma 4 on texts, and write it; return the number of its tokens."""
    trained = Tokenizer(BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    trained.normalizer = Replace(" ", "\u2581")
    trained.pre_tokenizer = Split("\n", "contiguous")
    special = [*SPECIAL, *BYTES]
    trained.train_from_iterator(texts, BpeTrainer(vocab_size=900, special_tokens=special, show_progress=False))
    content = json.loads(trained.to_str())
    split = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}
    in_front = [{"SpecialToken": {"id": "<bos>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    content |= {
        "added_tokens": [token for token in content["added_tokens"] if token["content"] in SPECIAL],
        "pre_tokenizer": split,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": in_front,
            "pair": [],
            "special_tokens": {"<bos>": {"id": "<bos>", "ids": [2], "tokens": ["<bos>"]}},
        },
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
            ],
        },
    }
    (directory / "tokenizer.json").write_text(json.dumps(content))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{f"{name}_token": f"<{name}>" for name in ("bos", "eos", "pad", "unk")},
        "chat_template": "{{ bos_token }}{% for message in messages %}{{ message.content }}{% endfor %}",
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return len(content["model"]["vocab"])


def test_the_tokenizer_of_gemma_4_divides_texts_as_that_of_hf(tmp_path):
    """Characters of texts that it was not trained on become bytes."""
    (tmp_path / "tokenizer").mkdir()
    size = write_gemma_tokenizer(tmp_path / "tokenizer", (*TEXTS, *MORE_TEXTS[:8]))
    model = make_tiny_hf(tmp_path / "model", "gemma4_text", tied=True, vocab_size=size)
    for file in (tmp_path / "tokenizer").iterdir():
        file.rename(model / file.name)
    write_gguf(resolve(model), tmp_path / "model.gguf", "bf16")
    template = ChatTemplate(load_tokenizer(model), vocab_size=size)
    words = program()
    assert words is not None
    texts = (*TEXTS, *MORE_TEXTS, *MARKS_AND_CAPITALS, "<|tool_call>call<eos>")
    assert check_file(words, tmp_path / "model.gguf", template, [], texts).problems == []
    types = GGUFReader(tmp_path / "model.gguf").fields["tokenizer.ggml.token_type"].contents()
    assert [types[number] for number in (2, 4, 5, 300)] == [3, 4, 6, 1]
