"""Rules of the options that reach an engine as they are, for `infer` and `deploy`."""

import dataclasses
import importlib.util
import json
from collections.abc import Iterator

from swiftlite.args.commands import DeployArgs, InferArgs
from swiftlite.args.fields import SglangArgs
from swiftlite.plan.facts import INSTALL_SGLANG, INSTALL_VLLM, Facts, Problem
from swiftlite.rules.common import as_typed

EngineCommand = DeployArgs | InferArgs
INSTALL = {"vllm": INSTALL_VLLM, "sglang": INSTALL_SGLANG}
OF_BACKEND = {
    "vllm": ("vllm_engine_kwargs", "vllm_speculative_config"),
    "sglang": tuple(field.name for field in dataclasses.fields(SglangArgs)),
}
NUMBERS = ("sglang_speculative_num_steps", "sglang_speculative_eagle_topk", "sglang_speculative_num_draft_tokens")
OF_SPECULATION = (
    "num_speculative_tokens",
    "vllm_speculative_config",
    "sglang_speculative_algorithm",
    *NUMBERS,
)


def given(args: EngineCommand, names: tuple[str, ...]) -> dict[str, object]:
    """Those of these options that were given."""
    return {name: vars(args)[name] for name in names if vars(args)[name] is not None}


def missing_engine(name: str, option: str = "infer_backend") -> Iterator[Problem]:
    """A problem, if this engine is not installed."""
    if name in INSTALL and importlib.util.find_spec(name) is None:
        yield f"--{option} {name}, but it is not installed", INSTALL[name]


def options_have_their_engine(args: EngineCommand, facts: Facts) -> Iterator[Problem]:
    for backend, names in OF_BACKEND.items():
        if backend != args.infer_backend:
            for name in given(args, names):
                yield f"--{name} with --infer_backend {args.infer_backend}", f"add --infer_backend {backend}"


def sglang_numbers_go_together(args: EngineCommand, facts: Facts) -> Iterator[Problem]:
    numbers = given(args, NUMBERS)
    missing = [f"--{name}" for name in NUMBERS if name not in numbers]
    if numbers and missing:
        words = " ".join(f"--{name} {value}" for name, value in numbers.items())
        yield f"{words} without {' and '.join(missing)}: SGLang wants all three or none", "give all three, or none"
    if numbers and args.num_speculative_tokens is not None:
        words = f"--num_speculative_tokens {args.num_speculative_tokens} and --{next(iter(numbers))}"
        yield f"{words} both say how many tokens to draft", "leave the first out"


def sglang_numbers_agree(args: EngineCommand, facts: Facts) -> Iterator[Problem]:
    steps, topk, tokens = (vars(args)[name] for name in NUMBERS)
    if None in (steps, topk, tokens):
        return
    if topk == 1 and tokens != steps + 1:
        yield (
            f"--sglang_speculative_num_draft_tokens {tokens} with {steps} steps of topk 1: SGLang would take "
            f"{steps + 1}, a chain of drafts and the newest token",
            f"--sglang_speculative_num_draft_tokens {steps + 1}",
        )
    if topk > 1 and tokens > 1 + topk + (steps - 1) * topk**2:
        yield (
            f"--sglang_speculative_num_draft_tokens {tokens}: {steps} steps of topk {topk} draft "
            f"{topk + (steps - 1) * topk**2} tokens, one more is verified",
            f"at most {1 + topk + (steps - 1) * topk**2}",
        )


def engine_kwargs_leave_what_has_an_option(args: EngineCommand, facts: Facts) -> Iterator[Problem]:
    """Given twice, they would be checked once."""
    for name in OF_BACKEND.get(args.infer_backend, ()):
        own = name.removeprefix(f"{args.infer_backend}_")
        kwargs = vars(args)[f"{args.infer_backend}_engine_kwargs"] or {}
        if own in kwargs:
            value = kwargs[own]
            text = f"'{json.dumps(value)}'" if isinstance(value, dict) else as_typed(value)
            yield f"--{args.infer_backend}_engine_kwargs has {own!r}, which is checked nowhere", f"--{name} {text}"
