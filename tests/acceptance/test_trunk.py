"""Test the loss and the agreement of trunks against transformers with dequantized weights."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from swiftlite.acceptance.teacher_forced import measure_rows
from swiftlite.data.sample import Sample
from swiftlite.families.resolved import resolve
from swiftlite.serve.evaluate.evaluation_rows import load_rows
from swiftlite.serve.evaluate.trunks import have_same_tokens, trunk_of, trunk_section, trunk_table
from tests.messages import has_line
from tests.tiny import make_tiny_hf

quantized = pytest.importorskip("tests.quantized", exc_type=ImportError)


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("trunk") / "source"
    return make_tiny_hf(directory, "qwen3", depth=1, dtype=torch.float32, with_tokenizer=True)


@pytest.fixture(scope="module")
def samples(source) -> list[Sample]:
    path = source.parent / "rows.jsonl"
    rows = [{"query": f"What is {n}?", "response": "It is " + "so " * n + "much."} for n in range(12)]
    channels = ["sum", "tale", None]
    lines = [json.dumps(row | {"channel": channels[number % 3]}) for number, row in enumerate(rows)]
    path.write_text("\n".join(lines))
    _, data = load_rows(resolve(source), [str(path)])
    return list(data.val)


def reference(hf_dir: Path, samples: list[Sample]) -> tuple[float, torch.Tensor]:
    """Return transformers' mean loss over the labels of all samples, and its most likely tokens there."""
    model: Any = AutoModelForCausalLM.from_pretrained(hf_dir, dtype=torch.float32)
    losses, tokens = [], []
    for sample in samples:
        ids = torch.from_numpy(sample.input_ids).long()[None]
        labels = torch.from_numpy(sample.labels).long()[None]
        with torch.no_grad():
            output = model(ids, labels=labels)
        is_label = labels[0, 1:] != -100
        losses.append(output.loss * is_label.sum())
        tokens.append(output.logits[0, :-1][is_label].argmax(-1))
    found = torch.cat(tokens)
    return float(sum(losses) / len(found)), found


@pytest.mark.parametrize("name", ["int8", "int4_asym", "fp8_blocks"])
def test_a_quantized_trunk_has_the_loss_of_its_dequantized_weights(mesh, tmp_path, source, samples, name):
    directory = quantized.quantize_hf(source, tmp_path / "quantized", name, block=False)
    loss, tokens = reference(quantized.dequantize_hf(source, tmp_path / "plain", name, block=False), samples)
    plain_loss, plain_tokens = reference(source, samples)
    found, before = (
        measure_rows(resolve(each), samples, torch_dtype="float32", mesh=mesh, row_length=64)
        for each in (directory, source)
    )
    trunk = found["all"].trunk_to_json(before["all"])
    assert trunk["tokens"] == len(tokens)
    # Sums of float32 in another order: packed rows, and means of samples.
    assert trunk["loss"] == pytest.approx(loss, rel=1e-5)
    assert before["all"].trunk_to_json() == {"tokens": len(tokens), "loss": pytest.approx(plain_loss, rel=1e-5)}
    assert trunk["top1_agreement"] == float((tokens == plain_tokens).sum()) / len(tokens)
    assert found["all"].trunk_to_json(found["all"])["top1_agreement"] == 1.0


def test_agreement_counts_the_tokens_that_differ(mesh, tmp_path, source, samples):
    """If two rows of the output layer are exchanged, exactly the predictions of these two tokens change."""
    measured = measure_rows(resolve(source), samples, torch_dtype="float32", mesh=mesh)
    predictions = torch.cat(measured["all"].predictions)
    first, second = predictions.bincount().topk(2).indices.tolist()
    altered = make_tiny_hf(tmp_path / "altered", "qwen3", depth=1, dtype=torch.float32, with_tokenizer=True)
    tensors = load_file(altered / "model.safetensors")
    rows = tensors["lm_head.weight"].clone()
    rows[[first, second]] = rows[[second, first]]
    save_file(tensors | {"lm_head.weight": rows}, altered / "model.safetensors", metadata={"format": "pt"})
    found = measure_rows(resolve(altered), samples, torch_dtype="float32", mesh=mesh)
    for channel in ("all", "sum", "tale"):
        expected = torch.cat(measured[channel].predictions)
        changed = int(torch.isin(expected, torch.tensor([first, second])).sum())
        agreement = found[channel].trunk_to_json(measured[channel])["top1_agreement"]
        assert agreement == (len(expected) - changed) / len(expected)
    assert 0 < found["all"].trunk_to_json(measured["all"])["top1_agreement"] < 1


def test_the_table_compares_both_trunks(mesh, tmp_path, source, samples):
    directory = quantized.quantize_hf(source, tmp_path / "quantized", "int4", block=False)
    found, before = (
        measure_rows(resolve(each), samples, torch_dtype="float32", mesh=mesh) for each in (directory, source)
    )
    trunks = {
        "model": trunk_of(resolve(directory), found, before),
        "baseline": trunk_of(resolve(source), before),
    }
    text = trunk_table(trunks).text()
    agreement = found["tale"].trunk_to_json(before["tale"])["top1_agreement"]
    own, other = (each["tale"].trunk_to_json() for each in (found, before))
    assert has_line(text, f"model tale {own['tokens']} {own['loss']:.4f} {100 * agreement:.1f}")
    assert has_line(text, f"model all 4 {quantized.GROUP}")
    assert has_line(text, f"baseline tale {other['tokens']} {other['loss']:.4f} –")
    (table,) = trunk_section(trunks).tables
    assert [row[:2] for row in table.rows[:3]] == [["model", "all"], ["model", "sum"], ["model", "tale"]]
    assert trunks["model"].to_json()["quantization"]["weights"] == [{"bits": 4, "group_size": quantized.GROUP}]
    assert "quantization" not in trunks["baseline"].to_json()


def test_rows_that_are_tokenized_differently_are_found(samples):
    assert have_same_tokens(samples, list(samples))
    assert not have_same_tokens(samples, samples[1:])
    assert not have_same_tokens(samples, [samples[1], samples[0], *samples[2:]])
