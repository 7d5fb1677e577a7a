"""Rules for options that select an engine, or that are passed to the engine unchanged."""

from collections.abc import Iterator
from pathlib import Path

from swiftlite.args.command_line import shell_line
from swiftlite.args.commands import (
    BenchArgs,
    DeployArgs,
    EvaluateArgs,
    ExportArgs,
    GenerationCommand,
    InferArgs,
    SpeedupArgs,
)
from swiftlite.args.config import Problem
from swiftlite.args.docs import options
from swiftlite.args.serving_fields import WITH_HEADS, SamplingArgs
from swiftlite.engines.index import ENGINES
from swiftlite.engines.info import EngineInfo
from swiftlite.families.index import FAMILIES
from swiftlite.plan.facts import Facts, near_path

EngineCommand = DeployArgs | GenerationCommand


def given(args: EngineCommand, names: tuple[str, ...]) -> dict[str, object]:
    """Return the options among `names` that the user gave, with their values."""
    return {name: vars(args)[name] for name in names if vars(args)[name] is not None}


def given_of_speculation(args: EngineCommand) -> dict[str, object]:
    """Return the options for drafting in any engine that the user gave, with their values."""
    names = ["num_speculative_tokens"]
    if not isinstance(args, DeployArgs):
        names.append("draft_confidence")
    for info in ENGINES.values():
        names += info.speculative_option_names
    return given(args, tuple(names))


def missing_engine(info: EngineInfo, option: str = "infer_backend") -> Iterator[Problem]:
    """Yield a problem if this engine is not installed."""
    if not info.is_installed:
        yield f"--{option} {info.name}: {info.label} is not installed", info.install


def engine_is_installed(
    args: GenerationCommand | EvaluateArgs | ExportArgs | SpeedupArgs, facts: Facts
) -> Iterator[Problem]:
    if args.infer_backend in ENGINES:  # evaluate and export also have --infer_backend none
        yield from missing_engine(ENGINES[args.infer_backend])


def engine_runs_the_family(
    args: GenerationCommand | EvaluateArgs | SpeedupArgs | DeployArgs, facts: Facts
) -> Iterator[Problem]:
    info, family = ENGINES.get(args.infer_backend), FAMILIES.get(str(facts.hf_config.get("model_type")))
    if info is not None and family is not None and not info.runs(family.name):
        others = [name for name, other in ENGINES.items() if other.runs(family.name)]
        problem = f"--infer_backend {info.name}: {info.label} does not support {family.name}"
        yield problem, f"use --infer_backend {' or '.join(others)}"


def options_have_their_engine(args: EngineCommand, facts: Facts) -> Iterator[Problem]:
    for info in ENGINES.values():
        if info.name != args.infer_backend:
            for name in given(args, info.option_names):
                problem = f"--{name} is not supported with --infer_backend {args.infer_backend}"
                yield problem, f"use --infer_backend {info.name}, or remove --{name}"


def draft_confidence_has_its_engine(args: GenerationCommand | EvaluateArgs, facts: Facts) -> Iterator[Problem]:
    takers = [info.name for info in ENGINES.values() if info.takes_draft_confidence]
    if args.draft_confidence not in (None, []) and args.infer_backend not in takers:
        flag = f"--draft_confidence {shell_line(args.draft_confidence)}"
        problem = f"{flag} is not supported with --infer_backend {args.infer_backend}"
        yield problem, f"use --infer_backend {' or '.join(takers)}, or remove --draft_confidence"


def sampling_options_have_their_engine(args: GenerationCommand, facts: Facts) -> Iterator[Problem]:
    yield from unsupported_sampling(args, args.infer_backend, drafts=args.speculative != "none")


def unsupported_sampling(args: SamplingArgs, engine: str, *, drafts: bool, flag: str = "") -> Iterator[Problem]:
    """Yield a problem for each sampling option that an engine does not support, and for an empty stop string.

    Args:
        engine: name of the engine.
        drafts: whether the engine drafts.
        flag: the option that selects the engine. Default: --infer_backend.
    """
    if "" in args.stop_strings:
        yield "--stop_strings contains an empty text", "remove it"
    if engine not in ENGINES:
        return
    info, flag = ENGINES[engine], flag or f"--infer_backend {engine}"
    for name, option in options(SamplingArgs).items():
        if vars(args)[name] == option.default:
            continue
        given = f"--{name} {shell_line(vars(args)[name])}"
        if name not in info.sampling_options:
            able = [other.name for other in ENGINES.values() if name in other.sampling_options]
            yield f"{given} is not supported with {flag}", f"use --infer_backend {' or '.join(able)}"
        elif drafts and name in info.sampling_options_without_drafts:
            yield f"{given} is not supported with {flag} and drafts", f"use --speculative none, or remove --{name}"


