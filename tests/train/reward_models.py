"""Make reward models and pairs of answers, and compute scores with transformers."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from swiftlite.args.commands import RmArgs
from swiftlite.runtime.mesh import Mesh
from swiftlite.train import phases
from swiftlite.train import run as training
from tests.tiny import make_tiny_hf
from tests.train.prepared import prepare

ROWS: list[dict[str, Any]] = [
    {
        "prompt": [{"role": "user", "content": f"What is {n} plus {n}?"}],
        "chosen": [{"role": "assistant", "content": f"It is {2 * n}{' exactly' * (n % 3)}."}],
        "rejected": [{"role": "assistant", "content": f"No idea{', perhaps' * (n % 4)} {n}?"}],
        "margin": 0.1 * (n % 3),
    }
    for n in range(20)
]


def write_rows(path: Path) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def make_reward_model(directory: Path, family: str = "qwen3", **options: Any) -> Path:
    """Write a reward model of transformers with random weights, whose scores are about 1."""
    trunk = make_tiny_hf(directory.with_name(f"{directory.name}-trunk"), family, with_tokenizer=True, **options)
    model = AutoModelForSequenceClassification.from_pretrained(trunk, num_labels=1, dtype=torch.float32)
    with torch.no_grad():
        model.score.weight.normal_(std=0.2)
    model.save_pretrained(directory)
    AutoTokenizer.from_pretrained(trunk).save_pretrained(directory)
    return directory


def conversations(rows: Sequence[dict[str, Any]], answer: str) -> list[list[dict[str, str]]]:
    return [row["prompt"] + row[answer] for row in rows]


@torch.no_grad()
def hf_scores(directory: Path, turns: Sequence[list[dict[str, str]]]) -> torch.Tensor:
    """Return transformers' score of each conversation, one conversation at a time."""
    model = AutoModelForSequenceClassification.from_pretrained(directory, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    assert model.config.num_labels == 1
    found = []
    for conversation in turns:
        text = tokenizer.apply_chat_template(conversation, tokenize=False)
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")
        found.append(model(**ids).logits[0, 0])
    return torch.stack(found)


def train(args: RmArgs, mesh: Mesh) -> Path:
    """Run all steps, and evaluate the last one; return the run's directory."""
    run = prepare(args, mesh)
    state = phases.restore(run)
    trainer = training.make_trainer(run, state)
    trainer.fit(state.step)
    trainer.evaluate_last()
    trainer.close()
    return run.output_dir
