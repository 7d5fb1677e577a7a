"""Test gates per attention head, limits of SwiGLU, and output layers of heads, added to a tiny Qwen3."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from swiftlite.base.drafting import Drafting
from swiftlite.base.heads import Heads
from swiftlite.bridge.hf_config import read_config
from swiftlite.bridge.join import PadEnd
from swiftlite.bridge.rows import Row
from swiftlite.bridge.transfer import load_hf
from swiftlite.families import dense
from swiftlite.families.models.qwen3 import QWEN3
from swiftlite.families.rank import Rank
from swiftlite.model.build import build_model
from swiftlite.model.gpt import GPTModel
from swiftlite.model.inputs import ModelInputs, Target
from swiftlite.model.loss.losses import IGNORE_INDEX
from swiftlite.plan.kernels import Kernels
from swiftlite.plan.trainable import HEADS_ONLY
from tests.model.logits import ids_and_positions, load_transformers
from tests.tiny import make_tiny_hf

LIMIT = 0.5


def layer(hf_config: Mapping[str, Any], number: int):
    plain = QWEN3.layer(hf_config, number)
    attention: Any = plain.attention
    mlp: Any = plain.mlp
    return replace(plain, attention=replace(attention, head_gate=True), mlp=replace(mlp, limit=LIMIT))


def frame_rows(hf_config: Mapping[str, Any], head: int) -> list[Row]:
    shape = (hf_config["vocab_size"], hf_config["hidden_size"])
    output = Row(f"mtp.layers.{head}.output_layer.weight", {f"mtp.outputs.{head}.weight": shape}, PadEnd())
    return [*QWEN3.mtp.frame_rows(hf_config, head), output]


FAMILY = replace(
    QWEN3,
    layer=layer,
    outside=lambda hf_config: replace(dense.outside(hf_config), heads_have_output_layers=True),
    mtp=replace(
        QWEN3.mtp,
        frame_rows=frame_rows,
        head_of=lambda hf_config, key: (
            int(key.split(".")[2]) if key.startswith("mtp.outputs.") else QWEN3.mtp.head_of(hf_config, key)
        ),
    ),
)


def write(directory: Path, depth: int = 0) -> Path:
    """Write a tiny Qwen3 with 4 heads of attention, with gates and `depth` heads with output layers."""
    make_tiny_hf(directory, "qwen3", depth, num_attention_heads=4, num_key_value_heads=2)
    tensors = load_file(directory / "model.safetensors")
    blocks = [name.removesuffix("q_proj.weight") for name in tensors if name.endswith("q_proj.weight")]
    tensors |= {f"{block}g_proj.weight": torch.randn(4, 64) for block in blocks}
    tensors |= {f"mtp.outputs.{head}.weight": torch.randn(128, 64) * 0.2 for head in range(depth)}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def load(directory: Path, mesh, depth: int = 0, **options: Any) -> GPTModel:
    hf_config = read_config(directory)
    architecture = FAMILY.architecture(hf_config)
    options |= {"mesh": mesh, "dtype": torch.float32, "heads": Heads(layers=depth)}
    (model,) = build_model(architecture, hf_config, **options)
    if options.get("freeze_trunk"):
        HEADS_ONLY.apply([model])
    load_hf([model], directory, FAMILY, hf_config)
    return model


def with_gates_and_limits(model: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """Let a Qwen3 of transformers have the gates of these tensors, and the limit."""
    for number, layer in enumerate(model.model.layers):
        weight = tensors[f"model.layers.{number}.self_attn.g_proj.weight"]
        inputs: list[torch.Tensor] = []

        def see(module, args, kwargs, inputs=inputs):
            inputs[:] = [kwargs["hidden_states"]]

        def gate(module, args, weight=weight, inputs=inputs):
            gates = (inputs[0] @ weight.T).sigmoid()
            return ((args[0].unflatten(-1, (4, -1)) * gates[..., None]).flatten(-2),)

        layer.self_attn.register_forward_pre_hook(see, with_kwargs=True)
        layer.self_attn.o_proj.register_forward_pre_hook(gate)
        layer.mlp.act_fn.register_forward_hook(lambda module, args, activated: activated.clamp(max=LIMIT))
        layer.mlp.up_proj.register_forward_hook(lambda module, args, up: up.clamp(-LIMIT, LIMIT))
    return model


@pytest.mark.parametrize("is_fused", [False, True])
def test_gates_and_limits(tmp_path, mesh, is_fused):
    """With fused activations, which have no limit, layers with a limit use their own."""
    directory = write(tmp_path)
    ids, positions = ids_and_positions(20)
    kernels = Kernels(is_fused=is_fused)
    model = load(directory, mesh, kernels=kernels).eval()
    expected = with_gates_and_limits(
        load_transformers(directory, "qwen3", torch.float32), load_file(directory / "model.safetensors")
    )
    with torch.no_grad():
        found, theirs = model(ModelInputs(ids, positions)).main, expected(ids).logits
    # Fused kernels round in another order: 8 roundings of logits up to 16.
    torch.testing.assert_close(found, theirs, rtol=0, atol=2e-5 if is_fused else 0)


def test_sizes(tmp_path):
    directory = write(tmp_path)
    hf_config = read_config(directory)
    kind, plain = FAMILY.layer(hf_config, 0).attention, QWEN3.layer(hf_config, 0).attention
    assert kind.parameters(Rank()).total - plain.parameters(Rank()).total == 4 * 64
    assert kind.parameters(Rank(tp=2)).total - plain.parameters(Rank(tp=2)).total == 2 * 64
    assert kind.macs_per_token() - plain.macs_per_token() == 4 * 64


@pytest.mark.parametrize("chains_before_norm", [False, True])
def test_what_the_second_head_reads(tmp_path, mesh, chains_before_norm):
    """If heads are chained before the norm, the output norm of the first head does not change the second head."""
    drafting = Drafting(chains_before_norm=chains_before_norm)
    model = load(write(tmp_path, 2), mesh, 2, drafting=drafting).eval()
    ids, positions = ids_and_positions(20)
    first: Any = model.mtp.layers[0]
    with torch.no_grad():
        before = model(ModelInputs(ids, positions)).mtp
        first.final_layernorm.weight.mul_(torch.rand(64) + 0.5)
        after = model(ModelInputs(ids, positions)).mtp
    assert not torch.equal(before[0], after[0])
    assert torch.equal(before[1], after[1]) is chains_before_norm


@pytest.mark.parametrize("in_chunks", [False, True])
@pytest.mark.parametrize("kind", ["ce", "kl"])
@pytest.mark.parametrize("freeze_trunk", [False, True])
def test_losses_of_heads_with_output_layers(tmp_path, mesh, kind, in_chunks, freeze_trunk):
    model = load(write(tmp_path, 2), mesh, 2, mtp_loss=kind, freeze_trunk=freeze_trunk)
    model.loss_in_chunks = in_chunks
    ids, positions = ids_and_positions(20)
    with torch.no_grad():
        logits = model(ModelInputs(ids, positions))
    labels = [ids.roll(-1 - depth, 1) for depth in range(3)]
    for depth, each in enumerate(labels):
        each[:, 19 - depth :] = IGNORE_INDEX
    losses = model(ModelInputs(ids, positions), Target(labels[0], mtp_labels=labels[1:]))
    for depth in (1, 2):
        end = 19 - depth
        head, label_BS = logits.mtp[depth - 1][:, :end].log_softmax(-1), labels[depth][:, :end]
        expected = -head.gather(-1, label_BS[..., None])[..., 0]
        if kind == "kl":
            trunk = logits.main[:, depth : depth + end].log_softmax(-1)
            expected = (trunk.exp() * (trunk - head)).sum(-1)
        found = losses.mtp[depth - 1].loss_BS[:, :end]
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)  # rounding of losses up to 20
    torch.stack([loss.loss_BS.sum() for loss in losses.mtp]).sum().backward()
    for head in model.mtp.layers:
        own: Any = head.output_layer
        assert own.weight.grad.abs().sum() > 0
    trunk_weight: Any = model.output_layer.weight
    assert trunk_weight.grad is None or not trunk_weight.grad.any()
