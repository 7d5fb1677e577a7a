"""Write a GGUF file for llama.cpp, and check it (`export --to_gguf`)."""

import subprocess
from pathlib import Path

from swiftlite.args.commands import ExportArgs
from swiftlite.base.errors import UserError, reason_of
from swiftlite.base.log import logger
from swiftlite.data.dataset import load_prompts
from swiftlite.data.rows.conversation import Conversation
from swiftlite.data.template import ChatTemplate, load_tokenizer, stop_token_ids
from swiftlite.engines.engine import EngineConfig, Sampling, start_engine
from swiftlite.engines.llamacpp.check import check_file, load
from swiftlite.engines.llamacpp.info import LLAMACPP
from swiftlite.engines.llamacpp.program import program
from swiftlite.engines.served_model import require_heads
from swiftlite.families.resolved import HfModel
from swiftlite.families.serving.llamacpp import KINDS
from swiftlite.gguf.drafters import draft_architecture_of
from swiftlite.gguf.tokenizer import other_tokens
from swiftlite.gguf.types import FINE_TYPES, QUANTIZER, WRITTEN_TYPES, quantizer
from swiftlite.gguf.verify import differences
from swiftlite.gguf.write import draft_file_of, has_draft_file, write_draft_gguf, write_gguf

MAX_PROMPTS = 16
"""Maximum number of rows of --val_dataset that are compared and answered."""
MAX_NEW_TOKENS = 64


def export_gguf(args: ExportArgs, model: HfModel, directory: Path) -> Path:
    """Write a GGUF file to a directory and return its path. A drafter other than MTP heads is in a second file.

    Raises:
        UserError: llama.cpp does not support the model, the file differs from the model, llama.cpp reads the file
            differently, or fewer drafts are accepted than --min_acceptance.
    """
    if model.heads.layers:
        require_heads(model, KINDS)
    gguf_type = args.gguf_type or "bf16"
    file = directory / f"{Path(args.output_dir).resolve().name}-{gguf_type}.gguf"
    if gguf_type in WRITTEN_TYPES:
        write_gguf(model, file, WRITTEN_TYPES[gguf_type])
        _check_numbers(model, file, gguf_type)
    else:
        _quantize(model, file, gguf_type)
    if has_draft_file(model):
        # At least q8_0, like heads in the file of their trunk.
        write_draft_gguf(model, draft_file_of(file), FINE_TYPES.get(gguf_type, "q8_0"))
    for texts in other_tokens(model.directory):
        logger.warning("llama.cpp has other tokens than the HF tokenizer for texts with %s", texts)
    _check_with_server(args, model, file)
    return file


def _check_numbers(model: HfModel, file: Path, gguf_type: str) -> None:
    lines = differences(model, file, gguf_type)
    if lines:
        raise UserError(f"{file.name} differs from the model:\n  " + "\n  ".join(lines[:10]), "nothing was written")


def _quantize(model: HfModel, file: Path, gguf_type: str) -> None:
    """Write a file with K-quants by llama-quantize. The decoder layers of heads stay at q8_0.

    Raises:
        UserError: llama-quantize fails.
    """
    found = quantizer()
    if found is None:  # checked by the rules
        raise UserError(f"--gguf_type {gguf_type} requires llama-quantize", f"put it on PATH, or set {QUANTIZER}=FILE")
    whole = file.with_name(f".{file.name}.bf16")
    write_gguf(model, whole, "bf16")
    _check_numbers(model, whole, "bf16")
    first_head = model.family.architecture(model.config).outside.num_layers
    layers = range(first_head, first_head + model.heads.layers)
    kept: list[str] = []
    for layer in layers:
        kept += ["--tensor-type", f"blk\\.{layer}\\.=q8_0"]
    try:
        done = subprocess.run([found, *kept, str(whole), str(file), gguf_type], capture_output=True, text=True)
    except OSError as error:
        raise UserError(f"{found} cannot be run: {reason_of(error)}", f"set {QUANTIZER}=FILE to another one") from None
    finally:
        whole.unlink()
    if done.returncode:
        raise UserError(f"llama-quantize failed:\n{(done.stdout + done.stderr)[-1000:]}", "nothing was written")


def _check_with_server(args: ExportArgs, model: HfModel, file: Path) -> None:
    """Check the file with llama.cpp, if it is installed."""
    words = program()
    if words is None:
        logger.warning("%s was not loaded, because llama.cpp is not installed: %s", file.name, LLAMACPP.install)
        return
    template = ChatTemplate(load_tokenizer(model.directory), vocab_size=model.config["vocab_size"])
    prompts = load_prompts(args.val_dataset)[:MAX_PROMPTS] if args.val_dataset else []
    checked = check_file(words, file, template, prompts)
    if has_draft_file(model):
        load(words, file, draft_architecture_of(model.family, model.config).method, draft_file_of(file))
    if checked.problems:
        lines = "\n  ".join(checked.problems[:10])
        raise UserError(f"llama.cpp reads {file.name} differently:\n  {lines}", "nothing was written")
    logger.info(
        "llama.cpp loads %s; its tokens of %d texts and its prompts of %d rows equal those of the HF tokenizer",
        file.name,
        checked.num_texts,
        checked.num_prompts,
    )
    if prompts and model.heads.layers:
        _check_acceptance(args, model, file, template, prompts)


def _check_acceptance(
    args: ExportArgs, model: HfModel, file: Path, template: ChatTemplate, prompts: list[Conversation]
) -> None:
    """Count accepted drafts with llama.cpp, in the file that is shipped."""
    served = HfModel(str(file), model.directory, model.config, model.family)
    engine = start_engine("llamacpp", EngineConfig(served, num_speculative_tokens=None))
    try:
        ids = [template.encode_prompt(chat.prompt().messages, chat.prompt().tools) for chat in prompts]
        stops = stop_token_ids(template, model.directory)
        engine.generate(ids, Sampling(MAX_NEW_TOKENS, stop_token_ids=stops))
        counts = engine.draft_counts()
    finally:
        engine.close()
    rate = counts.accepted / max(counts.drafted, 1)
    logger.info("llama.cpp drafted %d tokens and accepted %d (%.1f %%)", counts.drafted, counts.accepted, 100 * rate)
    if args.min_acceptance is not None and rate < args.min_acceptance:
        problem = f"llama.cpp accepted {rate:.3f} of the drafts, below --min_acceptance {args.min_acceptance}"
        if not args.force:
            raise UserError(problem, "nothing was written; change the export or the limit, or add --force")
        logger.warning("%s; written because of --force", problem)
