"""Find the special tokens of a Hugging Face directory for a GGUF file.

Values equal those of `gguf.SpecialVocab`, which llama.cpp's converter uses, where it has some. In addition, this module
reads special_tokens_map.json and generation_config.json, lists of tokens that end a text, and tokens of the vocabulary.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from swiftlite.base.errors import UserError
from swiftlite.base.json_file import read_json
from swiftlite.base.log import logger

KEYS = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
"""Name of a token in Hugging Face files -> its name in GGUF keys."""
FURTHER_STOPS = ("eot", "eom")
"""Names in GGUF keys of tokens that end an answer as the eos token does."""


def special_tokens(directory: Path, post_processor: Any, texts: list[str]) -> dict[str, Any]:
    """Return the metadata of special tokens, and whether a prompt starts with one.

    Args:
        post_processor: that of tokenizer.json.
        texts: the text of each token.

    Raises:
        UserError: no token ends a text.
    """
    config = optional_json(directory / "tokenizer_config.json")
    tokens_map = optional_json(directory / "special_tokens_map.json")
    model = optional_json(directory / "config.json")
    wrapped = model.get("text_config")
    generation = optional_json(directory / "generation_config.json")
    numbered = [model, wrapped if isinstance(wrapped, Mapping) else {}, generation]
    first = _first_of_prompts(post_processor)
    number_of = {text: number for number, text in enumerate(texts)}
    found: dict[str, int] = {}
    for name in KEYS:
        stated = [_text(source.get(f"{name}_token")) for source in (config, tokens_map)]
        candidates = [number_of[text] for text in stated if text in number_of]
        for source in numbered:
            candidates += _numbers(source, name, len(texts))
        if name == "bos" and first in number_of:
            candidates.append(number_of[first])
        if candidates:
            found[name] = candidates[0]
    if "eos" not in found:  # llama.cpp would take token 11 (llama-vocab.cpp:2032 of 0c1e570)
        problem = f"{directory}: no file names the token that ends a text"
        raise UserError(problem, 'add "eos_token" to tokenizer_config.json')
    flag = config.get("add_bos_token")
    starts = "bos" in found and (flag if isinstance(flag, bool) else texts[found["bos"]] == first)
    stops = [*_numbers(generation, "eos", len(texts)), *_numbers(model, "eos", len(texts))]
    numbers = {KEYS[name]: number for name, number in found.items()} | _further_stops(stops, found["eos"], texts)
    return {f"tokenizer.ggml.{key}_token_id": number for key, number in numbers.items()} | {
        "tokenizer.ggml.add_bos_token": starts
    }


def _further_stops(stops: list[int], eos: int, texts: list[str]) -> dict[str, int]:
    """Return the tokens that end an answer in addition to the eos token, by their names in GGUF keys."""
    others = [number for number in dict.fromkeys(stops) if number != eos]
    if lost := others[len(FURTHER_STOPS) :]:
        logger.warning(
            "a GGUF file names 3 tokens that end an answer; llama.cpp does not stop at %s unless it knows their text",
            ", ".join(repr(texts[number]) for number in lost),
        )
    return dict(zip(FURTHER_STOPS, others, strict=False))


def _first_of_prompts(post_processor: Any) -> str | None:
    """Return the special token that the post-processor puts in front of a text."""
    if not isinstance(post_processor, Mapping):
        return None
    for processor in post_processor.get("processors", [post_processor]):
        if processor.get("type") == "RobertaProcessing":
            return processor["cls"][0]
        if processor.get("type") == "TemplateProcessing" and processor["single"]:
            return processor["single"][0].get("SpecialToken", {}).get("id")
    return None


def _text(token: Any) -> str | None:
    """Return the text of a token of tokenizer_config.json or special_tokens_map.json."""
    text = token.get("content") if isinstance(token, Mapping) else token
    return text if isinstance(text, str) else None


def _numbers(source: Mapping[str, Any], name: str, num_tokens: int) -> list[int]:
    """Return the numbers of a special token that a file of the model states: none, one or several."""
    stated = source.get(f"{name}_token_id")
    listed = stated if isinstance(stated, list) else [stated]
    return [number for number in listed if type(number) is int and 0 <= number < num_tokens]


def optional_json(file: Path) -> Mapping[str, Any]:
    """Return the content of a JSON file; empty if it does not exist."""
    if not file.is_file():
        return {}
    content = read_json(file)
    return content if isinstance(content, dict) else {}
