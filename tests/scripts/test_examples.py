"""Test that the examples for large models state the memory and the time that `doctor --plan` estimates for them."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from swiftlite.cli.main import main
from tests.scripts.test_docs import commands
from tests.tiers import all_but

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "tests" / "published" / "configs"
# Published sizes; those in `configs/` are smaller.
SIZES: dict[str, tuple[str, dict[str, Any]]] = {
    "mimo.sh": (
        "MiMo-7B-RL",
        {"hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32, "num_hidden_layers": 36}
        | {"num_key_value_heads": 8, "vocab_size": 151680},
    ),
    "glm4_5_air.sh": (
        "GLM-4.5-Air",
        {"hidden_size": 4096, "intermediate_size": 10944, "moe_intermediate_size": 1408, "num_attention_heads": 96}
        | {"num_hidden_layers": 46, "num_key_value_heads": 8, "n_routed_experts": 128, "num_experts_per_tok": 8}
        | {"vocab_size": 151552},
    ),
    "qwen3_next.sh": (
        "Qwen3-Next-80B-A3B-Instruct",
        {"hidden_size": 2048, "intermediate_size": 5120, "moe_intermediate_size": 512, "num_attention_heads": 16}
        | {"shared_expert_intermediate_size": 512, "num_experts": 512, "num_experts_per_tok": 10}
        | {"num_hidden_layers": 48, "num_key_value_heads": 2, "linear_num_key_heads": 16}
        | {"linear_num_value_heads": 32, "vocab_size": 151936},
    ),
}


@pytest.mark.parametrize("name", all_but(SIZES, "qwen3_next.sh"))  # 512 experts: a minute
def test_an_example_states_what_it_needs(tmp_path, capsys, name):
    published, sizes = SIZES[name]
    config = json.loads((CONFIGS / f"{published}.json").read_text()) | sizes
    (tmp_path / "config.json").write_text(json.dumps(config))
    text = (ROOT / "examples" / name).read_text()
    plan, train, *_ = commands(text)
    model = str(tmp_path)
    assert main([model if word == "$MODEL" else word for word in plan]) in (0, None)
    layout = re.search(r"^ +([\d,]+) +[\d.]+% +([\d.]+) ", capsys.readouterr().out, re.MULTILINE)
    assert layout is not None
    tokens_per_second, memory = float(layout[1].replace(",", "")), float(layout[2])
    (stated,) = re.findall(r"(\d+) GB used on each", text)
    assert float(stated) == pytest.approx(memory, abs=1)
    ((hours, minutes),) = re.findall(r"Time: +(?:(\d+) hours|(\d+) minutes) for 1000 steps", text)
    seconds = 3600 * float(hours or 0) + 60 * float(minutes or 0)
    assert seconds == pytest.approx(1000 * 64 * 4096 / tokens_per_second, rel=0.1)
    # The run has the options of the plan.
    planned = {word for word in plan if word.startswith("--")} - {"--plan", "--num_gpus", "--gpu_type"}
    assert planned <= set(train)
    assert {word: train[train.index(word) + 1] for word in planned} == {
        word: plan[plan.index(word) + 1] for word in planned
    }
    assert shlex.join(train).count("$VAL") == 1
