"""Add formats to SGLang's weight updates, with which a worker loads safetensors files into its running model.

`plugin.py` registers the formats and `weight_channel.py` uses them. SGLang's own formats do not report missing tensors,
and a tensor of a wrong shape ends the worker.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from safetensors.torch import load_file
from torch import nn

from swiftlite.engines.loading.load_tracker import RunningLoad

LOAD, KEEP, FINISH = "swiftlite_load", "swiftlite_keep", "swiftlite_finish"
"""The three formats: LOAD loads a file into the model, KEEP keeps the tensors of a file, and FINISH loads the kept
tensors and reports missing ones."""
# SGLang shares these parameters of the target with every MTP draft (`set_embed_and_head` of the draft classes).
SHARED = ("embed_tokens.weight", "lm_head.weight")


@dataclass
class _Transfer:
    filling: RunningLoad = field(default_factory=RunningLoad)
    kept: dict[str, torch.Tensor] = field(default_factory=dict)
    unread: dict[str, torch.Tensor] = field(default_factory=dict)

    def load(self, model: Any, tensors: dict[str, torch.Tensor]) -> None:
        # DeepSeek's loader concatenates q_a_proj and kv_a_proj_with_mqa, and skips one if the other is missing.
        # Therefore unread tensors are passed again with the next file.
        tensors = self.unread | tensors
        self.filling.expect(tensors)
        with torch.no_grad(), self.filling:
            model.load_weights(tensors.items())
        self.unread = {name: tensors[name] for name in self.filling.take_unread()}

    def problems(self, model: nn.Module, part: str) -> list[str]:
        elsewhere: tuple[str, ...] = ()
        if part == "draft":
            elsewhere = SHARED
        unfilled = self.filling.unfilled(model, elsewhere)
        problems = [f"not read: {name}" for name in self.unread] + [f"not filled: {name}" for name in unfilled]
        return problems + self.filling.cast_problems()


_transfers: WeakKeyDictionary[nn.Module, _Transfer] = WeakKeyDictionary()
"""The transfers in progress, by model."""


def load_at_once(result: bool, weight: torch.Tensor) -> bool:
    """Return whether SGLang may copy a weight in a separate thread. It may not during a transfer.

    `RunningLoad` cannot track copies in other threads.

    SGLang calls this hook after should_async_load (sglang/srt/model_loader/utils.py of 0.5.23), which loaders of
    DeepSeek use.
    """
    return result and not _transfers


def take(
    stock: Callable[..., tuple[bool, str]],
    updater: Any,
    named_tensors: Sequence[tuple[str, torch.Tensor]],
    load_format: str | None = None,
) -> tuple[bool, str]:
    """Replace WeightUpdater.update_weights_from_tensor (`stock`) for the three formats LOAD, KEEP and FINISH.

    Args:
        named_tensors: one tensor, of which only the name is used. With LOAD and KEEP it is the path of a safetensors
            file; with FINISH, the model that received the weights, target or draft.

    Returns:
        Whether it succeeded, and a message. Nothing is raised, because an exception would end SGLang.
    """
    # SGLang's own formats stay available to other programs.
    if load_format not in (LOAD, KEEP, FINISH):
        return stock(updater, named_tensors=named_tensors, load_format=load_format)
    model = updater.get_model()
    [(word, _)] = named_tensors
    transfer = _transfers.setdefault(model, _Transfer())
    try:
        if load_format == LOAD:
            transfer.load(model, load_file(word))
        elif load_format == KEEP:
            transfer.kept |= load_file(word)
        else:
            if transfer.kept:
                transfer.load(model, transfer.kept)
            # After the load, during which `load_at_once` must see the transfer.
            del _transfers[model]
            if problems := transfer.problems(model, word):
                return False, f"{type(model).__name__}:\n  " + "\n  ".join(problems)
    except Exception as error:  # any error of a model's loader
        # A failed transfer leaves nothing behind that the next one or `load_at_once` would see.
        _transfers.pop(model, None)
        return False, f"{type(model).__name__}: {error}"
    return True, "Success"
