"""Run `swiftlite deploy`: start an engine's OpenAI-compatible server with the flags that a checkpoint requires.

The server replaces this process, so the server receives its signals and returns its exit code.
"""

import errno
import os
import socket
import sys
from pathlib import Path
from pkgutil import resolve_name

from swiftlite.args.commands import DeployArgs
from swiftlite.base.errors import UserError
from swiftlite.base.log import logger
from swiftlite.engines.draft_schedule import read_schedule
from swiftlite.engines.index import ENGINES
from swiftlite.engines.request_log.log_file import LogFile
from swiftlite.engines.served_model import log_untrained_drafts, resolve_served
from swiftlite.engines.server_command import ServerCommand
from swiftlite.families.resolved import HfModel


def run(args: DeployArgs) -> None:
    """Replace this process by the server, or with --dry_run print its command.

    Raises:
        UserError: the engine would not draft with the checkpoint's heads, or the port is in use; nothing is started.
    """
    model = resolve_served(args.model)
    command = server_command(args, model)
    if args.speculative not in ("none", "ngram"):
        log_untrained_drafts(model, args.num_speculative_tokens)
    if args.dry_run:
        print(command.shell_line())
        return
    check_address(args.host, args.port)
    if args.log_requests:
        LogFile(Path(args.log_requests), 0).check("--log_requests")
        logger.info("conversations are logged to %s", args.log_requests)
    command.write_files("--draft_schedule")
    logger.info("starting %s", command.redacted().shell_line())
    logger.info("the server will listen on port %d; stop it with Ctrl-C", args.port)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(command.words[0], command.words, {**os.environ, **command.variables})


def check_address(host: str, port: int) -> None:
    """Check that a server can listen on this address. Engines check this only after they have loaded the model.

    Raises:
        UserError: the address is invalid or in use.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise UserError(f"invalid --host {host}: {error.strerror}", "use 127.0.0.1 for this machine only") from None
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            option, hint = f"--port {port}", "use another --port"
            if error.errno == errno.EADDRNOTAVAIL:
                option, hint = f"--host {host}", "use an address of this machine"
            raise UserError(f"{option} cannot be used: {error.strerror}", hint) from None


def server_command(args: DeployArgs, model: HfModel) -> ServerCommand:
    """Return the command that starts the server of the engine in --infer_backend.

    Without --speculative, the heads of the checkpoint draft if there are any.

    Raises:
        UserError: the engine would not draft with the checkpoint's heads, or --draft_schedule is for another engine.
    """
    drafts = args.speculative not in (None, "none") or (args.speculative is None and model.heads.layers > 0)
    schedule = None
    if args.draft_schedule:
        schedule = read_schedule(Path(args.draft_schedule), args.infer_backend)
    if schedule is not None and schedule.largest == 0:
        logger.info("--draft_schedule %s: drafts are disabled, because they were slower", args.draft_schedule)
        drafts, schedule = False, None
    make_command = resolve_name(ENGINES[args.infer_backend].server)
    return make_command(args, model, drafts, schedule)
