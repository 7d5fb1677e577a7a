"""The command of SGLang's OpenAI-compatible server. It can be made where SGLang is not installed."""

import sys
from typing import Any

from swiftlite.args.commands import DeployArgs
from swiftlite.engines.served_model import ServedModel
from swiftlite.engines.server_command import ServerCommand, flags
from swiftlite.engines.sglang.info import SGLANG
from swiftlite.engines.sglang.options import cpu_options, cpu_variables, speculative_options
from swiftlite.hub.name import served_name


def server_command(args: DeployArgs, model: ServedModel, drafts: bool) -> ServerCommand:
    """SGLang's server of a model.

    Raises:
        UserError: SGLang would not draft with the checkpoint's heads.
    """
    given: dict[str, Any] = {
        "model_path": str(model.directory.absolute()),
        "served_model_name": served_name(args.model),
        "host": args.host,
        "port": args.port,
        "dtype": args.torch_dtype,
        "trust_remote_code": args.trust_remote_code or None,
        "context_length": args.max_model_len,
    }
    if drafts:
        given |= speculative_options(model, args.num_speculative_tokens, SGLANG.speculative_config(args))
    given |= cpu_options(drafts)
    # SGLang's switches are there or not; vLLM's have a --no- form.
    given |= {name: None if value is False else value for name, value in SGLANG.engine_kwargs(args).items()}
    return ServerCommand([sys.executable, "-m", "sglang.launch_server", *flags(given)], cpu_variables())
