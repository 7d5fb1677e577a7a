"""Write the adapters of a run as a directory that PEFT reads (`swiftlite export --to_hf --merge_lora false`)."""

from collections.abc import Sequence
from itertools import chain
from pathlib import Path

import torch
import torch.distributed as dist

from swiftlite.base.errors import UserError
from swiftlite.base.heads import Heads
from swiftlite.base.lora import Lora
from swiftlite.bridge.adapters.files import AdapterBase, write_adapter, write_heads
from swiftlite.bridge.adapters.rows import adapted_modules, adapted_rows, saved_names
from swiftlite.bridge.rows import Row
from swiftlite.bridge.saving import stream_hf
from swiftlite.families.resolved import HfModel
from swiftlite.model.gpt import GPTModel
from swiftlite.model.layers.lora import gather_adapters, gather_saved, merged

_MERGE = "remove --merge_lora to merge the adapters into the weights"


def check_can_be_written(checkpoint: Path, lora: Lora | None, hf_model: HfModel, heads: Heads) -> None:
    """Check that PEFT can represent every adapter and every module that was trained in full.

    Raises:
        UserError: PEFT cannot represent a part; the error names it.
    """
    if lora is None:
        raise UserError(f"--merge_lora false: {checkpoint} has no adapters; it was trained in full", _MERGE)
    trunk = _trunk_rows(hf_model)
    modules = list(chain.from_iterable(adapted_modules(row, lora) for row in adapted_rows(trunk, lora)))
    why = ""
    if not modules:
        why = "only the MTP heads have adapters"
    elif any(".experts." in module for module in modules):
        why = "adapters on experts are not supported, which transformers stores as one tensor per layer"
    elif hf_model.family.memory_names or hf_model.family.language_model:
        why = f"transformers renames the layers of {hf_model.family.name} when it loads the model"
    elif "embedding.word_embeddings.weight" in saved_names(lora, trunk) and hf_model.is_tied:
        why = "the embedding was trained, and PEFT would untie it from the output layer"
    elif heads.draft_vocab:
        why = "heads with a draft vocabulary require the complete model"
    if why:
        raise UserError(f"--merge_lora false is not supported by PEFT here: {why}", _MERGE)


def write(
    chunks: Sequence[GPTModel], directory: Path, lora: Lora, base: AdapterBase, hf_model: HfModel, heads: Heads
) -> None:
    """Write the directory of adapters. Collective.

    MTP heads are always written completely, with their adapters merged.
    """
    rows = _trunk_rows(hf_model)
    trunk_tensors = gather_adapters(chunks, lora, rows)
    saved = gather_saved(chunks, lora, rows)
    head_tensors: dict[str, torch.Tensor] = {}
    with merged(chunks):
        for bucket in stream_hf(chunks, hf_model.family, hf_model.config, "heads"):
            head_tensors |= bucket
    if dist.get_rank() == 0:
        task_type = "SEQ_CLS" if hf_model.family.is_reward_model else "CAUSAL_LM"
        write_adapter(directory, lora, base, trunk_tensors, saved, task_type)
        if heads.layers:
            write_heads(directory, base, head_tensors, heads, hf_model.config["model_type"])


def _trunk_rows(hf_model: HfModel) -> list[Row]:
    return hf_model.family.rows(hf_model.config, 0)
