"""Shared functions of these tests for models that swiftlite does not know.

`make_known` registers a model as files of the package would. Each process must call it.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from swiftlite import families, rules
from swiftlite.args.commands import ExportArgs, SftArgs
from swiftlite.bridge.transfer import load_hf
from swiftlite.export import run as export
from swiftlite.model.build import build_model
from swiftlite.model.inputs import ModelInputs
from swiftlite.runtime.distributed import session
from tests.parallel.launch import launch
from tests.tiny import make_tiny_tokenizer, random_mtp_tensors, write_hf

MakeKnown = Callable[[], None]
TOKENS = torch.arange(3, 35)[None]


def make_model(directory: Path, config_class: Any, model_class: Any, **config: Any) -> Path:
    """Write a random model with one MTP head."""
    tokenizer: Any = make_tiny_tokenizer()
    tokenizer.save_pretrained(directory)
    sizes = {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 512,
        "initializer_range": 0.2,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    torch.manual_seed(0)
    model, name = model_class(config_class(**sizes | config)), config_class.model_type
    return write_hf(directory, model, name, random_mtp_tensors(model, name, 1), 1)


def hf_config(model: Path) -> dict[str, Any]:
    return json.loads((model / "config.json").read_text())


def args_of(model: Path, rows: Path, output_dir: Path, **options: Any) -> SftArgs:
    """Return the options of a short run."""
    usual: dict[str, Any] = {"torch_dtype": "float32", "acceptance_samples": 0, "report_to": []}
    usual |= {"global_batch_size": 4, "train_iters": 8, "save_steps": 8, "lr": 1e-3}
    return SftArgs(model=str(model), dataset=[str(rows)], output_dir=str(output_dir), **usual | options)


def run(make_known: MakeKnown, command: Callable[[Any], Any], args: Any, world_size: int = 1) -> None:
    """Run a command in a separate process."""
    make_known()
    rules.check(args, world_size)
    command(args)


def logits(make_known: MakeKnown, model: Path) -> list:
    """Return swiftlite's logits for TOKENS, computed in a separate process."""
    make_known()
    config = hf_config(model)
    family = families.get(config)
    with session() as mesh, torch.no_grad():
        (built,) = build_model(family.architecture(config), config, mesh=mesh, dtype=torch.float32)
        load_hf([built], model, family, config)
        return built.eval()(ModelInputs(TOKENS, torch.arange(TOKENS.size(1))[None])).main.tolist()


def export_hf(make_known: MakeKnown, run_dir: Path, hf_dir: Path) -> dict[str, torch.Tensor]:
    """Run `export --to_hf`, and return the tensors."""
    launch(1, run, make_known, export.run, ExportArgs(to_hf=True, model=str(run_dir), output_dir=str(hf_dir)))
    return load_file(hf_dir / "model.safetensors")


def there_and_back(make_known: MakeKnown, model: Path, directory: Path) -> dict[str, torch.Tensor]:
    """Return the model's tensors after `export --to_mcore` and `export --to_hf`."""
    mcore = directory / "mcore"
    launch(1, run, make_known, export.run, ExportArgs(to_mcore=True, model=str(model), output_dir=str(mcore)))
    return export_hf(make_known, mcore, directory / "hf")


def is_trained(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> bool:
    """Return whether both have the same tensors, and each tensor has changed."""
    shapes = [{key: tensor.shape for key, tensor in tensors.items()} for tensors in (before, after)]
    return shapes[0] == shapes[1] and not any(torch.equal(before[key], after[key]) for key in before)
