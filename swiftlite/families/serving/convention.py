"""Describe how an engine runs a family's MTP heads.

Engines differ in the inputs of heads and in the number of heads that they run. If heads were trained for other inputs,
engines do not report it: the text is still correct, but acceptance drops. Each convention was measured: an independent
implementation of the convention accepts the same number of draft tokens as the engine. docs/en/serving.md lists all
conventions.

An engine builds the modules of heads quantized or plain according to a list in quantization_config, which it compares
with its own names of the modules (`quantized.py`). A convention therefore also contains these names.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from swiftlite.base.drafting import Drafting

if TYPE_CHECKING:
    from swiftlite.families.family import Family


@dataclass(frozen=True)
class PluginClasses:
    """The classes of swiftlite's plugin for a family that an engine has no draft class for.

    A class without a difference is made from these names (`engines/loading/plugin_classes.py`). Other classes are
    defined in the plugin's module of model classes. "module:Class" is a class of the engine, whose module is relative
    to the engine's models, and "Class" is a class of the plugin's module.

    Attributes:
        architecture: name of the trunk's class in `architectures` of config.json.
        trunk: the engine's class of the trunk. If "", the plugin's module defines the trunk's class.
        layer: class of the decoder layer in a head.
        trunk_base: class of the plugin's module that is placed before the engine's class of the trunk.
        draft_base: class of the plugin's module that the draft class extends, if it is not `MtpDraft`. Without `layer`
            and `draft_base`, the plugin's module defines the draft class.
        is_fused: whether projections are fused in files like in the engine.
        expert_matrices: names, in files, of the gate, up and down matrices of experts; () without experts, or if the
            draft's class in the plugin's module states how they are loaded.
    """

    architecture: str
    trunk: str = ""
    layer: str = ""
    trunk_base: str = "Trunk"
    draft_base: str = ""
    is_fused: bool = False
    expert_matrices: tuple[str, ...] = ()


@dataclass(frozen=True)
class Convention:
    """The way an engine drafts with the heads of a family.

    Attributes:
        draft: name of the engine's class that runs the heads.
        heads: which of several heads draft. "each": each head drafts in its step. "first": the first head drafts in
            every step. "last": all heads are loaded into the same parameters, so the last head drafts in every step.
            "one": checkpoints with several heads are not supported.
        drafting: inputs of the heads.
        drafts_once: whether the heads draft only one token per step.
        block: prefix of the names that the engine gives to the modules in the decoder layer of head {head}. The number
            {layer} follows after the trunk's layers.
        quantizes: names of further modules that the engine quantizes unless they are listed: projections that join
            embedding and hidden state, and routers.
        plain: names, in the decoder layer, of modules that the engine never quantizes.
        renames: maps prefixes of the modules in the decoder layer, as in files, to the engine's. Only prefixes that
            differ are listed.
        classes: the classes of swiftlite's plugin; None if the engine has a draft class.
        has_own_names: whether the names of modules differ from those in files, so that an engine that takes the
            quantized modules of gptq from the files (`Matching.reads_files`) does not find those of the heads.
        needs_torchvision: whether the engine's classes import torchvision, even without images.
        lacks_amx_int8: whether the engine's kernel for 8-bit integers on CPUs with AMX does not support the family.
        needs_gpu_backend: whether the engine refuses the family unless `attention_backend` has the name of a GPU's
            backend, also on a CPU.
        model_type: the `model_type` for which the engine has the draft class; "": that of the family.
    """

    draft: str
    heads: Literal["each", "first", "last", "one"] = "each"
    drafting: Drafting = Drafting()
    drafts_once: bool = False
    block: str = "mtp.layers.{head}."
    quantizes: tuple[str, ...] = ()
    plain: tuple[str, ...] = ()
    renames: Mapping[str, str] = field(default_factory=dict)
    classes: PluginClasses | None = None
    has_own_names: bool = False
    needs_torchvision: bool = False
    lacks_amx_int8: bool = False
    needs_gpu_backend: bool = False
    model_type: str = ""

    def num_drafting(self, num_mtp_heads: int) -> int:
        """Return how many of a checkpoint's MTP heads draft."""
        if self.heads == "each":
            return num_mtp_heads
        return min(num_mtp_heads, 1)


@dataclass(frozen=True)
class Serving:
    """The ways in which engines run a family.

    Attributes:
        vllm: how vLLM drafts (`vllm.py`); None if it was not measured. The inputs of heads are those in
            `MtpLayout.drafting`, which training uses by default.
        sglang: how SGLang drafts (`sglang.py`); None if it was not measured.
        llamacpp: the architecture of llama.cpp that runs the trunk and the heads (`gguf/architectures.py`); "" if none
            does.
        transformers: name of the function that maps an `HfModel` to the class and the config of its trunk; "" if
            transformers finds both by `model_type`.
    """

    vllm: Convention | None = None
    sglang: Convention | None = None
    llamacpp: str = ""
    transformers: str = ""


@dataclass(frozen=True)
class Matching:
    """The way in which an engine compares names of its modules with the lists of a quantization_config.

    Attributes:
        label: the engine's official name.
        reads_files: whether the engine takes a missing list of gptq or awq from the files.
        compares_parts: whether an entry without a regular expression also matches a part of a name between dots, such
            as its end; otherwise it must be the whole name.
    """

    label: str
    reads_files: bool
    compares_parts: bool


def as_trained(family: "Family") -> Convention:
    """Return the convention of the engine transformers (`engines/transformers/mtp_heads.py`).

    Each head drafts in its step, with the same inputs as in training.
    """
    return Convention("MtpHead", "each", family.mtp.drafting)
