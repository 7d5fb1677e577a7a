"""Make torchvision importable in a process with a CPU build of torch, for vLLM's processors of images.

PyPI has torchvision only for CUDA. Its library of compiled operations cannot be loaded without CUDA, and its Python
code requires that two of these operations are declared. They are never called here. The package is in a separate
directory, because transformers would import it wherever it can be imported.
"""

import os
import sys
from pathlib import Path

RELEASE = "0.28.0"
SITE = Path(os.environ.get("SWIFTLITE_TORCHVISION_SITE", Path(sys.prefix) / "torchvision"))
_libraries = []


def missing() -> str:
    """Return why torchvision cannot be used here; "" if it can."""
    if (SITE / f"torchvision-{RELEASE}.dist-info").is_dir():
        return ""
    return f"torchvision {RELEASE} is not in {SITE} (requirements/torchvision.txt)"


def install() -> None:
    """Make torchvision importable in this process, permanently.

    Must run before transformers is imported.
    """
    import torch

    sys.path.append(str(SITE))
    if torch.version.cuda is not None:
        return  # PyPI's torchvision is built for this torch
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _libraries.append(library)  # operations exist as long as it does
