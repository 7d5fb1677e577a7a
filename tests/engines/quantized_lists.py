"""Write the lists of modules in quantization_config that an export with heads has."""

import json
from pathlib import Path
from typing import Any

from swiftlite.bridge.encoding.quantization import Quantization
from swiftlite.bridge.tensors import Checkpoint
from swiftlite.engines.quantized_heads import quantized_modules
from swiftlite.engines.served_model import resolve_served
from swiftlite.families.serving.quantized import with_heads_kept

EXPERTS = "re:.*[.]experts[.].*"
"""An entry of `ignore` for the projections of all experts, in trunk and heads."""


def change_quantization(directory: Path, **changes: Any) -> None:
    """Change keys of a quantization_config; None removes a key."""
    path = directory / "config.json"
    config = json.loads(path.read_text())
    quantization = config["quantization_config"] | changes
    config["quantization_config"] = {key: value for key, value in quantization.items() if value is not None}
    path.write_text(json.dumps(config))


def list_trunk(directory: Path) -> None:
    """List the plain modules of the trunk, as the program that quantized it would."""
    model = resolve_served(directory)
    modules = quantized_modules(Checkpoint(directory).stored)
    plain = [
        name
        for name, is_quantized in modules.items()
        if not (
            is_quantized or model.family.is_mtp(model.config, f"{name}.weight") or name.endswith(("norm", "tokens"))
        )
    ]
    method = model.config["quantization_config"]["quant_method"]
    if method == "compressed-tensors":
        plain.append("re:.*visual.*")
        if any(".experts." in name for name in plain):
            plain.append(EXPERTS)
        change_quantization(directory, ignore=plain)
    elif method in ("fp8", "awq"):
        change_quantization(directory, modules_to_not_convert=[*plain, "visual"])


def list_plain(directory: Path, keeps_block: bool) -> None:
    """List the plain modules of trunk and heads."""
    list_trunk(directory)
    model = resolve_served(directory)
    quantization = Quantization(model.config["quantization_config"])
    listed = with_heads_kept(quantization, model.family, model.config, keeps_block=keeps_block)
    change_quantization(directory, **listed.content)
