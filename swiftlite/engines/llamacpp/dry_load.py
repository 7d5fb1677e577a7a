"""Load a model in llama.cpp, to find out whether it drafts with the heads (`doctor --engine llamacpp`)."""

import re
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from swiftlite.base.errors import UserError
from swiftlite.engines.engine import EngineConfig
from swiftlite.engines.llamacpp.check import load
from swiftlite.engines.llamacpp.gguf_file import gguf_options
from swiftlite.engines.llamacpp.info import LLAMACPP
from swiftlite.engines.llamacpp.program import program
from swiftlite.engines.loading.load_report import LoadReport, other_version
from swiftlite.engines.served_model import fed_otherwise
from swiftlite.families import dflash
from swiftlite.families.resolved import HfModel
from swiftlite.gguf.drafters import DRAFT_ARCHITECTURES, FROM_ANCHOR, check_has_trunk
from swiftlite.gguf.examine import Examined, check_drafter, examine
from swiftlite.gguf.read import keys_of
from swiftlite.gguf.write import draft_file_of


def dry_load(config: EngineConfig) -> LoadReport:
    """Return the load report for a Hugging Face model, which is first converted to a GGUF file."""
    model = config.model
    try:
        files = gguf_options(model, config.torch_dtype, drafts=config.num_speculative_tokens != 0)
        return report_of(Path(files["model"]), model)
    except UserError as error:
        return LoadReport(_engine(), None, None, model.heads.layers, 0, problems=[error.problem])


def _method_of(draft_file: Path) -> str:
    """Return the value of `--spec-type`, without the prefix `draft-`, for a drafter's file."""
    # DSpark's file has the architecture of DFlash in llama.cpp, so only this key tells them apart.
    if any(key.endswith(f".{FROM_ANCHOR}") for key in keys_of(draft_file)):
        return DRAFT_ARCHITECTURES[dflash.DSPARK].method
    name = examine(draft_file).architecture
    return next((known.method for known in DRAFT_ARCHITECTURES.values() if known.name == name), name)


def _of_two_files(file: Path, draft_file: Path) -> LoadReport:
    """Return the load report for a trunk and a drafter in a file of its own."""
    trunk, draft = examine(file), _method_of(draft_file)
    words, problems = program(), []
    try:
        check_drafter(draft_file, str(file), trunk.sizes)
        if words is not None:
            load(words, file, draft, draft_file)
    except UserError as error:
        problems.append(error.problem)
    verdict = "llama.cpp loads both files" if words else "not loaded, because llama.cpp is not installed"
    return LoadReport(_engine(), trunk.architecture, draft, 0, 0, verdict=verdict, problems=problems)


def report_of(file: Path, model: HfModel | None = None) -> LoadReport:
    """Return the load report for a GGUF file of any origin, with a drafter's file of `export --to_gguf` next to it.

    Args:
        model: the model from which the file was written, if it is known.

    Raises:
        UserError: the file is damaged, or has only a drafter.
    """
    # A trunk and its drafter are two files, and the trunk's own metadata do not name the drafter.
    if draft_file_of(file).is_file():
        return _of_two_files(file, draft_file_of(file))
    found = examine(file)
    check_has_trunk(found.architecture)
    problems, notes = list(found.problems), list(found.notes)
    words = program()
    verdict = "metadata and tensors agree; llama.cpp loads the file and its heads"
    if words is None:
        verdict = "metadata and tensors agree; not loaded, because llama.cpp is not installed"
    elif not problems:
        try:
            load(words, file, "mtp" if found.heads else "")
        except UserError as error:
            problems.append(error.problem)
    if words is not None and (release := _release()) and (note := other_version(LLAMACPP, release)):
        notes.append(note)
    if model is not None and (note := fed_otherwise(model, LLAMACPP)):
        notes.append(note)
    return LoadReport(
        engine=_engine(),
        target=found.architecture or None,
        draft=found.architecture if found.heads else None,
        num_mtp_heads=found.heads,
        # llama.cpp runs the first head only.
        num_drafting=min(found.heads, 1),
        draft_modules=_types(found),
        verdict=verdict,
        problems=problems,
        notes=notes,
    )


def _types(found: Examined) -> str:
    """Return the types of the tensors, such as "trunk: 120 Q4_0, 40 F32; heads: 9 Q8_0"."""
    parts = []
    for name, counted in found.types.items():
        if counted:
            parts.append(f"{name}: {', '.join(f'{count} {kind}' for kind, count in counted.items())}")
    return "; ".join(parts)


def _engine() -> str:
    """Return the name and the release of the engine."""
    if program() is None:
        return f"{LLAMACPP.name}, not installed"
    return f"{LLAMACPP.name} {_release()}".rstrip()


def _release() -> str:
    """Return the release of the server, such as b11549; "" if it is unknown or no server is installed."""
    words = program()
    if words is None:
        return ""
    if len(words) == 1:
        done = subprocess.run([*words, "--version"], capture_output=True, text=True)
        match = re.search(r"version: (\d+)", done.stdout + done.stderr)
        return f"b{match[1]}" if match else ""
    try:
        return "b" + version("xllamacpp").split(".")[-1]  # its version is YEAR.MONTH.RELEASE
    except PackageNotFoundError:
        return ""