def float32_can_be_faster(args: EngineCommand | EvaluateArgs | BenchArgs, facts: Facts) -> Iterator[str]:
    info = ENGINES.get(args.infer_backend)
    if info is None or facts.is_quantized:
        return
    if args.torch_dtype == "bfloat16" and info.fastest_dtype == "float32":
        yield (
            f"--torch_dtype bfloat16: this processor has no instructions for bfloat16, so {info.label} is slow in it, "
            "and drafts can make it slower; --torch_dtype float32 is faster"
        )


def ngrams_have_their_engine(args: EngineCommand | BenchArgs, facts: Facts) -> Iterator[Problem]:
    needed = {"mtp,ngram": "joins_ngrams", "ngram": "drafts_without_heads"}.get(args.speculative or "")
    if needed is None:
        return
    needs_server = isinstance(args, DeployArgs | BenchArgs)
    able = [info.name for info in ENGINES.values() if vars(info)[needed] and (info.server or not needs_server)]
    if args.infer_backend not in able:
        problem = f"--speculative {args.speculative} is not supported with --infer_backend {args.infer_backend}"
        hint = f"use --infer_backend {' or '.join(able)}"
        if facts.heads.layers:
            hint += ", or --speculative mtp"
        elif not isinstance(args, BenchArgs):  # `bench` compares drafts with none
            hint += ", or --speculative none"
        yield problem, hint


OR_NO_DRAFTS = ", or --speculative none"


def drafter_has_its_engine(args: EngineCommand | DeployArgs, facts: Facts) -> Iterator[Problem]:
    is_server = isinstance(args, DeployArgs)  # bench starts servers as deploy does
    if args.speculative in WITH_HEADS or (is_server and args.speculative is None):
        for problem, hint in drafter_problems(args.infer_backend, facts, is_server=is_server):
            yield problem, hint + OR_NO_DRAFTS


def drafter_problems(infer_backend: str, facts: Facts, *, is_server: bool = False) -> Iterator[Problem]:
    """Yield a problem if an engine does not draft with the kind of drafter in config.json."""
    kind, info = facts.heads.kind, ENGINES[infer_backend]
    if not facts.heads.layers or (kind in info.drafters and not info.requires_gpu(kind)):
        return
    where = " without a GPU" if kind in info.drafters else ""
    model_type = str(facts.hf_config.get("model_type"))
    infos = [other for other in ENGINES.values() if other.server or not is_server]
    able = [other.name for other in infos if other.drafts_for(model_type, kind) and not other.requires_gpu(kind)]
    problem = f"--infer_backend {infer_backend} does not draft with the drafter {kind!r}{where}"
    yield problem, f"use --infer_backend {' or '.join(able)}"


def options_of_engines_agree(args: EngineCommand, facts: Facts) -> Iterator[Problem]:
    for info in ENGINES.values():
        yield from info.problems(args)


def engine_kwargs_leave_what_has_an_option(args: EngineCommand, facts: Facts) -> Iterator[Problem]:
    """Reject keyword arguments of the engine for which swiftlite has an option, because rules check only options."""
    info = ENGINES[args.infer_backend]
    if not info.has_options_in(args):
        return
    kwargs = vars(args)[info.kwargs_option] or {}
    for name in info.option_names:
        own = name.removeprefix(f"{info.name}_")
        if own in kwargs:
            problem = f"--{info.kwargs_option} contains {own!r}, which has its own option"
            yield problem, f"use --{name} {shell_line(kwargs[own])}"


def adapters_are_a_directory(args: InferArgs | DeployArgs, facts: Facts) -> Iterator[Problem]:
    if args.adapters is None:
        return
    directory = Path(args.adapters)
    if not (directory / "adapter_config.json").is_file():
        hint = "give the --output_dir of swiftlite export --to_hf --merge_lora false"
        if directory.exists():
            yield f"--adapters {directory} has no adapter_config.json", hint
        else:
            yield f"--adapters {directory} does not exist", near_path(directory) or hint
