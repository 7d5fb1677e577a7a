"""Make pairs of answers, score them with transformers, and run `megatron dpo` in this process."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from swiftlite.args.commands import DpoArgs
from swiftlite.data.sample import Sample
from swiftlite.runtime.mesh import Mesh
from swiftlite.train import phases
from swiftlite.train import run as training
from tests.parallel.parity import save_gradients
from tests.train.prepared import prepare

CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 1}}}
TOOL_TURNS = [{"role": "assistant", "content": "", "tool_calls": [CALL]}, {"role": "tool", "content": "2"}]


def asked(n: int) -> list[dict[str, Any]]:
    """Return the turns before the answer. Every fifth row calls a tool first."""
    return [{"role": "user", "content": f"What is {n} plus {n}?"}, *(TOOL_TURNS if n % 5 == 2 else [])]


def answered(text: str) -> list[dict[str, Any]]:
    return [{"role": "assistant", "content": text}]


ROWS = [
    {
        "prompt": asked(n),
        "chosen": answered(f"It is {2 * n}{' exactly' * (n % 3)}."),
        "rejected": answered(f"No idea{', perhaps' * (n % 4)} {n}?"),
    }
    for n in range(20)
]
# Of each pair one of the answers, for KTO.
RATED = [
    {
        "prompt": row["prompt"],
        "completion": row["chosen"] if number % 3 else row["rejected"],
        "label": number % 3 > 0,
    }
    for number, row in enumerate(ROWS)
]
# Each loss with numbers that are not the defaults.
LOSSES: dict[str, dict[str, Any]] = {
    "sigmoid": {"beta": 0.2},
    "hinge": {},
    "ipo": {"beta": 0.3},
    "robust": {"label_smoothing": 0.1},
    "apo_zero": {},
    "apo_down": {},
    "simpo": {"beta": 2.0, "simpo_gamma": 0.7, "cpo_alpha": 0.4, "label_smoothing": 0.1},
    "orpo": {"beta": 0.3},
}


def write_pairs(path: Path) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def write_rated(path: Path) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in RATED))
    return path


def train(args: DpoArgs, mesh: Mesh) -> Path:
    """Run all phases in order; return the run's directory."""
    run = prepare(args, mesh)
    state = phases.restore(run)
    trainer = training.make_trainer(run, state)
    trainer.fit(state.step)
    trainer.close()
    return run.output_dir


def first_step(args: DpoArgs, mesh: Mesh) -> tuple[dict[str, float], dict[str, torch.Tensor], list[Sample]]:
    """Return metrics and gradients (by HF name) of one step over all training pairs, and these pairs."""
    run = prepare(args, mesh)
    run.output_dir.mkdir(exist_ok=True)
    metrics = training.make_trainer(run, phases.state_of(run)).step(1)
    out_dir, hf_model = Path(args.output_dir) / "gradients", run.hf_model
    save_gradients(run.train_state.wrapped, run.train_state.chunks, out_dir, hf_model.family, hf_model.config)
    return metrics, load_file(out_dir / "model.safetensors"), list(run.data.train)


def log_p(model: Any, sample: Sample) -> tuple[torch.Tensor, int]:
    """Return the log-probability of the labels of one answer, computed with transformers, and their number."""
    ids = torch.from_numpy(sample.input_ids).long()
    places = [place for place, label in enumerate(sample.labels) if label != -100]
    logits = model(ids[None], use_cache=False).logits[0].log_softmax(dim=-1)
    found = [logits[place - 1, ids[place]] for place in places]
    return torch.stack(found).sum(), len(places)


def open_hf(hf_dir: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(hf_dir, dtype=torch.float32)


def check_gradients(found: dict[str, torch.Tensor], model: Any, tolerance: float) -> None:
    """Compare gradients with those of a model of transformers, relative to the largest number of each."""
    for name, parameter in model.named_parameters():
        limit = tolerance * float(parameter.grad.abs().max())
        torch.testing.assert_close(found[name], parameter.grad, rtol=0, atol=limit, msg=name)


def trls_step(
    method: str, out_dir: Path, rows: list[dict[str, Any]], models: dict[str, Any], tokenizer: Any, **options: Any
) -> tuple[float, dict[str, float], Any]:
    """Return loss, metrics and model with gradients of TRL's trainer of a method after one batch of all rows.

    Args:
        models: the model and, if the method has one, the reference model, by TRL's names.
        options: options of the trainer.
    """
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    config = getattr(trl, f"{method}Config")(
        output_dir=str(out_dir),
        per_device_train_batch_size=len(rows),
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        report_to=[],
        max_length=None,
        **options,
    )
    trainer = getattr(trl, f"{method}Trainer")(
        **models, args=config, train_dataset=datasets.Dataset.from_list(rows), processing_class=tokenizer
    )
    inputs = next(iter(trainer.get_train_dataloader()))
    model = trainer.model.train()
    loss = trainer.compute_loss(model, inputs)
    loss.backward()
    return float(loss.detach()), {name: values[-1] for name, values in trainer._metrics["train"].items()}, model
