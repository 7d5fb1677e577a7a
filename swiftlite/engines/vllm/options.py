"""Derive vLLM's speculative options from the checkpoint, and set the options that vLLM requires on a CPU.

vLLM must be installed; it is imported when a function is called.
"""

import os
import platform
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from swiftlite.base.errors import UserError
from swiftlite.base.heads import MTP
from swiftlite.base.log import logger
from swiftlite.bridge.hf_config import DRAFT_FOLDER
from swiftlite.engines.draft_schedule import DraftSchedule
from swiftlite.engines.engine import EngineConfig
from swiftlite.engines.plugin import require_plugin
from swiftlite.engines.quantized_heads import check_quantized_heads
from swiftlite.engines.served_model import check_draft_folder, log_fed_otherwise, require_heads
from swiftlite.engines.vllm.info import VLLM
from swiftlite.engines.vllm.stock_draft import draft_folder
from swiftlite.families import dflash
from swiftlite.families.attention import LatentAttention
from swiftlite.families.drafters import SERVED
from swiftlite.families.linear_attention import GatedDeltaNet
from swiftlite.families.mamba import Mamba2
from swiftlite.families.mlp import MixtureOfExperts, is_gated
from swiftlite.families.resolved import HfModel

_OF_MODELOPT = ("modelopt", "modelopt_fp4", "modelopt_mxfp8", "modelopt_mixed")
API_KEYS = "SWIFTLITE_API_KEYS"
"""Environment variable with several keys of a server as a JSON list, see `api_keys.py`."""


def speculative_config(config: EngineConfig) -> dict[str, Any] | None:
    """Return vLLM's speculative options, after checking that vLLM drafts with the trained heads.

    Returns:
        vLLM's `speculative_config`; None without speculation.

    Raises:
        UserError: the heads or the files in `draft/` are incomplete, vLLM would run another head than the one trained
            for a draft step, or it would build a module of the heads quantized that the files do not have quantized, or
            the reverse.
    """
    from swiftlite.engines.vllm.plugin import DRAFTS

    model, given = config.model, config.speculative_config
    if given is not None and given.get("method") != "mtp":
        # vLLM would load the model twice and accept all drafts of the copy, each of which costs a pass of the model.
        if "model" in given and Path(given["model"]).resolve() == model.directory.resolve():
            raise UserError(
                "--vllm_speculative_config uses the model as its own draft, which is not faster",
                'use {"method": "mtp", "num_speculative_tokens": 1} for its heads, or remove the option',
            )
        return given  # another drafter, which does not use the heads
    num_tokens = asked_tokens(config)
    if num_tokens == 0:
        return None
    require_heads(model, SERVED)
    check_trunk_of_drafter(model)
    if folder := draft_folder(model):
        check_draft_folder(folder)
    check_quantized_heads(model, VLLM)
    log_fed_otherwise(model, VLLM)
    known = VLLM.convention_for(model.family)
    draft = known.draft
    # vLLM would load the first head and draft all tokens with it.
    if known.heads == "one" and model.heads.layers > 1:
        raise UserError(
            f"vLLM's {draft} supports one MTP head, but the checkpoint has {model.heads.layers}",
            "use --infer_backend transformers, which runs every head",
        )
    # The folders of other drafters have an output layer for their draft vocabulary (stock_draft.py).
    has_own_output = model.heads.kind != MTP
    if model.heads.draft_vocab and draft not in DRAFTS.values() and not has_own_output:
        raise UserError(
            f"vLLM's {draft} does not support the draft vocabulary of the checkpoint's heads",
            "use --infer_backend transformers or sglang, or train the heads with --draft_vocab 0",
        )
    if given is None and config.draws_drafts:
        # Drafts that are sampled from the head's distribution are accepted more often at temperatures above 0.
        given = {"draft_sample_method": "probabilistic"}
    if config.draft_schedule is not None:
        given = {**(given or {}), **schedule_options(config.draft_schedule)}
    # The user's options have precedence, except for the number, which was checked.
    return {**mtp_options(model), **(given or {}), "num_speculative_tokens": num_tokens_to_draft(model, num_tokens)}


def mtp_options(model: HfModel) -> dict[str, Any]:
    """Return vLLM's options for drafting with the heads of a model, or another drafter: from their own folder, if they
    have one."""
    method = {"method": model.family.drafter(model.config).vllm_method or model.heads.kind}
    folder = draft_folder(model)
    if folder is None:
        return method
    return {**method, "model": str(folder.absolute())}


