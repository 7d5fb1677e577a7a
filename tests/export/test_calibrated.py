"""Test `export --quant_method gptq|awq` with the real llm-compressor, which is in a separate environment.

`bash scripts/test.sh llmcompressor` creates this environment.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from swiftlite.args.commands import ExportArgs
from swiftlite.base.errors import UserError
from swiftlite.bridge.audit import audit_hf
from swiftlite.bridge.encoding.index import format_of
from swiftlite.bridge.hf_config import read_config
from swiftlite.bridge.tensors import Checkpoint
from swiftlite.export import calibrated
from swiftlite.export.quantization import matrices_of
from swiftlite.export.run import convert
from swiftlite.families.resolved import resolve
from swiftlite.runtime.llm_compressor import LLM_COMPRESSOR, RELEASE
from tests.messages import naming
from tests.tiny import make_tiny_hf

with_llm_compressor = pytest.mark.skipif(
    not LLM_COMPRESSOR.is_installed,
    reason=f"llm-compressor {RELEASE} is not in {LLM_COMPRESSOR.directory} (requirements/llmcompressor.txt)",
)
GROUP = 16  # divides the sizes of all tiny models


@pytest.fixture(scope="session")
def rows(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("rows") / "train.jsonl"
    answers = [" ".join(f"word{row} number{row + place}" for place in range(12 + row % 3)) for row in range(24)]
    lines = [{"query": f"question {number}", "response": answer} for number, answer in enumerate(answers)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def run(model: Path, mesh, output: Path, rows: Path, **options: Any) -> Path:
    convert(ExportArgs(model=str(model), output_dir=str(output), dataset=[str(rows)], **options), mesh)
    return output


def with_large_channels(model: Path) -> None:
    """Make some activations large, as in trained models. Without them, methods that use activations gain nothing."""
    file = model / "model.safetensors"
    tensors = load_file(file)
    for key, tensor in tensors.items():
        if key.startswith("model.layers.") and key.endswith("layernorm.weight"):
            tensor[::9] *= 30
    save_file(tensors, file, metadata={"format": "pt"})


def weights_of(directory: Path) -> dict[str, torch.Tensor]:
    """Return the decoded tensors of a model."""
    with Checkpoint(directory, format_of(read_config(directory))) as checkpoint:
        return {key: checkpoint.read(key) for key in checkpoint.entries}


def logits_of(source: Path, weights: dict[str, torch.Tensor], tokens: torch.Tensor) -> torch.Tensor:
    model: Any = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    own = model.state_dict().keys()
    model.load_state_dict({key: tensor for key, tensor in weights.items() if key in own}, strict=False)
    with torch.no_grad():
        return model(tokens[None]).logits


@with_llm_compressor
@pytest.mark.parametrize(("family", "method"), [("qwen3", "gptq"), ("qwen3", "awq"), ("qwen2", "awq")])
def test_a_dense_model(mesh, tmp_path, rows, family, method):
    """Heads keep their bits, every projection of the trunk is quantized, and the model is closer to the unquantized one
    on the calibration rows than with rounding."""
    model = make_tiny_hf(tmp_path / "plain", family, depth=1, dtype=torch.float32, with_tokenizer=True)
    with_large_channels(model)
    out = run(model, mesh, tmp_path / "out", rows, quant_method=method, group_size=GROUP)
    assert audit_hf(out, resolve(out).family) == []
    assert {path.name for path in tmp_path.iterdir()} == {"plain", "out"}
    plain, written = weights_of(model), weights_of(out)
    assert written.keys() == plain.keys()
    quantized = matrices_of(resolve(model), "keep")
    same = {key for key in plain if torch.equal(plain[key], written[key])}
    changed = plain.keys() - same
    if method == "gptq":
        assert changed == quantized.keys()
    else:  # norms and biases are scaled, but not the last norm, whose output the heads read
        assert quantized.keys() < changed
        assert all(key.startswith("model.layers.") for key in changed)
    convert(
        ExportArgs(
            model=str(model), output_dir=str(tmp_path / "rtn"), quant_method="rtn", quant_bits=4, group_size=GROUP
        ),
        mesh,
    )
    args = ExportArgs(dataset=[str(rows)])
    tokens = [torch.tensor(row) for row in calibrated.calibration_rows(args, resolve(model))]

    def error(weights: dict[str, torch.Tensor]) -> float:
        return sum(
            float((logits_of(model, weights, row) - logits_of(model, plain, row)).square().mean()) for row in tokens
        )

    assert error(written) < error(weights_of(tmp_path / "rtn"))


@with_llm_compressor
@pytest.mark.skipif(
    not any(LLM_COMPRESSOR.directory.glob("lib/python*/site-packages/torchvision")),
    reason="torchvision is not installed",
)
def test_experts_and_quantized_heads(mesh, tmp_path, rows):
    """Each expert is quantized, routers are plain, and the head is rounded."""
    model = make_tiny_hf(tmp_path / "plain", "glm4_moe", depth=1, dtype=torch.bfloat16, with_tokenizer=True)
    options = {"group_size": GROUP, "quant_heads": "block", "quant_n_samples": 6, "quant_batch_size": 4}
    out = run(model, mesh, tmp_path / "out", rows, quant_method="gptq", **options)
    assert audit_hf(out, resolve(out).family) == []
    plain, written = weights_of(model), weights_of(out)
    expected = matrices_of(resolve(model), "block").keys()
    changed = {key for key in plain if not torch.equal(plain[key], written[key].to(plain[key].dtype))}
    assert changed == expected
    assert any(".experts.1." in key for key in changed)


@with_llm_compressor
def test_a_model_that_transformers_does_not_know_is_refused(mesh, tmp_path, rows):
    model = make_tiny_hf(tmp_path / "plain", "mimo", depth=1, dtype=torch.bfloat16, with_tokenizer=True)
    with pytest.raises(UserError, match=naming("--quant_method gptq mimo")):
        run(model, mesh, tmp_path / "out", rows, quant_method="gptq", group_size=GROUP)
    assert {path.name for path in tmp_path.iterdir()} == {"plain"}


def test_awq_does_not_smooth_the_inputs_of_routers(mesh, tmp_path, rows):
    model = make_tiny_hf(tmp_path / "plain", "qwen3_moe", dtype=torch.bfloat16, with_tokenizer=True)
    with pytest.raises(UserError, match=naming("--quant_method awq qwen3_moe")):
        run(model, mesh, tmp_path / "out", rows, quant_method="awq", group_size=GROUP)
    assert {path.name for path in tmp_path.iterdir()} == {"plain"}


def test_calibration_rows_are_those_of_training(tmp_path, rows):
    """All rows if there are fewer than --quant_n_samples; otherwise a sample, always the same."""
    model = resolve(make_tiny_hf(tmp_path / "plain", "qwen3", with_tokenizer=True))
    every = calibrated.calibration_rows(ExportArgs(dataset=[str(rows)]), model)
    assert len(every) == 24
    some = ExportArgs(dataset=[str(rows)], quant_n_samples=5, max_length=30)
    chosen = calibrated.calibration_rows(some, model)
    assert chosen == calibrated.calibration_rows(some, model)
    assert len(chosen) == 5
    assert all(row in [whole[:30] for whole in every] for row in chosen)
