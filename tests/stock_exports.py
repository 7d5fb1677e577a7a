"""Exports of tiny models whose heads were trained for vLLM without swiftlite's plugin."""

import json
from pathlib import Path
from typing import Any

from swiftlite.args.commands import ExportArgs
from swiftlite.export.run import convert
from swiftlite.families.serving.stock import DRAFTING
from swiftlite.runtime.mesh import Mesh

CLASSES = {
    **dict.fromkeys(("llama", "mistral", "qwen3", "granite", "phi3", "smollm3"), "HYV3MTP"),
    **dict.fromkeys(("qwen2", "seed_oss"), "MiMoMTP"),
}
"""Families with heads that vLLM runs, and its class."""
# The heads of published SmolLM3 models have no rotary embeddings, which vLLM's classes always have.
SIZES: dict[str, dict[str, Any]] = {
    "llama": {"head_dim": 64},
    "qwen3": {"head_dim": 128},
    "mistral": {"sliding_window": 6},
    "phi3": {"sliding_window": 6},
    "smollm3": {"no_rope_layers": [0, 1]},
}


def export_for_stock(source: Path, directory: Path, mesh: Mesh) -> Path:
    """Export a model as if its heads were trained with `--draft_for vllm_stock`; return the export's directory.

    Args:
        source: the model, whose config.json is changed.
    """
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"mtp_drafting": DRAFTING.to_json()}))
    run, out = directory / "run", directory / "hf"
    convert(ExportArgs(model=str(source), output_dir=str(run), to_mcore=True), mesh)
    convert(ExportArgs(model=str(run), output_dir=str(out), to_hf=True), mesh)
    return out
