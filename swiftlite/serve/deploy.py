"""`swiftlite deploy`: an engine's own OpenAI-compatible server, started with the flags that the checkpoint asks for.

This process becomes the server, so signals and the exit code are the server's own.
"""

import errno
import os
import socket
import sys
from pathlib import Path
from pkgutil import resolve_name

from swiftlite.args.commands import DeployArgs
from swiftlite.engines.draft_schedule import read_schedule
from swiftlite.engines.index import ENGINES
from swiftlite.engines.served_model import log_untrained_drafts, resolve_served
from swiftlite.engines.server_command import ServerCommand
from swiftlite.errors import UserError
from swiftlite.families.resolved import HfModel
from swiftlite.log import logger


def run(args: DeployArgs) -> None:
    """Become the server, or with --dry_run print its command.

    Raises:
        UserError: the engine would not draft with the checkpoint's heads, or the port is taken; nothing has been
            started.
    """
    model = resolve_served(args.model)
    command = server_command(args, model)
    if args.speculative != "none":
        log_untrained_drafts(model, args.num_speculative_tokens)
    if args.dry_run:
        print(command.shell_line())
        return
    check_address(args.host, args.port)
    command.write_files("--draft_schedule")
    logger.info("starting %s", command.shell_line())
    logger.info("when it says that startup is complete, it answers at port %d; Ctrl-C ends it", args.port)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(command.words[0], command.words, {**os.environ, **command.variables})


def check_address(host: str, port: int) -> None:
    """Make sure that a server can listen there; an engine finds out only after it has loaded the model.

    Raises:
        UserError: it cannot.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise UserError(f"--host {host} is no address: {error.strerror}", "127.0.0.1 is this machine alone") from None
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            is_host = error.errno == errno.EADDRNOTAVAIL
            option = f"--host {host}" if is_host else f"--port {port}"
            hint = "name an address of this machine" if is_host else "add --port with another number"
            raise UserError(f"{option} cannot be used: {error.strerror}", hint) from None


def server_command(args: DeployArgs, model: HfModel) -> ServerCommand:
    """The command of the engine that --infer_backend names; without --speculative, heads draft if there are any.

    Raises:
        UserError: the engine would not draft with the checkpoint's heads, or --draft_schedule is not of this engine.
    """
    drafts = model.heads.layers > 0 if args.speculative is None else args.speculative == "mtp"
    schedule = read_schedule(Path(args.draft_schedule), args.infer_backend) if args.draft_schedule else None
    if schedule is not None and schedule.largest == 0:
        logger.info("--draft_schedule %s: drafts were slower at every load, so there are none", args.draft_schedule)
        drafts, schedule = False, None
    make_command = resolve_name(ENGINES[args.infer_backend].server)
    return make_command(args, model, drafts, schedule)