def check_trunk_of_drafter(model: HfModel) -> None:
    """Check that vLLM drafts with the drafter of a model, if it is not MTP heads.

    Raises:
        UserError: vLLM's class of the trunk does not return inputs of decoder layers, or the drafter has no folder.
    """
    kind = model.heads.kind
    if kind == MTP:
        return
    trunks = model.family.drafter(model.config).vllm_trunks
    if model.family.name not in trunks:
        raise UserError(
            f"vLLM is not supported for the drafter {kind!r} of {model.family.name}",
            f"use --infer_backend transformers; supported are {', '.join(trunks)}",
        )
    is_windowed = any(each.window is not None for each in model.family.architecture(model.config).attentions)
    if is_windowed and not model.heads.has_output_layer:
        # Measured with windows of 6 tokens: vLLM 0.32 accepts fewer drafts than the reference and transformers.
        raise UserError(
            f"vLLM is not supported for the drafter {kind!r} of a trunk with a sliding window",
            "use --infer_backend transformers",
        )
    if draft_folder(model) is None:
        raise UserError(f"{model.directory} has no {DRAFT_FOLDER}/", "export the run again: swiftlite export --to_hf")


def require_plugin_for(config: EngineConfig) -> None:
    """Check that vLLM finds swiftlite's plugin, if it needs the plugin for the model or the options.

    Raises:
        UserError: the plugin is missing.
    """
    if needs_plugin(config.model) or config.ngrams is not None:
        require_plugin(VLLM)


def needs_plugin(model: HfModel) -> bool:
    """Return whether vLLM drafts with a class of swiftlite's plugin, on this machine."""
    # Without a folder, heads are in the files of the trunk, from which only the plugin's classes separate them.
    if draft_folder(model) is None or model.family.drafter(model.config).needs_plugin:
        return True
    if model.heads.kind != dflash.DSPARK:
        return False
    from swiftlite.engines.vllm.plugin import has_multi_module_runner

    return not has_multi_module_runner()


def check_heads_can_be_updated(model: HfModel) -> None:
    """Check that new weights of the heads reach the draft model.

    Raises:
        UserError: vLLM drafts from a folder with a class that ignores tensors with the names of the family.
    """
    if draft_folder(model) is not None:
        hint = "use --speculative none"
        if model.heads.kind == MTP:
            hint += ", or train the heads with --draft_for vllm"
        raise UserError(f"vLLM cannot receive new weights of the heads in {DRAFT_FOLDER}/", hint)


