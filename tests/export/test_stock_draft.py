"""Test the folder `draft/` of exports: what its tensors compute, and that nothing in it goes unnoticed."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from swiftlite.args.commands import DeployArgs, ExportArgs
from swiftlite.base.errors import UserError
from swiftlite.bridge.audit import audit_hf
from swiftlite.engines.index import ENGINES
from swiftlite.engines.sglang.options import speculative_options as sglang_options
from swiftlite.engines.vllm.stock_draft import draft_folder, draft_problems
from swiftlite.export.run import convert
from swiftlite.families import FAMILIES
from swiftlite.families.resolved import resolve
from swiftlite.families.serving.stock import DRAFTING, class_of, why_not
from swiftlite.serve import deploy
from tests.engines.reference import Reference, follow
from tests.messages import mention_each, mentions, naming
from tests.stock_exports import CLASSES, SIZES, export_for_stock
from tests.tiers import some_of
from tests.tiny import make_tiny_hf


@pytest.fixture
def stock(tmp_path, mesh) -> Path:
    return export_for_stock(make_tiny_hf(tmp_path / "model", "qwen3", 1, with_tokenizer=True), tmp_path, mesh)


def rms(states: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return states * (states.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * weight


def state_of_class(directory: Path, reference: Reference, ids_BS: torch.Tensor) -> torch.Tensor:
    """Return the states [B, S, H] that vLLM's class computes from `draft/` and the trunk's states of a reference."""
    config = json.loads((directory / "config.json").read_text())
    eps, size = config["rms_norm_eps"], config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    head = load_file(directory / "draft" / "model.safetensors")
    (prefix,) = {".".join(key.split(".")[:3]) for key in head}
    head = {key.removeprefix(f"{prefix}."): tensor for key, tensor in head.items()}
    trunk: Any = reference.trunk
    hidden, _ = reference.trunk_states(ids_BS)
    embedding = trunk.model.embed_tokens(ids_BS).index_fill(1, torch.tensor([0]), 0)
    if "input_proj.weight" in head:
        parts = [rms(hidden, head["hidden_layernorm.weight"], eps), rms(embedding, head["token_layernorm.weight"], eps)]
        x = torch.cat(parts, dim=-1) @ head["input_proj.weight"].T
    else:
        parts = [rms(embedding, head["enorm.weight"], eps), rms(hidden, head["hnorm.weight"], eps)]
        x = torch.cat(parts, dim=-1) @ head["eh_proj.weight"].T

    def project(name: str, states: torch.Tensor) -> torch.Tensor:
        return F.linear(states, head[f"{name}.weight"], head.get(f"{name}.bias"))

    def heads_of(name: str, states: torch.Tensor) -> torch.Tensor:
        return project(f"self_attn.{name}_proj", states).unflatten(-1, (-1, size)).transpose(1, 2)

    normed = rms(x, head["input_layernorm.weight"], eps)
    q, k, v = (heads_of(name, normed) for name in "qkv")
    if config.get("qk_norm"):
        q, k = rms(q, head["self_attn.q_norm.weight"], eps), rms(k, head["self_attn.k_norm.weight"], eps)
    cos, sin = (part[:, None] for part in trunk.model.rotary_emb(x, torch.arange(ids_BS.size(1))[None]))
    q, k = (each * cos + torch.cat((-each[..., size // 2 :], each[..., : size // 2]), dim=-1) * sin for each in (q, k))
    mask = torch.ones(ids_BS.size(1), ids_BS.size(1), dtype=torch.bool).tril()
    if config.get("sliding_window"):
        mask = mask.triu(1 - config["sliding_window"])
    attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    x = x + project("self_attn.o_proj", attended.transpose(1, 2).flatten(2))
    normed = rms(x, head["post_attention_layernorm.weight"], eps)
    x = x + project("mlp.down_proj", F.silu(project("mlp.gate_proj", normed)) * project("mlp.up_proj", normed))
    return rms(x, head["final_layernorm.weight"], eps)


@torch.no_grad()
@pytest.mark.parametrize("family", some_of(CLASSES, "qwen2", "qwen3", "granite", "phi3"))
def test_the_class_computes_the_logits_of_the_head(family, tmp_path, mesh):
    source = make_tiny_hf(tmp_path / "model", family, 1, **SIZES.get(family, {}))
    reference = follow(Reference.load(source, family, depth=1), DRAFTING)
    out = export_for_stock(source, tmp_path, mesh)
    ids_BS = torch.randint(0, reference.trunk.config.vocab_size, (2, 20))
    _, expected = reference.head_states(0, reference.trunk_states(ids_BS)[0], ids_BS)
    found = state_of_class(out, reference, ids_BS)
    # Sums have another order, and the largest state is about 3. Random heads differ by more than 1.
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)


def tensors(directory: Path) -> dict[str, torch.Tensor]:
    return {key: tensor for path in directory.rglob("*.safetensors") for key, tensor in load_file(path).items()}


def test_all_commands_read_the_heads_in_the_folder(stock, mesh, tmp_path):
    """An export of the export has the same bytes; without the heads, it is the trunk."""
    assert audit_hf(stock, resolve(stock).family) == []
    assert not any(key.startswith("mtp.") for key in load_file(stock / "model.safetensors"))
    again, run = tmp_path / "again", tmp_path / "run2"
    convert(ExportArgs(model=str(stock), output_dir=str(run), to_mcore=True), mesh)
    convert(ExportArgs(model=str(run), output_dir=str(again), to_hf=True), mesh)
    files = {path.relative_to(stock): path.read_bytes() for path in stock.rglob("*") if path.is_file()}
    assert files == {path.relative_to(again): path.read_bytes() for path in again.rglob("*") if path.is_file()}
    convert(ExportArgs(model=str(run), output_dir=str(tmp_path / "bare"), to_hf=True, mtp="strip"), mesh)
    assert not (tmp_path / "bare" / "draft").exists()
    assert tensors(tmp_path / "bare").keys() == load_file(stock / "model.safetensors").keys()


def test_only_heads_trained_for_it_have_the_folder(tmp_path, mesh):
    make_tiny_hf(tmp_path / "hf", "qwen3", 1, with_tokenizer=True)
    convert(ExportArgs(model=str(tmp_path / "hf"), output_dir=str(tmp_path / "run"), to_mcore=True), mesh)
    convert(ExportArgs(model=str(tmp_path / "run"), output_dir=str(tmp_path / "out"), to_hf=True), mesh)
    assert draft_folder(resolve(tmp_path / "out")) is None
    assert draft_problems(resolve(tmp_path / "out")) == []


def test_quantized_models_have_no_folder(stock, mesh, tmp_path, caplog):
    quantize = ExportArgs(model=str(stock), output_dir=str(tmp_path / "int8"), quant_method="rtn")
    with pytest.raises(UserError, match=naming("--quant_method draft/")):
        convert(quantize, mesh)
    convert(replace(quantize, model=str(tmp_path / "run"), to_hf=True), mesh)
    assert mentions(caplog.text, "draft/")
    assert draft_folder(resolve(tmp_path / "int8")) is None
    assert audit_hf(tmp_path / "int8", resolve(tmp_path / "int8").family) == []


def change_tensor(folder: Path) -> None:
    found = load_file(folder / "model.safetensors")
    found["model.layers.2.self_attn.q_proj.weight"][0, 0] += 1
    save_file(found, folder / "model.safetensors", {"format": "pt"})


def lose_tensor(folder: Path) -> None:
    found = load_file(folder / "model.safetensors")
    del found["model.layers.2.enorm.weight"]
    save_file(found, folder / "model.safetensors", {"format": "pt"})


def change_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (change_tensor, ["model.layers.2.self_attn.q_proj.weight draft/model-mtp.safetensors"]),
        (lose_tensor, ["draft/model.safetensors model.layers.2.enorm.weight"]),
        (lambda folder: change_json(folder / "config.json", hidden_size=32), ["draft/config.json hidden_size"]),
        (lambda folder: change_json(folder.parent / "config.json", qk_norm=False), ["config.json qk_norm"]),
        (lambda folder: (folder / "config.json").unlink(), ["draft/ config.json"]),
    ],
)
def test_a_folder_that_differs_from_the_head_is_a_problem(damage, expected, stock):
    assert draft_problems(resolve(stock)) == []
    damage(stock / "draft")
    assert mention_each(draft_problems(resolve(stock)), expected)


@pytest.mark.skipif(not ENGINES["vllm"].is_installed, reason="vLLM is not installed")
@pytest.mark.engine
@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_the_server_of_a_folder_without_a_file_is_not_started(name, stock):
    args = DeployArgs(model=str(stock), infer_backend="vllm", dry_run=True)
    deploy.run(args)
    (stock / "draft" / name).unlink()
    with pytest.raises(UserError, match=naming(f"draft/{name}")):
        deploy.run(args)


def test_other_engines_are_told(stock):
    model = resolve(stock)
    with pytest.raises(UserError, match=naming("SGLang draft/ --draft_for sglang")):
        sglang_options(model)
    assert ENGINES["vllm"].convention_for(model.family).draft == "HYV3MTP"
    assert ENGINES["transformers"].convention_for(model.family).drafting == DRAFTING


REASONS = {
    "exaone4": "outputs",
    "gemma3": "outputs",
    "gemma3_text": "outputs",
    "gemma4": "experts",
    "gemma4_text": "outputs",
    "gemma4_unified": "outputs",
    "olmo2": "outputs",
    "olmo3": "outputs",
    "qwen2_moe": "experts",
    "qwen3_moe": "experts",
    "gpt_oss": "experts",
    "minimax_m2": "experts",
    "mixtral": "experts",
    "qwen2_5_vl": "top",
    "qwen3_vl": "top",
    "qwen3_vl_moe": "top",
}


def config_of(directory: Path, family: str, **config: Any) -> dict[str, Any]:
    return dict(resolve(make_tiny_hf(directory, family, **config)).config)


@pytest.mark.parametrize("family", [name for name in FAMILIES if not name.endswith("_vl")])
def test_every_family_has_a_class_or_a_reason(family, tmp_path):
    config = config_of(tmp_path, family, **SIZES.get(family, {}))
    why = why_not(FAMILIES[family], config)
    if family in CLASSES:
        assert why == ""
        convention = class_of(FAMILIES[family], config).convention
        assert (convention.draft, convention.drafting) == (CLASSES[family], DRAFTING)
    elif family in REASONS:
        assert REASONS[family] in why
    else:
        assert "has a draft class" in why


@pytest.mark.parametrize(
    ("family", "config", "word"),
    [
        ("smollm3", {}, "rotary"),
        ("seed_oss", {"head_dim": 64}, "32"),
    ],
)
def test_a_class_lacks_some_settings(family, config, word, tmp_path):
    assert word in why_not(FAMILIES[family], config_of(tmp_path, family, **config))
