"""Write FP8 in the layout of the model that a run started from.

A run of an FP8 model in DeepSeek's format trains on decoded numbers, and exports write them in 16 bits. `--quant_method
fp8 --quant_block N` with the model's own block size writes its format again: the same matrices are quantized, scales
have the same dtype, and config.json has the same quantization_config. A matrix whose numbers did not change keeps its
codes and scales, because another choice of scales would change numbers.
"""

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Self

import torch

from swiftlite.args.commands import ExportArgs
from swiftlite.base.errors import UserError
from swiftlite.base.log import logger
from swiftlite.bridge.encoding.blocks import Blocks
from swiftlite.bridge.encoding.encoding import WritableEncoding
from swiftlite.bridge.encoding.fp8 import WritableFp8
from swiftlite.bridge.encoding.index import format_of
from swiftlite.bridge.encoding.quantization import Quantization
from swiftlite.bridge.tensors import Checkpoint, ShardedFiles, some
from swiftlite.engines.quantized_heads import problems_of, quantized_head_problems
from swiftlite.export.schemes import QuantHeads
from swiftlite.families.resolved import HfModel, resolve
from swiftlite.families.serving.quantized import with_heads_kept
from swiftlite.plan.facts import model_of_run


def fp8_model_of(args: ExportArgs) -> HfModel | None:
    """Return the FP8 model that a run started from, if the export has its format and block size; otherwise None."""
    if args.quant_method != "fp8" or args.quant_block is None or not args.to_hf:
        return None
    name = model_of_run(Path(args.model))
    if name is None:
        logger.warning(
            "the model that the run started from is not found; if it was an FP8 model, its layout is not kept"
        )
        return None
    model = resolve(name)
    quantization, block = model.quantization, [args.quant_block, args.quant_block]
    if quantization is None or quantization.method != "fp8" or quantization.content.get("weight_block_size") != block:
        return None
    return model


class Fp8Source:
    """The layout and the tensors of an FP8 model, as a context manager.

    Args:
        model: result of `fp8_model_of`.
    """

    def __init__(self, model: HfModel):
        self._model = model
        self._checkpoint = Checkpoint(model.directory, format_of(model.config))
        self._quantization = Quantization(model.config["quantization_config"])
        self._has_powers_of_two = self._quantization.content.get("scale_fmt") == "ue8m0"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._checkpoint.__exit__(*exception)

    def chosen(self, export: HfModel, chosen: Collection[str], quant_heads: QuantHeads | None) -> set[str]:
        """Return the HF keys of the matrices of an export that are quantized: those of the model, except as
        `quant_heads` states for MTP heads.

        Args:
            chosen: the matrices that would be quantized without regard to the model.
        """
        mine = set(self._checkpoint.encoded)
        if quant_heads is None:
            return mine
        return mine - _in_heads(self._model, mine) | _in_heads(export, chosen)

    def encoding(self, key: str, encoding: WritableEncoding) -> WritableEncoding:
        """Return how a matrix is stored: as in the model, or with `encoding` if the model does not have it."""
        stored = self._checkpoint.encoded.get(key)
        if stored is None:
            return encoding
        assert isinstance(stored.encoding, Blocks)
        scales = stored.entries[1]
        return WritableFp8(**vars(stored.encoding), scale_dtype=scales.dtype, rounds_scales_up=self._has_powers_of_two)

    def quantization(self, export: HfModel, is_quantized: Mapping[str, bool]) -> Quantization:
        """Return the quantization of an export: that of the model. If it does not describe the export's heads,
        their plain modules are added.

        Args:
            export: the export before its quantization.
            is_quantized: for each module with a weight, whether it is quantized in the result.

        Raises:
            UserError: no list can describe the heads.
        """
        if not export.heads.layers or not problems_of(self._quantization, export, is_quantized):
            return self._quantization
        for problem in quantized_head_problems(self._model):
            logger.warning("%s: config.json does not describe the MTP heads: %s", self._model.name, problem)
        in_heads = (name for name in is_quantized if export.family.is_mtp(export.config, f"{name}.weight"))
        keeps_block = not any(is_quantized[name] for name in in_heads)
        listed = with_heads_kept(self._quantization, export.family, export.config, keeps_block=keeps_block)
        if problems := problems_of(listed, export, is_quantized):
            lines = "\n  ".join(some(problems))
            raise UserError(
                f"the quantization_config of {self._model.name} cannot describe the MTP heads:\n  {lines}",
                "add --quant_heads keep, which writes the heads in 16 bits",
            )
        return listed

    def copy_unchanged(self, key: str, tensor: torch.Tensor, files: ShardedFiles) -> bool:
        """Copy codes and scales of a matrix to files if they decode to these numbers.

        Numbers are compared in bfloat16, the dtype in which exports write decoded tensors.

        Returns:
            Whether they were copied.
        """
        if key not in self._checkpoint.encoded:
            return False
        before = self._checkpoint.read(key, torch.bfloat16)
        if not torch.equal(before, tensor.bfloat16()):
            return False
        for part in self._checkpoint.encoded[key].encoding.entries(key):
            for place, chunk in self._checkpoint.stored_chunks(part):
                files.write_stored(part, place, chunk)
        return True


def _in_heads(model: HfModel, keys: Iterable[str]) -> set[str]:
    """Return the HF keys that belong to MTP heads."""
    return {key for key in keys if model.family.is_mtp(model.config, key)}