def with_ngrams(config: EngineConfig, speculative: dict[str, Any] | None) -> dict[str, Any]:
    """Return vLLM's options for drafting: `speculative_config`, and those for drafts from the text, if there are any.

    Args:
        speculative: result of `speculative_config`.

    Raises:
        UserError: vLLM does not support drafts for this model, or drafts from the text in addition to those of heads,
            on this machine.
    """
    from swiftlite.engines.vllm import ngram_drafts
    from swiftlite.engines.vllm.plugin import has_multi_module_runner

    if speculative is not None and (reason := why_no_drafts(config.model)):
        raise UserError(reason, "use --speculative none, --infer_backend transformers, or a machine with a GPU")
    ngrams = config.ngrams
    if ngrams is None or speculative is None:
        return {"speculative_config": speculative}
    if has_multi_module_runner():
        raise UserError(
            "--speculative mtp,ngram requires vLLM's older model runner, which it uses without Triton",
            "use --speculative mtp, or set VLLM_USE_V2_MODEL_RUNNER=0",
        )
    of_heads = speculative["num_speculative_tokens"]
    layers = max(config.model.heads.layers, 1)
    # vLLM requires a multiple of the number of heads.
    most = -(-max(of_heads, ngrams.max_tokens) // layers) * layers
    return {
        "speculative_config": {**speculative, "num_speculative_tokens": most},
        "additional_config": ngram_drafts.settings_of(ngrams, of_heads),
        # With asynchronous scheduling, vLLM counts drafts that were not made (`ngram_drafts.py`).
        "async_scheduling": False,
    }


def asked_tokens(config: EngineConfig) -> int | None:
    """Return the number of draft tokens per step that the user set; None for the default."""
    if config.speculative_config is None:
        return config.num_speculative_tokens
    return config.speculative_config.get("num_speculative_tokens")


def num_tokens_to_draft(model: HfModel, num_tokens: int | None) -> int:
    """Return the number of draft tokens per step; None means the number that the heads were trained for.

    Raises:
        UserError: vLLM would run another head than the one trained for a draft step.
    """
    from swiftlite.engines.vllm.plugin import check_draft_steps

    num_drafting = num_drafting_heads(model)
    if num_tokens is None:
        if num_drafting < model.heads.layers:
            logger.warning(
                "vLLM runs only the first of the %d MTP heads on this machine: 1 draft token per step",
                model.heads.layers,
            )
            return num_drafting
        # Heads that were trained with --mtp_unroll draft more tokens than there are heads.
        num_tokens = model.heads.drafts
    try:
        check_draft_steps(num_tokens, model.heads.layers, num_drafting == model.heads.layers)
    except ValueError as error:
        raise UserError(str(error), "or use --infer_backend transformers, which runs every head") from None
    return num_tokens


def num_drafting_heads(model: HfModel) -> int:
    """Return the number of MTP heads that the installed vLLM runs. Its older model runner runs only the first head."""
    from swiftlite.engines.vllm.plugin import has_multi_module_runner

    can_draft = VLLM.convention_for(model.family).num_drafting(model.heads.layers)
    if has_multi_module_runner():
        return can_draft
    return min(can_draft, 1)


def schedule_options(schedule: DraftSchedule) -> dict[str, Any]:
    """Return vLLM's options for a draft schedule, as ranges [first, last, tokens].

    A step with `first` to `last` requests drafts this number of tokens per request. For more requests than in the last
    range, vLLM uses the number of the last range.
    """
    if schedule.is_constant:
        return {}
    begins = list(schedule.numbers)
    # {1: 3, 8: 1, 32: 0} becomes [1, 7, 3], [8, 31, 1] and [32, 32, 0].
    ends = [begin - 1 for begin in begins[1:]] + begins[-1:]
    ranges = [list(each) for each in zip(begins, ends, schedule.numbers.values(), strict=True)]
    return {"num_speculative_tokens_per_batch_size": ranges}


def is_on_cpu() -> bool:
    """Return whether the installed vLLM computes on the CPU."""
    from vllm.platforms import current_platform

    return current_platform.is_cpu()


def has_amx() -> bool:
    """Return whether the installed vLLM computes on a CPU with AMX."""
    import torch

    return is_on_cpu() and torch.cpu._is_amx_tile_supported()


def attention_options(model: HfModel, torch_dtype: str) -> dict[str, Any]:
    """Return options that vLLM requires to compute the model's kind of attention correctly.

    Raises:
        UserError: vLLM does not support linear attention in `torch_dtype`, or sparse attention or experts without gates
            on this machine, or a package that vLLM's classes import is missing.
    """
    known = model.family.serving.vllm
    # Some modules of vLLM import torchvision for texts as well.
    needs_torchvision = model.family.vision is not None or (known is not None and known.needs_torchvision)
    if needs_torchvision and find_spec("torchvision") is None:
        raise UserError(
            f"vLLM requires torchvision for {model.family.name}, which is not installed",
            "install the build for this torch (PyPI's requires CUDA), or use --infer_backend transformers",
        )
    architecture = model.family.architecture(model.config)
    attentions, mlps = architecture.attentions, [layer.mlp for layer in architecture.layers]
    options: dict[str, Any] = {}
    if is_on_cpu() and any(attention.indexer is not None for attention in attentions):
        raise UserError(
            f"vLLM on a CPU does not support the sparse attention of {model.family.name}",
            "use --infer_backend transformers, or a machine with a GPU",
        )
    if is_on_cpu() and any(isinstance(attention, LatentAttention) for attention in attentions):
        # The CPU's rotary kernel of 0.32 treats the rotary part of a query as a contiguous tensor, so all logits except
        # those of the first token are wrong. Yarn does not use this kernel.
        options["compilation_config"] = {"custom_ops": ["-rotary_embedding"]}
        if torch_dtype != "bfloat16":
            # On a CPU with AMX 0.32 always selects AMX kernels, which only support bfloat16.
            options["attention_backend"] = "CPU_MLA"
    if any(attention.is_recurrent for attention in attentions):
        # A recurrent state covers all previous tokens, so prefixes cannot share it.
        options["enable_prefix_caching"] = False
    if is_on_cpu() and torch_dtype != "bfloat16" and any(isinstance(kind, GatedDeltaNet) for kind in attentions):
        raise UserError(
            f"--torch_dtype {torch_dtype} is not supported by vLLM's linear attention on a CPU",
            "use --torch_dtype bfloat16, or --infer_backend transformers",
        )
    if is_on_cpu() and not all(is_gated(part.activation) for part in mlps if isinstance(part, MixtureOfExperts)):
        raise UserError(
            f"vLLM on a CPU does not support the experts of {model.family.name}, which have no gate",
            "use --infer_backend transformers, or a machine with a GPU",
        )
    return options


def why_no_drafts(model: HfModel) -> str:
    """Return why vLLM cannot draft for a model on this machine; empty if it can.

    On a CPU, the convolution of vLLM 0.32 ignores how many drafts were accepted (mamba/ops/cpu/causal_conv1d.py), so
    that answers would be wrong.
    """
    kinds = model.family.architecture(model.config).attentions
    if is_on_cpu() and any(isinstance(kind, Mamba2) for kind in kinds):
        return f"vLLM on a CPU does not support drafts for the Mamba-2 layers of {model.family.name}"
    return ""


def check_quantization(model: HfModel) -> None:
    """Check that vLLM supports the format of a quantized model on this machine.

    Raises:
        UserError: vLLM does not support it, such as gptq with `sym` false.
    """
    quantization = model.quantization
    if quantization is None:
        return
    from vllm.model_executor.layers.quantization import get_quantization_config

    problem = ""
    content = dict(quantization.content)
    method = quantization.method
    if method == "modelopt":  # vLLM has a class for each kind of ModelOpt's formats
        # config.json says only "modelopt", so each class is asked, as vLLM does.
        named = [get_quantization_config(name).override_quantization_method(content, None) for name in _OF_MODELOPT]
        method = next(filter(None, named), method)
    try:
        get_quantization_config(method).from_config(content)
    except ValueError as error:
        problem = f"vLLM does not support its quantization_config: {error}"
    known = model.family.serving.vllm
    lacks_kernel = known is not None and known.lacks_amx_int8
    if lacks_kernel and quantization.format == "int-quantized" and has_amx():
        problem = f"vLLM's kernel for 8-bit integers on CPUs with AMX does not support {model.family.name}"
    if problem:
        raise UserError(
            f"--model {model.directory}: {problem}",
            "use --infer_backend transformers, or quantize the original model with swiftlite export --quant_method",
        )


def check_instructions(model: HfModel) -> None:
    """Check that this processor has the instructions of vLLM's kernels for the format of a quantized model.

    Without AVX-512, vLLM 0.32 loads a library without the kernel for packed integers (its platforms/cpu.py). Without
    VNNI, oneDNN adds two products of bytes in 16 bits, and too large sums are cut off
    (https://oneapi-src.github.io/oneDNN/dev_guide_int8_computations.html).

    Raises:
        UserError: vLLM's kernel for packed integers requires AVX-512, which the processor lacks.
    """
    quantization = model.quantization
    if quantization is None or not is_on_cpu() or platform.machine() != "x86_64":
        return
    import torch

    if quantization.packs_integers and not torch.cpu._is_avx512_supported():
        raise UserError(
            f"--model {model.directory}: vLLM's kernel for packed integers requires a processor with AVX-512",
            "use --infer_backend transformers or llamacpp, or a machine with a GPU",
        )
    if quantization.format == "int-quantized" and not torch.cpu._is_vnni_supported():
        logger.warning("vLLM computes 8-bit activations inaccurately on this processor, which lacks VNNI instructions")


def loading_options(model: HfModel, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return options with which vLLM reports parameters of a quantized model that stay uninitialized.

    vLLM 0.32 checks this by default only for models that are not quantized (model_loader/default_loader.py).

    Args:
        given: options of vLLM that the user set.

    Raises:
        UserError: vLLM does not support the format of the model.
    """
    check_quantization(model)
    check_instructions(model)
    # The extra config belongs to a loader, and another one may not accept this option.
    if not model.is_quantized or "load_format" in given:
        return {}
    return {"model_loader_extra_config": {"enable_weights_track": True}}


def with_backend_of_trunk(speculative: dict[str, Any] | None, attention: dict[str, Any]) -> dict[str, Any] | None:
    """Return the draft model's options with the trunk's attention backend.

    By default vLLM selects a backend for each model.

    Args:
        attention: result of `attention_options`.
    """
    backend = attention.get("attention_backend")
    if backend is None or speculative is None or speculative["method"] != "mtp":
        return speculative
    # The backend comes first, so that one in --vllm_speculative_config has precedence.
    return {"attention_backend": backend, **speculative}


def variables_on_cpu() -> dict[str, str]:
    """Return environment variables of vLLM on a CPU; variables that the user has set stay.

    The KV cache has 1 GB; vLLM's default is half of the machine's memory. On two cores, both of them compute: vLLM 0.32
    reserves one for its scheduler. Without the reservation, one request was served 1.4x as fast without drafts, and
    1.3x with drafts.
    """
    if not is_on_cpu():
        return {}
    variables = {"VLLM_CPU_KVCACHE_SPACE": "1"}
    if os.cpu_count() == 2:
        variables["VLLM_CPU_NUM_OF_RESERVED_CPU"] = "0"
    return {name: os.environ.get(name, value) for name, value in variables.items()}


def server_variables_on_cpu() -> dict[str, str]:
    """Return environment variables of vLLM's server on a CPU: those of `variables_on_cpu`, and on two cores those with
    which the engine computes in its own process.

    vLLM 0.32 starts another process for that, which imports vLLM again, because only in a new process it can set the
    number of OpenMP threads (its platforms/cpu.py). Here the server is the new process. With tensor parallelism, vLLM
    starts the processes nevertheless.
    """
    variables = variables_on_cpu()
    if variables and os.cpu_count() == 2:
        in_engine = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "2"}
        variables |= {name: os.environ.get(name, value) for name, value in in_engine.items()}
    return variables
