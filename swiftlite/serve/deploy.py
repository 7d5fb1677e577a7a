"""`swiftlite deploy`: an engine's own OpenAI-compatible server, started with the flags that the checkpoint asks for.

This process becomes the server, so signals and the exit code are the server's own.
"""

import os
import sys
from pkgutil import resolve_name

from swiftlite.args.commands import DeployArgs
from swiftlite.engines.index import ENGINES
from swiftlite.engines.served_model import ServedModel, log_untrained_drafts, read_model
from swiftlite.engines.server_command import ServerCommand
from swiftlite.log import logger


def run(args: DeployArgs) -> None:
    """Become the server, or with --dry_run print its command.

    Raises:
        UserError: the engine would not draft with the checkpoint's heads; nothing has been started.
    """
    model = read_model(args.model)
    command = server_command(args, model)
    if args.speculative != "none":
        log_untrained_drafts(model, args.num_speculative_tokens)
    if args.dry_run:
        print(command.as_typed())
        return
    logger.info("starting %s", command.as_typed())
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(command.words[0], command.words, {**os.environ, **command.variables})


def server_command(args: DeployArgs, model: ServedModel) -> ServerCommand:
    """The command of the engine that --infer_backend names; without --speculative, heads draft if there are any.

    Raises:
        UserError: the engine would not draft with the checkpoint's heads.
    """
    drafts = model.heads.layers > 0 if args.speculative is None else args.speculative == "mtp"
    make_command = resolve_name(ENGINES[args.infer_backend].server)
    return make_command(args, model, drafts)
