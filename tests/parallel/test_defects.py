"""Test defects of megatron-core 0.16.1 and swiftlite's fixes. If a test fails, megatron-core may have fixed the defect.

Other defects are tested with the code that fixes them: recomputation in tests/model/test_recompute.py, latent attention
in test_mla.py, counts of targets in tests/train/test_objective.py.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel as StockGPTModel
from megatron.core.transformer.attention import SelfAttention as StockSelfAttention
from megatron.core.transformer.moe.experts import SequentialMLP as StockSequentialMLP
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer as StockMtpLayer
from packaging.version import Version

from swiftlite import families
from swiftlite.args.fields import ParallelLayout
from swiftlite.base.drafting import Drafting
from swiftlite.base.heads import Heads
from swiftlite.bridge.hf_config import read_config
from swiftlite.bridge.transfer import load_hf
from swiftlite.model.build import build_config, build_model
from swiftlite.model.drafter import DrafterParts
from swiftlite.model.inputs import ModelInputs, Target
from swiftlite.model.layers.experts import SequentialMLP
from swiftlite.model.specs import LOCAL, decoder_spec, drafter_spec
from swiftlite.runtime import mesh as mesh_module
from swiftlite.runtime.compat import MCORE_VERSION, MTP_INNER_LAYER
from swiftlite.runtime.distributed import session
from swiftlite.runtime.mesh import Mesh
from swiftlite.train.checkpoint.checkpointer import Checkpointer
from swiftlite.train.checkpoint.state import CheckpointState
from tests.parallel import parity
from tests.parallel.launch import launch
from tests.tiny import make_tiny_hf

TOKENS = torch.arange(3, 15)[None]
POSITIONS = torch.arange(12)[None]


# labels=None, and a batch without targets: gpt_model.py:612 and :658-661


def use_stock_attention(spec: Any) -> None:
    """Use megatron-core's module, which does not have the options of swiftlite's."""
    spec.module = StockSelfAttention
    spec.params = {"attn_mask_type": spec.params["attn_mask_type"]}


def stock_model(hf_dir: Path, mesh: Mesh, per_token: bool = True) -> Any:
    """Return megatron-core's GPTModel and MTP layer with swiftlite's layers and weights, on one process."""
    hf_config = read_config(hf_dir)
    family = families.get(hf_config)
    architecture = family.architecture(hf_config)
    config = build_config(architecture.mcore_config(), device=mesh.device, dtype=torch.float32, mtp_num_layers=1)
    config.calculate_per_token_loss = per_token
    heads = drafter_spec(DrafterParts(hf_config, architecture, Heads(1), Drafting(), LOCAL))
    assert heads is not None
    decoder: Any = decoder_spec(config, architecture.layers, Drafting())
    for layer in decoder.layer_specs:
        use_stock_attention(layer.submodules.self_attention)
    for head in heads.layer_specs:  # pyright: ignore[reportOptionalIterable]
        head.module = StockMtpLayer
        block: Any = getattr(head.submodules, MTP_INNER_LAYER)
        use_stock_attention(block.submodules.self_attention)
    model = StockGPTModel(
        config=config,
        transformer_layer_spec=decoder,
        mtp_block_spec=heads,  # pyright: ignore[reportArgumentType]
        vocab_size=hf_config["vocab_size"],
        max_sequence_length=hf_config["max_position_embeddings"],
        position_embedding_type="rope",
    )
    load_hf([model], hf_dir, family, hf_config)
    return model


# What the stock class gets wrong in one release it may get right in a later one: then ours is not needed there.
MENDED = pytest.mark.skipif(Version("0.19") <= MCORE_VERSION, reason="mended in megatron-core 0.19")


def our_model(hf_dir: Path, mesh: Mesh):
    hf_config = read_config(hf_dir)
    family = families.get(hf_config)
    model = build_model(
        family.architecture(hf_config),
        hf_config,
        mesh=mesh,
        dtype=torch.float32,
        heads=Heads.from_config(hf_config),
    )
    load_hf(model, hf_dir, family, hf_config)
    return model


@MENDED
def test_stock_model_gives_no_logits_of_heads(tmp_path, mesh):
    hf_dir = make_tiny_hf(tmp_path, "qwen3", depth=1)
    with pytest.raises(AttributeError, match="'NoneType' object has no attribute 'clone'"):
        stock_model(hf_dir, mesh)(TOKENS, POSITIONS, None)
    [ours] = our_model(hf_dir, mesh)
    logits = ours(ModelInputs(TOKENS, POSITIONS))
    assert logits.main.isfinite().all()
    assert logits.mtp[0].isfinite().all()


@MENDED
def test_a_micro_batch_without_targets(tmp_path, mesh, monkeypatch):
    """megatron-core's model computes 0 / 0 in its own mode; swiftlite's loss is 0 (tests/train/test_objective.py)."""
    monkeypatch.setattr(MTPLossLoggingHelper, "tracker", {})
    hf_dir = make_tiny_hf(tmp_path, "qwen3", depth=1)
    stock = stock_model(hf_dir, mesh, per_token=False).train()
    mask = torch.zeros(1, 12)
    loss = stock(TOKENS, POSITIONS, None, labels=TOKENS.roll(-1, 1), loss_mask=mask)
    (loss * mask).sum().backward()
    assert any(parameter.grad.isnan().any() for parameter in stock.parameters() if parameter.grad is not None)

    [ours] = our_model(hf_dir, mesh)
    losses = ours.train()(ModelInputs(TOKENS, POSITIONS), Target(torch.full_like(TOKENS, -100)))
    (losses.main.loss_BS.sum() + losses.mtp[0].loss_BS.sum()).backward()
    assert not any(parameter.grad.any() for parameter in ours.parameters() if parameter.grad is not None)


def test_stock_mtp_loss_depends_on_how_a_batch_is_cut(tmp_path, mesh, monkeypatch):
    """Without per-token losses, each micro-batch divides by the number of its own targets (gpt_model.py:658)."""
    monkeypatch.setattr(MTPLossLoggingHelper, "tracker", {})
    hf_dir = make_tiny_hf(tmp_path, "qwen3", depth=1)
    stock = stock_model(hf_dir, mesh, per_token=False).train()
    tokens = torch.randint(0, 128, (2, 12), generator=torch.Generator().manual_seed(0))
    mask = torch.ones(2, 12)
    mask[0, :9] = 0  # the first row has 3 targets, the second 12

    def head_gradient(rows: list[slice]) -> torch.Tensor:
        stock.zero_grad()
        for row in rows:
            loss = stock(tokens[row], POSITIONS.expand(2, 12)[row], None, labels=tokens[row], loss_mask=mask[row])
            (loss.sum() * 0).backward()  # the heads' gradient comes along whatever the trunk's loss is
        return stock.mtp.layers[0].eh_proj.weight.grad / len(rows)

    together, apart = head_gradient([slice(0, 2)]).clone(), head_gradient([slice(0, 1), slice(1, 2)])
    assert (together - apart).abs().max() > 0.1 * together.abs().max()


# Tied embeddings and MTP on a pipeline: gpt_model.py:249, language_module.py:341


def save_tied(hf_dir: Path, out_dir: Path, as_stock: bool) -> str:
    layout = ParallelLayout(pipeline_model_parallel_size=2)
    with session(layout, tied_embeddings=True, timeout_minutes=2) as mesh:
        [model] = our_model(hf_dir, mesh)
        if as_stock and model.post_process:  # as the stock constructor leaves it
            model.output_layer.weight = torch.nn.Parameter(torch.zeros_like(model.embedding.word_embeddings.weight))
        try:
            model.sharded_state_dict(metadata={"dp_cp_group": mesh.dp_cp})
        except AssertionError as error:
            return str(error)
        if not as_stock:
            Checkpointer(
                out_dir, mesh, [model], None, CheckpointState(step=0, mtp_num_layers=1, torch_dtype="float32")
            ).save(1)
    return ""


@pytest.mark.gloo
def test_stock_tied_model_with_heads_is_not_saved_from_a_pipeline(tmp_path):
    hf_dir = make_tiny_hf(tmp_path / "model", "qwen3", depth=1, tied=True)
    stock = launch(2, save_tied, hf_dir, tmp_path, True)
    assert stock[0] == ""
    assert stock[1] != ""
    assert launch(2, save_tied, hf_dir, tmp_path, False) == ["", ""]
    assert (tmp_path / "checkpoint-1").exists()


# MTP on a stage of its own: parallel_state.py:525, finalize_model_grads.py:146


def with_stock_embedding_ranks(job: parity.Job) -> list[dict[str, float]]:
    mesh_module._embedding_ranks = lambda *args, layout, tied: parallel_state.default_embedding_ranks(*args)
    parity.check_embeddings = lambda model: None  # it would find this too, after the first step
    return parity.compute(job)


@pytest.mark.gloo
@pytest.mark.slow
def test_stock_embedding_ranks_mix_gradients(tmp_path):
    """The gradients of embedding and output layer are added, which changes the gradient norms."""
    hf_dir = parity.make_model(tmp_path / "model", "qwen3")
    apart = parity.CASES["PP2 MTP apart"].options | parity.CASES["PP3 MTP middle"].options
    (alone,) = launch(1, parity.compute, parity.Job(hf_dir, tmp_path / "alone", steps=(1, 1)))
    ours, *_ = launch(3, parity.compute, parity.Job(hf_dir, tmp_path / "ours", apart, steps=(1, 1)))
    stock, *_ = launch(3, with_stock_embedding_ranks, parity.Job(hf_dir, tmp_path / "stock", apart, steps=(1, 1)))
    assert ours[0]["loss"] == pytest.approx(alone[0]["loss"], rel=parity.BOUNDS["loss"])
    assert stock[0]["loss"] == pytest.approx(alone[0]["loss"], rel=parity.BOUNDS["loss"])
    assert ours[0]["grad_norm"] == pytest.approx(alone[0]["grad_norm"], rel=parity.BOUNDS["grad_norm_1"])
    assert abs(stock[0]["grad_norm"] / alone[0]["grad_norm"] - 1) > 1e-3


# Experts that are cut another way than all else: tensor_parallel/layers.py:861


def without_marks(job: parity.Job) -> list[dict[str, float]]:
    SequentialMLP.__init__ = StockSequentialMLP.__init__  # type: ignore[method-assign]
    return parity.compute(job)


@MENDED
@pytest.mark.gloo
@pytest.mark.slow
def test_stock_experts_that_are_not_shared_lose_half_of_their_gradient(tmp_path):
    hf_dir = parity.make_model(tmp_path / "model", "qwen3_moe")
    options = parity.TP2_SP  # of each expert's matrices, every rank has the whole
    (alone,) = launch(1, parity.compute, parity.Job(hf_dir, tmp_path / "alone", steps=(1, 1)))
    ours, *_ = launch(2, parity.compute, parity.Job(hf_dir, tmp_path / "ours", options, steps=(1, 1)))
    stock, *_ = launch(2, without_marks, parity.Job(hf_dir, tmp_path / "stock", options, steps=(1, 1)))
    assert ours[0]["grad_norm"] == pytest.approx(alone[0]["grad_norm"], rel=parity.BOUNDS["grad_norm_1"])
    assert abs(stock[0]["grad_norm"] / alone[0]["grad_norm"] - 1) > 1e-3
