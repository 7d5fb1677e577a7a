"""Define valid options of each command for the directory `here` (conftest.py), and how a test makes them invalid."""

import json
from pathlib import Path

import pytest

from swiftlite import rules
from swiftlite.args.commands import BenchArgs, DeployArgs, ExportArgs, InferArgs, RegenerateArgs, SftArgs
from swiftlite.base.errors import OptionError

# What every config.json must say of sizes.
SIZES = {
    "vocab_size": 120,
    "hidden_size": 48,
    "num_attention_heads": 6,
    "intermediate_size": 12,
    "num_hidden_layers": 4,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 512,
}

SFT = SftArgs(model="plain", dataset=["train.jsonl"], output_dir="out")
EXPORT = ExportArgs(model="run", output_dir="hf", to_hf=True)
INFER = InferArgs(model="mtp2", val_dataset=["val.jsonl"], speculative="mtp")
REGENERATE = RegenerateArgs(model="mtp2", dataset=["train.jsonl"], output_dir="out")
BENCH = BenchArgs(model="mtp2", val_dataset=["val.jsonl"], output_dir="out")
DEPLOY = DeployArgs(model="mtp2", infer_backend="sglang", dry_run=True)
CHAIN = {
    "sglang_speculative_num_steps": 2,
    "sglang_speculative_eagle_topk": 1,
    "sglang_speculative_num_draft_tokens": 3,
}
TREE = CHAIN | {"sglang_speculative_eagle_topk": 3, "sglang_speculative_num_draft_tokens": 13}


def problems_of(args, world_size=1):
    with pytest.raises(OptionError) as raised:
        rules.check(args, world_size)
    assert raised.value.exit_code == 2
    return raised.value.problems


def change_config(**changes) -> None:
    """Change the config.json of the model without heads."""
    path = Path("plain/config.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
