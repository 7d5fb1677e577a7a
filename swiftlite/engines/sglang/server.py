"""Build the command of SGLang's OpenAI-compatible server. SGLang does not have to be installed."""

import sys
from pathlib import Path
from typing import Any

from swiftlite.args.commands import DeployArgs
from swiftlite.engines.draft_schedule import DraftSchedule
from swiftlite.engines.server_command import ServerCommand, flags
from swiftlite.engines.sglang.info import SGLANG
from swiftlite.engines.sglang.options import (
    check_trunk,
    cpu_options,
    cpu_variables,
    schedule_options,
    speculative_options,
)
from swiftlite.families.resolved import HfModel
from swiftlite.hub.name import served_name


def server_command(args: DeployArgs, model: HfModel, drafts: bool, schedule: DraftSchedule | None) -> ServerCommand:
    """Return the command of SGLang's server for a model.

    Raises:
        UserError: SGLang would not compute the model as trained, or not draft with its heads.
    """
    check_trunk(model)
    given: dict[str, Any] = {
        "model_path": str(model.directory.absolute()),
        "served_model_name": served_name(args.model, args.served_model_name),
        "host": args.host,
        "port": args.port,
        "dtype": args.torch_dtype,
        "trust_remote_code": args.trust_remote_code or None,
        "default_chat_template_kwargs": args.chat_template_kwargs,
        "context_length": args.max_model_len,
    }
    if drafts:
        num_tokens = args.num_speculative_tokens
        if schedule is not None:
            num_tokens = schedule.largest
        given |= speculative_options(model, num_tokens, SGLANG.speculative_config(args))
    files: dict[Path, str] = {}
    if schedule is not None and args.draft_schedule is not None:
        adaptive, files = schedule_options(schedule, Path(args.draft_schedule))
        given |= adaptive
    given |= cpu_options(model.family, drafts)
    given |= SGLANG.engine_kwargs(args)
    # SGLang's switches have no --no- form, unlike vLLM's.
    given = {name: value for name, value in given.items() if value is not False}
    return ServerCommand([sys.executable, "-m", "sglang.launch_server", *flags(given)], cpu_variables(), files)
