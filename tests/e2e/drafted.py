"""Kinds of drafters: models whose drafts are often correct, their references, and the classes of vLLM that run them."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from swiftlite.args.commands import ExportArgs
from swiftlite.export.run import convert
from swiftlite.runtime.mesh import Mesh
from tests.engines import dflash_reference, eagle3_reference, feature_reference
from tests.engines.dflash_reference import DFlashReference
from tests.engines.drafter_reference import DrafterReference
from tests.engines.eagle3_reference import Eagle3Reference
from tests.engines.feature_reference import FeatureReference
from tests.engines.reference import Reference, write_trained
from tests.stock_exports import SIZES

LAYERS = 4
FEATURES = [1, 2, 3]
HEAD_FEATURES = [1, LAYERS - 1]
RANK = 8
"""Rank of a DSpark drafter's Markov head."""
VOCABULARY = [*range(60), *range(70, 128)]
"""A draft vocabulary."""


@dataclass(frozen=True)
class Kind:
    """A kind of drafter.

    Attributes:
        of: returns a reference with a random drafter for a trunk of a family.
        load: returns the reference of a model.
        declare: lets the config.json in a directory declare the drafter.
        draft: end of the name of vLLM's class.
        lost: a tensor without which vLLM must not draft.
        has_plugin: whether vLLM on a CPU needs swiftlite's plugin.
    """

    of: Callable[[Any, str], Reference]
    load: Callable[[Path, str], Any]
    declare: Callable[[Path], Any]
    draft: str
    lost: str = "fc.weight"
    has_plugin: bool = False


def _eagle3(version: str) -> Kind:
    return Kind(
        of=lambda trunk, family: Eagle3Reference.of(trunk, family, FEATURES, version),
        load=Eagle3Reference.load,
        declare=lambda directory: eagle3_reference.declare(directory, version, FEATURES),
        draft="Eagle3LlamaForCausalLM",
        lost="midlayer.hidden_norm.weight",
    )


def _block(layers: int, rank: int = 0) -> Kind:
    return Kind(
        of=lambda trunk, family: DFlashReference.of(trunk, family, FEATURES, layers, rank),
        load=DFlashReference.load,
        declare=lambda directory: dflash_reference.declare(directory, FEATURES, layers, rank),
        draft="Qwen3DSparkForCausalLM" if rank else "DFlashQwen3ForCausalLM",
        has_plugin=bool(rank),
    )


KINDS = {
    "eagle3.0": _eagle3("3.0"),
    "eagle3.1": _eagle3("3.1"),
    "dflash": _block(2),
    "dflash, one layer": _block(1),
    "dspark": _block(2, RANK),
    "dspark, one layer": _block(1, RANK),
    "mtp_features": Kind(
        of=lambda trunk, family: FeatureReference.of(trunk, family, HEAD_FEATURES),
        load=FeatureReference.load,
        declare=partial(feature_reference.declare, features=HEAD_FEATURES),
        draft="MtpFeaturesEagle3",
        lost="mtp.fc_first.weight",
        has_plugin=True,
    ),
}


def sizes_of(family: str) -> dict[str, Any]:
    sizes = {"num_hidden_layers": LAYERS, **SIZES.get(family, {})}
    if "sliding_window" in sizes:
        sizes["sliding_window"] = None
    if family == "smollm3":
        sizes["no_rope_layers"] = [0, 1, 1, 0]
    return sizes


def write_drafted(directory: Path, kind: str, family: str, vocabulary: str = "") -> list[list[int]]:
    """Write a model whose drafts are often correct, and return prompts.

    Args:
        vocabulary: the draft vocabulary as config.json has it.
    """

    def draft_as(reference: Reference) -> Reference:
        return KINDS[kind].of(reference.trunk, family)

    prompts = write_trained(directory, family, 1, family == "llama", 3, draft_as, **sizes_of(family))
    KINDS[kind].declare(directory)
    if vocabulary:
        config = json.loads((directory / "config.json").read_text())
        (directory / "config.json").write_text(json.dumps(config | {"mtp_draft_vocab": vocabulary}))
    return prompts


def load_reference(directory: Path, kind: str, family: str) -> DrafterReference:
    return KINDS[kind].load(directory, family)


def exported(source: Path, directory: Path, mesh: Mesh) -> Path:
    """Export a model with a drafter as a run would; return the directory of the export."""
    run, out = directory / "run", directory / "hf"
    convert(ExportArgs(model=str(source), output_dir=str(run), to_mcore=True), mesh)
    convert(ExportArgs(model=str(run), output_dir=str(out), to_hf=True), mesh)
    return out
