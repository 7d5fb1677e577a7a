"""Reproduce the issues of llama.cpp that docs/en/upstream.md describes, with tiny models that are trained in seconds.

    python scripts/upstream_llamacpp.py --directory out/upstream

Needs llama.cpp (LLAMA_SERVER=FILE, llama-server on PATH, or the package xllamacpp) and the packages of the tests.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from swiftlite.base.drafting import Drafting
from swiftlite.engines.llamacpp.program import program
from swiftlite.engines.llamacpp.request import post
from swiftlite.engines.server.process import serve
from swiftlite.engines.server_command import ServerCommand, flags
from swiftlite.families.resolved import resolve
from swiftlite.gguf.write import write_gguf
from tests.engines.reference import follow, write_trained
from tests.gguf.rewritten import rewrite
from tests.gguf.wordless import write_tokenizer

NEW_TOKENS = 24


def tiny(directory: Path, family: str, **sizes: Any) -> tuple[Path, list[list[int]]]:
    """Write a model with a head as a GGUF file, and return it with prompts."""
    source = directory / family
    prompts = write_trained(source, family, 1, draft_as=lambda reference: follow(reference, Drafting()), **sizes)
    model = resolve(source)
    write_tokenizer(source, model.config["vocab_size"])
    file = directory / f"{family}.gguf"
    write_gguf(model, file, "f32")
    return file, prompts


def ask(file: Path, num_tokens: int, prompts: list[list[int]]) -> list[dict[str, Any]]:
    """Return the answers of a new server with one slot."""
    words = program()
    assert words is not None, "llama.cpp is not installed"
    options: dict[str, Any] = {"model": str(file), "host": "127.0.0.1", "port": 0, "parallel": 1, "ctx_size": 256}
    options |= dict.fromkeys(("cache_type_k", "cache_type_v", "cache_type_k_draft", "cache_type_v_draft"), "f32")
    options |= {"flash_attn": "off", "threads": 1, "spec_type": "draft-mtp", "spec_draft_n_max": num_tokens}
    request = {"n_predict": NEW_TOKENS, "temperature": 0, "cache_prompt": False, "return_tokens": True}
    with serve(ServerCommand([*words, *flags(options)]), file.with_suffix(".log")) as server:
        return [json.loads(post(server.url, "/completion", {**request, "prompt": prompt})) for prompt in prompts]


def counts(answer: dict[str, Any]) -> str:
    timings = answer["timings"]
    return f"{timings.get('draft_n_accepted', 0)} of {timings.get('draft_n', 0)} drafts accepted"


def state_of_the_previous_request(directory: Path) -> None:
    """Send every prompt twice. The second answer must have the counts of the first."""
    file, prompts = tiny(directory, "llama")
    for prompt in prompts:
        first, second = ask(file, 3, [prompt, prompt])
        if counts(first) != counts(second):
            print(
                f"1. the same request twice, {prompt}: {counts(first)}, then {counts(second)}; expected: equal counts"
            )
            return
    print("1. not reproduced: all repeated requests have equal counts")


def no_draft_after_a_rejected_one(directory: Path) -> None:
    """Compare the numbers of drafts of two architectures for answers whose drafts are mostly wrong."""
    for family in ("qwen3_next", "qwen3_5_text"):
        file, prompts = tiny(directory, family)
        complete = [answer for answer in ask(file, 1, prompts) if len(answer["tokens"]) == NEW_TOKENS]
        worst = min(complete, key=lambda answer: answer["timings"].get("draft_n_accepted", 0))
        print(f"2. {family}, {NEW_TOKENS} tokens: {counts(worst)}; expected: about 22 drafts")


def guessed_gating(directory: Path) -> None:
    """Remove the gating function of a file, and compare the answers."""
    file, prompts = tiny(directory, "deepseek_v3", rms_norm_eps=1e-6)
    changed = rewrite(file, directory / "deepseek_v3-no-gating.gguf", without=("deepseek2.expert_gating_func",))
    pairs = zip(ask(file, 1, prompts), ask(changed, 1, prompts), strict=True)
    differing = sum(one["tokens"] != other["tokens"] for one, other in pairs)
    print(f"3. without expert_gating_func, {differing} of {len(prompts)} answers differ; expected: an error")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, required=True, help="directory for models and logs")
    directory = parser.parse_args().directory
    directory.mkdir(parents=True, exist_ok=True)
    state_of_the_previous_request(directory)
    no_draft_after_a_rejected_one(directory)
    guessed_gating(directory)


if __name__ == "__main__":
    main()
