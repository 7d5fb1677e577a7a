"""Run `swiftlite doctor`: print versions and requirements, validate a model, and plan memory.

With --engine, the model is also validated with an engine; --plan plans the memory of a training run. Installed packages
are found by their metadata; torch is imported only to validate a model.
"""

from collections.abc import Sequence
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from swiftlite.args.commands import DoctorArgs, PlannedRun
from swiftlite.base.errors import UserError
from swiftlite.base.heads import MTP
from swiftlite.base.redact import redact_text
from swiftlite.cli import planned
from swiftlite.cli.installed import report_installed
from swiftlite.engines.index import ENGINES
from swiftlite.engines.info import EngineInfo
from swiftlite.families.resolved import HfModel, resolve
from swiftlite.hub.model import is_gguf, local_model
from swiftlite.report.table import text_table

if TYPE_CHECKING:
    from swiftlite.engines.loading.load_report import LoadReport


def run(args: DoctorArgs | PlannedRun) -> int:
    """Print the report and return the exit code.

    The exit code is 1 if training is not possible on this machine, the model is invalid, an engine would load it
    incorrectly, or the plan does not fit.
    """
    if isinstance(args, PlannedRun):
        return planned.run(args)
    is_well = report_installed()
    if args.model is not None:
        is_well = _report_model(args) and is_well
    return int(not is_well)


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
    from swiftlite.engines.vllm.stock_draft import draft_problems

    directory = model.directory
    try:
        depth = mtp_depth_on_disk(directory, model.family, model.config)
        problems = audit_hf(directory, model.family) + _tokenizer_problems(directory, model.config)
        problems += quantized_head_problems(model) + draft_problems(model)
        unsupported = unsupported_engines(model)
        quantization = quantization_words(quantization_of(model))
        drafted = model.heads.draft_vocab
    except UserError as error:
        print(f"  {error}")
        return False
    depths = f"{depth.promised} in config.json, {depth.depth} in the tensors"
    if depth.missing:
        depths += f", {len(depth.missing)} tensors missing"
    counted = "MTP depth" if model.heads.kind == MTP else f"layers of {model.heads.name}"
    verdict = f"valid: keys, shapes, {counted}, finite numbers"
    if problems:
        verdict = _number_of(problems)
    lines = [("family", model.family.name), (counted, depths), ("audit", verdict)]
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


def _number_of(problems: Sequence[str]) -> str:
    if len(problems) == 1:
        return "1 problem"
    return f"{len(problems)} problems"


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
        draft = report.draft
        if report.num_mtp_heads:
            draft += f", {report.num_drafting} of {report.num_mtp_heads} MTP heads"
    verdict = report.verdict
    if report.problems:
        verdict = _number_of(report.problems)
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
