"""Build the command of llama.cpp's OpenAI-compatible server."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from swiftlite.args.commands import DeployArgs
from swiftlite.base.errors import UserError
from swiftlite.base.heads import MTP
from swiftlite.base.log import logger
from swiftlite.engines.draft_schedule import DraftSchedule
from swiftlite.engines.llamacpp.embedded import API_KEY
from swiftlite.engines.llamacpp.info import LLAMACPP
from swiftlite.engines.ngram import Ngrams, ngrams_of
from swiftlite.engines.served_model import require_heads
from swiftlite.engines.server_command import ServerCommand, api_keys, flags
from swiftlite.families.drafters import BLOCKS
from swiftlite.families.resolved import HfModel
from swiftlite.families.serving.llamacpp import KINDS
from swiftlite.gguf.architectures import metadata_of
from swiftlite.gguf.drafters import draft_architecture_of
from swiftlite.gguf.examine import TrunkSizes, check_drafter
from swiftlite.hub.name import served_name

LENGTH = 8192
"""Maximum length of prompt and answer without --max_model_len; the KV cache of each slot has this size."""
SLOTS = 4
"""Maximum number of prompts that are processed at once."""
MATCH = 2
"""Number of matching tokens after which tokens are drafted from the text."""
TEXT_TOKENS = 3
"""Number of tokens drafted from the text."""


def server_command(args: DeployArgs, model: HfModel, drafts: bool, schedule: DraftSchedule | None) -> ServerCommand:
    """Return the command of llama.cpp's server for a model, which converts the model to a GGUF file when it starts.

    Raises:
        UserError: llama.cpp does not support the model or its heads.
    """
    if schedule is not None:
        raise UserError("--draft_schedule is not supported by llama.cpp", "use --num_speculative_tokens")
    num_tokens = args.num_speculative_tokens if drafts else 0
    numbers = draft_numbers(model, num_tokens, ngrams_of(args.speculative), heads_draft=args.speculative != "ngram")
    given: dict[str, Any] = {
        "alias": served_name(args.model, args.served_model_name),
        "host": args.host,
        "port": args.port,
        "chat_template_kwargs": args.chat_template_kwargs,
    }
    given |= server_options(
        model, args.torch_dtype, numbers, args.max_model_len, SLOTS, LLAMACPP.engine_kwargs(args), draws_drafts=True
    )
    variables = {}
    keys = api_keys(given.pop("api_key", None))
    if keys:  # not on the command line, which is visible to all users of the machine
        variables[API_KEY] = ",".join(keys)
    return ServerCommand(command(model, args.torch_dtype, given), variables)


def command(model: HfModel, torch_dtype: str, options: Mapping[str, Any]) -> list[str]:
    """Return the words of a command that converts a model and serves it."""
    launch = [sys.executable, "-m", "swiftlite.engines.llamacpp.launch"]
    name = model.name
    if Path(name).exists():  # --dry_run prints the command, which may run in another directory
        name = str(Path(name).absolute())
    return [*launch, name, torch_dtype, *flags(options)]


@dataclass(frozen=True)
class DraftNumbers:
    """Numbers of tokens that are drafted per step; 0 disables a kind of drafts.

    Attributes:
        heads: number of tokens that the heads draft.
        text: number of tokens that are drafted from the text. llama.cpp asks the heads only if it finds no match.
    """

    heads: int
    text: int


def draft_numbers(model: HfModel, num_tokens: int | None, ngrams: Ngrams | None, *, heads_draft: bool) -> DraftNumbers:
    """Return the numbers of drafted tokens; the arguments are those of `EngineConfig`."""
    if num_tokens == 0:
        return DraftNumbers(0, 0)
    if not heads_draft:
        return DraftNumbers(0, num_tokens or TEXT_TOKENS)
    return DraftNumbers(num_tokens or model.heads.drafts, TEXT_TOKENS if ngrams else 0)


def server_options(
    model: HfModel,
    torch_dtype: str,
    numbers: DraftNumbers,
    max_model_len: int | None,
    slots: int,
    engine_kwargs: Mapping[str, Any],
    *,
    draws_drafts: bool,
) -> dict[str, Any]:
    """Return options of llama-server, with underscores in their names.

    Args:
        slots: maximum number of prompts processed at once.
        engine_kwargs: the user's options, which override all others; None removes one.
        draws_drafts: whether drafts are sampled if the temperature is above 0.

    Raises:
        UserError: llama.cpp does not support the model or its heads, or the drafter is that of another trunk.
    """
    kind = model.heads.kind
    heads = model.heads.layers if kind == MTP else 0
    metadata_of(model.family, model.config, heads, kind)  # checks that llama.cpp supports the model
    if numbers.heads:
        require_heads(model, KINDS)
        if kind in BLOCKS and numbers.heads > model.heads.drafts:
            raise UserError(
                f"--num_speculative_tokens {numbers.heads}: llama.cpp drafts at most the block of this drafter, "
                f"{model.heads.drafts} tokens",
                f"use {model.heads.drafts} or less, or train with --mtp_unroll {numbers.heads}",
            )
        if model.heads.draft_vocab:
            logger.info("llama.cpp does not use the draft vocabulary of the heads: it drafts from all tokens")
    options: dict[str, Any] = {
        "parallel": slots,
        # llama.cpp divides this size among its slots.
        "ctx_size": slots * max_length(model, max_model_len),
        # Counts of drafts are read from /metrics, which is off by default.
        "metrics": True,
        # Without Jinja, llama.cpp knows only a list of formats, and not the template of the model.
        "jinja": True,
    }
    # The KV cache has 16 bits by default, so answers would not be those of float32.
    if torch_dtype == "float32":
        options |= {"cache_type_k": "f32", "cache_type_v": "f32", "flash_attn": "off"}
    if numbers.text:
        # llama.cpp makes no proposal with fewer tokens than the match has (common/ngram-map.cpp, b11549).
        options |= {"spec_type": "ngram-simple", "spec_ngram_simple_size_n": min(MATCH, numbers.text)}
        options |= {"spec_ngram_simple_size_m": numbers.text}
    if numbers.heads:
        name = "mtp" if kind == MTP else draft_architecture_of(model.family, model.config).method
        kinds = f"ngram-simple,draft-{name}" if numbers.text else f"draft-{name}"
        options |= {"spec_type": kinds, "spec_draft_n_max": numbers.heads}
        if torch_dtype == "float32":
            options |= {"cache_type_k_draft": "f32", "cache_type_v_draft": "f32"}
        if draws_drafts:
            options["spec_draft_sampling"] = "probabilistic"
        if not torch.accelerator.is_available():
            # Sampling of drafts inside of the graph makes steps slower on a CPU.
            options["no_spec_draft_backend_sampling"] = True
    options |= engine_kwargs
    if draft := options.get("model_draft"):
        sizes = TrunkSizes(*(model.config[key] for key in ("hidden_size", "vocab_size", "num_hidden_layers")))
        check_drafter(Path(draft), model.name, sizes)
    return {name: value for name, value in options.items() if value is not None}


def max_length(model: HfModel, max_model_len: int | None) -> int:
    """Return the maximum length of prompt and answer in tokens."""
    longest = model.config["max_position_embeddings"]
    return min(max_model_len or LENGTH, longest)
