"""Fixtures with the files that rules check: models, rows and a run in the working directory."""

import json
from pathlib import Path

import pytest

from swiftlite.base.drafting import Drafting
from tests.rules.good import SIZES


@pytest.fixture
def here(tmp_path, monkeypatch):
    """Change to a working directory with a model without heads, models with heads or a drafter, rows, and a run."""
    monkeypatch.chdir(tmp_path)
    config = {"model_type": "qwen3", "num_key_value_heads": 2, "head_dim": 8, **SIZES}
    vocab = {"num_nextn_predict_layers": 1, "mtp_draft_vocab": "0-40 50"}
    fed = {"num_nextn_predict_layers": 1, "mtp_drafting": Drafting(zeroes_first_embedding=True).to_json()}
    drafter = {"kind": "eagle3", "layers": 1, "feature_layers": [1, 2, 3], "fc_norm": True, "norm_output": True}
    drafted = {"drafter": drafter, "mtp_unroll": 3}
    block = {"kind": "dflash", "layers": 1, "feature_layers": [1, 2], "decoder_layers": 1, "mask_token_id": 5}
    models = {"plain": {}, "mtp2": {"num_nextn_predict_layers": 2}, "vocab": vocab, "fed": fed, "drafted": drafted}
    models["block"] = {"drafter": block, "mtp_unroll": 3}
    models["features"] = {"drafter": {"kind": "mtp_features", "layers": 1, "feature_layers": [1, 2]}}
    for name, heads in models.items():
        Path(name).mkdir()
        Path(name, "config.json").write_text(json.dumps(config | heads))
        Path(name, "model.safetensors").write_bytes(b"weights")
    Path("train.jsonl").write_text('{"query": "q", "response": "r"}\n' * 3)
    Path("val.jsonl").write_text('{"query": "q", "response": "r"}\n')
    for folder in ("run/source", "run/checkpoint-5", "run/checkpoint-20", "run/checkpoint-tmp"):
        Path(folder).mkdir(parents=True)
    Path("run/args.json").write_text("{}")
    Path("run/source/config.json").write_text(json.dumps(config))
    return tmp_path


@pytest.fixture(autouse=True)
def bfloat16_everywhere(monkeypatch):
    """Notes do not depend on the processor that runs the tests."""
    monkeypatch.setattr("swiftlite.engines.info.has_bfloat16_instructions", lambda: True)
