"""Quantize a trunk with GPTQ or AWQ, which llm-compressor computes with calibration rows (`oneshot.py`).

llm-compressor runs in a separate process and environment (`runtime/llm_compressor.py`). It reads the model and the
token ids of the rows, and writes the quantized matrices to a temporary directory. Heads, a vision tower and all other
tensors come from the model's own files.
"""

import json
import random
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from swiftlite.args.commands import ExportArgs
from swiftlite.base.errors import UserError
from swiftlite.base.log import logger
from swiftlite.bridge.encoding.encoding import WritableEncoding
from swiftlite.bridge.entry import Entry
from swiftlite.bridge.placement import decoder_layer_of
from swiftlite.bridge.tensors import Checkpoint
from swiftlite.data.dataset import load_train_val
from swiftlite.data.encoder import ConversationEncoder
from swiftlite.data.rows.conversation import parse_row
from swiftlite.data.template import ChatTemplate, load_tokenizer
from swiftlite.export.schemes import Scheme
from swiftlite.families.resolved import HfModel
from swiftlite.runtime.llm_compressor import LLM_COMPRESSOR, run

_SEED = 42
# For other layers, llm-compressor 0.14 scales the input of a router without changing the router.
_AWQ_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Calibrated:
    """The result of llm-compressor.

    Attributes:
        checkpoint: the quantized trunk. Its head, if any, is not used.
        changes_norms: whether norms and biases in decoder layers have changed, as with AWQ.
    """

    checkpoint: Checkpoint
    changes_norms: bool

    def tensors(self, model: HfModel, encodings: Mapping[str, WritableEncoding]) -> dict[str, dict[str, Entry]]:
        """Return the stored tensors that replace tensors of the model, by the key of the replaced tensor.

        Args:
            encodings: encodings of the trunk's matrices, with which the result is compared.

        Raises:
            UserError: a matrix is not quantized.
        """
        stored = self.checkpoint.stored
        replaced = {}
        for key, encoding in encodings.items():
            names = encoding.entries(key)
            if any(name not in stored for name in names):
                raise UserError(f"llm-compressor did not quantize {key}", "use --quant_method rtn, and report this")
            replaced[key] = {name: stored[name] for name in names}
        if self.changes_norms:
            for row in model.family.trunk_rows(model.config):
                if decoder_layer_of(row.mcore) is not None:
                    replaced |= {key: {key: stored[key]} for key in row.hf if key in stored and key not in replaced}
        return replaced


@contextmanager
def calibrated(
    args: ExportArgs, model: HfModel, matrices: Mapping[str, Entry], scheme: Scheme, directory: Path
) -> Iterator[Calibrated]:
    """Run llm-compressor, and yield its result.

    Args:
        matrices: the matrices of the trunk to quantize.
        directory: temporary directory, which does not exist.

    Raises:
        UserError: llm-compressor does not support the model, or failed.
    """
    method = str(args.quant_method)
    if method == "awq":
        _check_awq(model, matrices)
    rows = calibration_rows(args, model)
    directory.mkdir()
    job = {
        "model": str(model.directory.absolute()),
        "output_dir": str(directory / "result"),
        "method": method,
        "modules": [key.removesuffix(".weight") for key in matrices],
        "scheme": {name: scheme.group[name] for name in ("weights", "input_activations")},
        "dtype": str(_common_dtype(matrices)).removeprefix("torch."),
        "rows": rows,
        "batch_size": args.quant_batch_size,
    }
    file = directory / "job.json"
    file.write_text(json.dumps(job), encoding="utf-8")
    logger.info("%s of %d matrices with %d rows of %s", method, len(matrices), len(rows), ", ".join(args.dataset))
    program = Path(__file__).with_name("oneshot.py")
    run([str(LLM_COMPRESSOR.interpreter), "-I", "-W", "ignore", str(program), str(file)], method)
    with Checkpoint(directory / "result") as checkpoint:
        yield Calibrated(checkpoint, changes_norms=method == "awq")


def calibration_rows(args: ExportArgs, model: HfModel) -> list[list[int]]:
    """Return the token ids of the rows of --dataset, encoded as in training, or of a random sample of them.

    Raises:
        UserError: a row cannot be read or has images.
    """
    tokenizer = load_tokenizer(model.directory)
    template = ChatTemplate(tokenizer, vocab_size=model.config["vocab_size"])
    no_images = f"llm-compressor calibrates --quant_method {args.quant_method} without images"
    encoder = ConversationEncoder(template, args.max_length, "right", partial(parse_row, no_images=no_images))
    samples = load_train_val(encoder, args.dataset, offered=vars(args)).train
    if len(samples) > args.quant_n_samples:
        chosen = random.Random(_SEED).sample(range(len(samples)), args.quant_n_samples)
        samples = [samples[number] for number in sorted(chosen)]
    return [sample.input_ids.tolist() for sample in samples]


def _check_awq(model: HfModel, matrices: Mapping[str, Entry]) -> None:
    """Check that llm-compressor can smooth the layers of a model without changing what they compute.

    Raises:
        UserError: the model has experts or other kinds of attention.
    """
    for key in matrices:
        *_, parent, name = key.removesuffix(".weight").split(".")
        if name not in _AWQ_PROJECTIONS or parent not in ("self_attn", "mlp"):
            raise UserError(
                f"--quant_method awq does not support {model.family.name}, because of {key}",
                "use --quant_method gptq or rtn",
            )


def _common_dtype(matrices: Mapping[str, Entry]) -> torch.dtype:
    """Return the most frequent dtype, in which llm-compressor computes."""
    ((dtype, _),) = Counter(entry.dtype for entry in matrices.values()).most_common(1)
    return dtype
