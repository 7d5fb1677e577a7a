"""Rules of `adapt`."""

from collections.abc import Iterator
from pathlib import Path

from swiftlite.args.commands import AdaptArgs
from swiftlite.args.config import Problem
from swiftlite.plan.facts import Facts, near_path
from swiftlite.rules import common


def server_is_an_address(args: AdaptArgs, facts: Facts) -> Iterator[Problem]:
    if not args.server:
        yield "--server is required", "give the address of swiftlite deploy --live_weights: --server http://HOST:PORT"
    elif not common.is_address(args.server):
        yield f"--server {args.server} is not an address", "give http://HOST:PORT, such as http://127.0.0.1:8000"


def log_exists(args: AdaptArgs, facts: Facts) -> Iterator[Problem]:
    if not args.request_log:
        yield "--request_log is required", "give the file of the server: swiftlite deploy --log_requests FILE"
    elif not Path(args.request_log).is_file():
        hint = near_path(Path(args.request_log)) or "give the file of the server's --log_requests"
        yield f"--request_log {args.request_log} is not a file", hint


def heads_can_be_trained(args: AdaptArgs, facts: Facts) -> Iterator[Problem]:
    if facts.hf_config and not facts.heads.layers:
        yield f"--model {args.model} has no heads", f"train some first: swiftlite speedup --model {args.model}"
    elif facts.heads.features:
        problem = f"--model declares the drafter {facts.heads.kind!r}, which adapt does not train"
        yield problem, "use a model with MTP heads"


RULES = (
    common.hf_model_is_a_directory,
    common.output_dir_is_given,
    common.numbers_are_in_range,
    server_is_an_address,
    log_exists,
    heads_can_be_trained,
)
NOTES = ()
