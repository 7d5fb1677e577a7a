"""Test the initial weights of heads that no file contains. They must be the same for every tensor-parallel size."""

import pytest
import torch

from swiftlite.bridge.binding import Shard
from swiftlite.bridge.join import GATE_UP
from swiftlite.bridge.mtp_init import pass_through, random_tensors
from swiftlite.bridge.rows import Row


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_the_projection_passes_the_embedding_through(tp_size):
    parts = []
    for rank in range(tp_size):
        name = "mtp.layers.1.eh_proj.weight"
        part = Shard(name, torch.full((8 // tp_size, 16), torch.nan), partition_dim=0, tp_rank=rank, tp_size=tp_size)
        pass_through([name], norm_start=1.0)[name](part)
        parts.append(part.tensor)
    assert torch.equal(torch.cat(parts), torch.cat([torch.eye(8), 0.2 * torch.eye(8)], dim=1))


@pytest.mark.parametrize("start", [0.0, 1.0])
def test_norms_without_a_counterpart_change_nothing(start):
    for name in ("enorm", "hnorm", "hnorm.2"):
        norm = Shard(f"mtp.layers.0.{name}.weight", torch.full((8,), torch.nan))
        pass_through([norm.name], norm_start=start)[norm.name](norm)
        assert torch.equal(norm.tensor, torch.full((8,), start))


def test_what_is_drawn_depends_on_the_seed_and_the_name_alone():
    gate_up = Row("mlp.linear_fc1.weight", {"gate.weight": (64, 64), "up.weight": (64, 64)}, GATE_UP)
    alone = Row("mlp.other.weight", {"up.weight": (64, 64)})
    drawn = random_tensors(gate_up, std=0.02, seed=1, norm_start=1.0)
    assert torch.equal(drawn["up.weight"], random_tensors(alone, std=0.02, seed=1, norm_start=1.0)["up.weight"])
    assert not torch.equal(drawn["up.weight"], drawn["gate.weight"])
    assert not torch.equal(drawn["up.weight"], random_tensors(gate_up, std=0.02, seed=2, norm_start=1.0)["up.weight"])
    assert drawn["up.weight"].std().item() == pytest.approx(0.02, rel=0.05)  # of 4096 numbers: 1.1 % is one sigma


@pytest.mark.parametrize(("name", "number"), [("input_layernorm.weight", 0.5), ("linear_qkv.bias", 0)])
def test_norms_and_biases_are_not_drawn(name, number):
    drawn = random_tensors(Row(name, {"a": (4,), "b": (2,)}), std=0.02, seed=1, norm_start=0.5)
    assert {key: tensor.tolist() for key, tensor in drawn.items()} == {"a": [number] * 4, "b": [number] * 2}
