"""Build the command of the OpenAI-compatible server of the transformers engine, and write its metrics."""

import sys
from pathlib import Path

from swiftlite.acceptance.counts import DraftCounts
from swiftlite.args.commands import DeployArgs
from swiftlite.base.errors import UserError
from swiftlite.engines.draft_schedule import DraftSchedule
from swiftlite.engines.server import metrics
from swiftlite.engines.server_command import ServerCommand, flags
from swiftlite.engines.transformers.info import TRANSFORMERS
from swiftlite.families.resolved import HfModel
from swiftlite.hub.name import served_name

PREFIX = TRANSFORMERS.metrics_prefix


def server_command(args: DeployArgs, model: HfModel, drafts: bool, schedule: DraftSchedule | None) -> ServerCommand:
    """Return the command of the server (`serve.py`).

    Raises:
        UserError: there is a draft schedule.
    """
    if schedule is not None:
        raise UserError("--draft_schedule is not supported by transformers", "use --num_speculative_tokens")
    num_tokens = 0
    if drafts:
        num_tokens = args.num_speculative_tokens or model.heads.drafts
    name = model.name
    if Path(name).exists():  # --dry_run prints the command, which may run in another directory
        name = str(Path(name).absolute())
    given = {
        "served_model_name": served_name(args.model, args.served_model_name),
        "host": args.host,
        "port": args.port,
        "torch_dtype": args.torch_dtype,
        "trust_remote_code": args.trust_remote_code or None,
        "max_model_len": args.max_model_len,
        "chat_template_kwargs": args.chat_template_kwargs,
        "num_speculative_tokens": num_tokens,
        "speculative": args.speculative if drafts else None,
    }
    return ServerCommand([sys.executable, "-m", "swiftlite.engines.transformers.serve", name, *flags(given)])


def metrics_text(counts: DraftCounts | None, generation: metrics.Throughput) -> str:
    """Return the text of /metrics, with vLLM's names after the prefix.

    Args:
        counts: draft counts; None if the server does not draft.
    """
    lines = [f"{PREFIX}{metrics.TOKENS} {generation.tokens}", f"{PREFIX}{metrics.SECONDS} {generation.seconds}"]
    if counts is not None:
        lines.append(f"{PREFIX}spec_decode_num_drafts_total {counts.drafts}")
        lines.append(f"{PREFIX}spec_decode_num_draft_tokens_total {counts.drafted}")
        for position, accepted in enumerate(counts.accepted_per_position):
            name = f'{PREFIX}spec_decode_num_accepted_tokens_per_pos_total{{position="{position}"}}'
            lines.append(f"{name} {accepted}")
    return "\n".join([*lines, ""])
