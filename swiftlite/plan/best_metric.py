"""Derive from the options the metric that determines the best checkpoint, as transformers' Trainer does."""

from swiftlite.args.commands import SftArgs
from swiftlite.args.fields import RunArgs
from swiftlite.base.heads import Heads
from swiftlite.methods.index import method_of


def metric_of(args: RunArgs) -> str | None:
    """Return the name of the metric, such as `eval_loss`; None if no checkpoint is the best."""
    name = args.metric_for_best_model
    if name is None and args.load_best_model_at_end:
        name = "loss"
    if name is None or name.startswith("eval_"):
        return name
    return f"eval_{name}"


def known_metrics(args: SftArgs, heads: Heads) -> list[str]:
    """Return the names of the metrics of evaluations, without the prefix `eval_`.

    Args:
        heads: the heads of the run.
    """
    method = method_of(args)
    names = [*method.evaluated(args)]
    depths = range(1, heads.drafts + 1)
    if method.evaluates_rows:
        names += [f"mtp_{depth}_{each}" for depth in depths for each in ("loss", "acceptance")]
    else:
        names += [f"rollout/acceptance_{depth}" for depth in depths]
    return names + ["acceptance"] * bool(heads.drafts)


def greater_is_better(args: RunArgs) -> bool:
    """Return whether a greater value of the metric is better."""
    if args.greater_is_better is None:
        return not (metric_of(args) or "").endswith("loss")
    return args.greater_is_better
