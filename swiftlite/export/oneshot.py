"""Quantize a trunk with llm-compressor (GPTQ, AWQ), in an environment that contains llm-compressor and not swiftlite.

    python -I oneshot.py JOB.json

`calibrated.py` starts this program and writes JOB.json. Its result is a Hugging Face directory in the format of
compressed-tensors. With exit code 3, the last line of the output states why the model cannot be quantized.
"""

import importlib.util
import json
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import torch
from llmcompressor import oneshot  # pyright: ignore[reportMissingImports]
from llmcompressor.modeling.moe.linearize import load_quantizable_moe  # pyright: ignore[reportMissingImports]
from llmcompressor.modifiers.gptq import GPTQModifier  # pyright: ignore[reportMissingImports]
from llmcompressor.modifiers.quantization import QuantizationModifier  # pyright: ignore[reportMissingImports]
from llmcompressor.modifiers.transform.awq import AWQModifier  # pyright: ignore[reportMissingImports]
from llmcompressor.pipelines.cache import IntermediatesCache  # pyright: ignore[reportMissingImports]
from safetensors import safe_open
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

REFUSED = 3


class CacheOnCpu(IntermediatesCache):
    """A cache without pinned memory, which torch supports only with an accelerator."""

    def pin_memory(self, *arguments: Any) -> None:
        pass


class AwqOnCpu(AWQModifier):
    """AWQ on a machine without an accelerator. llm-compressor 0.14 pins memory there as well, and fails."""

    def _setup_activation_cache_hooks(self) -> None:
        super()._setup_activation_cache_hooks()
        for parent in self._parent_args_cache:
            self._parent_args_cache[parent] = CacheOnCpu(None, self.offload_device)


def refuse(problem: str) -> NoReturn:
    print(problem, flush=True)
    sys.exit(REFUSED)


def main(job: dict[str, Any]) -> None:
    """Quantize a model.

    Args:
        job: `model` and `output_dir` are directories. `modules` are the names of the linear layers to quantize, and
            `scheme` the settings of compressed-tensors for them. `rows` are lists of token ids. `method` is gptq or
            awq, `dtype` the dtype of the computation, and `batch_size` the maximum number of rows computed together.
    """
    model = load(job)
    modules = set(job["modules"])
    linear = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    if missing := sorted(modules.difference(linear)):
        refuse(f"{type(model).__name__} has no linear layer {missing[0]}")
    check_weights(model, job)
    settings = {
        "config_groups": {"group_0": {"targets": ["Linear"], **job["scheme"]}},
        "ignore": [name for name in linear if name not in modules],
    }
    recipe = [GPTQModifier(**settings)]
    if job["method"] == "awq":
        awq = AWQModifier() if torch.accelerator.is_available() else AwqOnCpu()
        recipe = [awq, QuantizationModifier(**settings)]
    dataset: Any = list(batches(job["rows"], job["batch_size"]))
    rows = DataLoader(dataset, batch_size=None)
    # The tokenizer would only be copied to the result.
    oneshot(model=model, recipe=recipe, dataset=rows, processor=lambda: None)
    model.save_pretrained(job["output_dir"], save_compressed=True)


def load(job: dict[str, Any]) -> Any:
    options = {"dtype": getattr(torch, job["dtype"]), "local_files_only": True}
    has_experts = any(".experts." in name for name in job["modules"])
    if has_experts and importlib.util.find_spec("torchvision") is None:  # imported with llm-compressor's expert layers
        refuse(f"models with experts require torchvision: {sys.executable} -m pip install torchvision")
    try:
        if not has_experts:
            return AutoModelForCausalLM.from_pretrained(job["model"], **options)
        with load_quantizable_moe():  # one linear layer for each projection of an expert
            return AutoModelForCausalLM.from_pretrained(job["model"], **options)
    except (ValueError, KeyError) as error:  # transformers has no class for the model_type
        refuse(f"transformers cannot load the model: {str(error).splitlines()[0]}")


def check_weights(model: Any, job: dict[str, Any]) -> None:
    """Check that the loaded weights are those of the files; transformers initializes others randomly."""
    modules = set(job["modules"])
    for file in sorted(Path(job["model"]).glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            for key in tensors.keys():  # noqa: SIM118 - not iterable
                module = key.removesuffix(".weight")
                if module in modules:
                    loaded = model.get_submodule(module).weight
                    if not torch.equal(loaded, tensors.get_tensor(key).to(loaded.dtype)):
                        refuse(f"transformers changes {key} while loading")


def batches(rows: list[list[int]], size: int) -> Iterator[dict[str, torch.Tensor]]:
    """Yield batches of rows of equal length, because padding would distort the statistics of activations."""
    by_length = defaultdict(list)
    for row in rows:
        by_length[len(row)].append(row)
    for same in by_length.values():
        for start in range(0, len(same), size):
            ids = torch.tensor(same[start : start + size])
            yield {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
