"""Derive from the options the metric that determines the best checkpoint, as transformers' Trainer does."""

from swiftlite.args.fields import RunArgs


def metric_of(args: RunArgs) -> str | None:
    """Return the name of the metric, such as `eval_loss`; None if no checkpoint is the best."""
    name = args.metric_for_best_model
    if name is None and args.load_best_model_at_end:
        name = "loss"
    if name is None or name.startswith("eval_"):
        return name
    return f"eval_{name}"


def greater_is_better(args: RunArgs) -> bool:
    """Return whether a greater value of the metric is better."""
    if args.greater_is_better is None:
        return not (metric_of(args) or "").endswith("loss")
    return args.greater_is_better
