"""Test that experts computed as one grouped product equal experts computed one by one."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from swiftlite.args.fields import DistributedArgs
from swiftlite.families.resolved import resolve
from swiftlite.model.inputs import ModelInputs, Target
from swiftlite.model.layers.experts import GroupedMLP, together
from swiftlite.model.layers.tensor_parallel import AddsGradients
from swiftlite.model.open import open_model
from swiftlite.plan.kernels import Kernels
from swiftlite.runtime.mesh import Mesh
from swiftlite.train.optim import wrap_model
from tests.model.test_logits import load_megatron
from tests.tiny import make_tiny_hf

COUNTS = {"some": [5, 0, 9, 3], "none at the end": [5, 9, 3, 0], "all with one": [0, 17, 0, 0], "no token": [0] * 4}


@pytest.fixture
def experts(tmp_path, mesh) -> torch.nn.Module:
    return load_experts(tmp_path, mesh, "qwen3_moe")


def load_experts(directory: Path, mesh: Mesh, family: str) -> torch.nn.Module:
    model = load_megatron(make_tiny_hf(directory, family), mesh, torch.float32)
    return model.decoder.layers[0].get_submodule("mlp.experts")


def grouped(experts: torch.nn.Module) -> GroupedMLP:
    """Return the same module as an instance of `GroupedMLP`."""
    experts.__class__ = GroupedMLP
    assert isinstance(experts, GroupedMLP)
    experts.is_aligned = True
    first: Any = experts.local_experts[0]
    experts.activation = first.activation_func
    return experts


def run(experts: torch.nn.Module, counts: list[int]) -> list[torch.Tensor]:
    """Return the output, and the gradients of tokens, of routing weights, and of matrices."""
    generator = torch.Generator().manual_seed(0)
    dtype = next(experts.parameters()).dtype
    hidden = torch.randn(sum(counts), 64, generator=generator).to(dtype).requires_grad_()
    probs = torch.rand(sum(counts), generator=generator).requires_grad_()
    output, _ = experts(hidden, torch.tensor(counts), probs)
    output.backward(torch.randn(output.shape, generator=generator).to(dtype))
    assert hidden.grad is not None
    assert probs.grad is not None
    matrices = [parameter.grad for parameter in experts.parameters()]
    experts.zero_grad()
    return [output.detach(), hidden.grad, probs.grad, *(torch.zeros(1) if grad is None else grad for grad in matrices)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("counts", COUNTS.values(), ids=list(COUNTS))
def test_one_product_makes_the_same_bits(experts, counts, dtype):
    expected = run(experts.to(dtype), counts)
    ours = run(grouped(experts), counts)
    assert [torch.equal(a, b) for a, b in zip(expected, ours, strict=True)] == [True] * len(expected)


@pytest.mark.parametrize("counts", COUNTS.values(), ids=list(COUNTS))
def test_experts_with_biases(tmp_path, mesh, counts):
    """Biases are summed over the tokens of each expert, in another order."""
    experts = load_experts(tmp_path, mesh, "gpt_oss")
    expected = run(experts, counts)
    ours = run(grouped(experts), counts)
    for found, its in zip(ours, expected, strict=True):
        torch.testing.assert_close(found, its, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("linear", ["linear_fc1", "linear_fc2"])
@pytest.mark.parametrize("counts", COUNTS.values(), ids=list(COUNTS))
def test_adapters_of_experts_add_the_same_bits(experts, linear, counts):
    def add(layer: torch.nn.Module, inputs: tuple[torch.Tensor], output: tuple[torch.Tensor, None]) -> tuple:
        added = inputs[0].sin().mean(1, keepdim=True) * layer.get_parameter("weight").mean()
        return output[0] + added, output[1]

    for expert in experts.get_submodule("local_experts").children():
        expert.get_submodule(linear).register_forward_hook(add)
    expected = run(experts, counts)
    ours = run(grouped(experts), counts)
    assert [torch.equal(a, b) for a, b in zip(expected, ours, strict=True)] == [True] * len(expected)


def test_weights_arrive_before_they_are_read(experts):
    """With `overlap_param_gather`, a hook of the layer waits until its weights are gathered."""
    expected = run(experts, COUNTS["some"])[0]
    weights = {}

    def arrive(linear: torch.nn.Module, *unused: object) -> None:
        linear.get_parameter("weight").data.copy_(weights[linear])

    for expert in experts.get_submodule("local_experts").children():
        for linear in (expert.get_submodule(f"linear_{name}") for name in ("fc1", "fc2")):
            weights[linear] = linear.get_parameter("weight").detach().clone()
            linear.get_parameter("weight").data.zero_()
            linear.register_forward_pre_hook(arrive)
    assert torch.equal(run(grouped(experts), COUNTS["some"])[0], expected)


def test_weights_are_not_kept_twice_for_the_backward_pass(experts):
    """The experts of a layer are most of its memory."""
    experts = grouped(experts)
    parameters = {parameter.untyped_storage().data_ptr() for parameter in experts.parameters()}
    kept = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.numel()
        return tensor

    hidden = torch.randn(17, 64, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        experts(hidden, torch.tensor(COUNTS["some"]), torch.rand(17))
    assert parameters <= set(kept)
    others = [size for place, size in kept.items() if place not in parameters]
    assert max(others) < sum(parameter.numel() for parameter in experts.parameters()) / len(parameters)


def test_nothing_is_copied_to_the_host(experts):
    """A copy to the host would read values of meta tensors, which raises an error."""
    experts = grouped(experts).bfloat16().to("meta")
    output, _ = experts(
        torch.empty(17, 64, dtype=torch.bfloat16, device="meta"),
        torch.empty(4, dtype=torch.int64, device="meta"),
        torch.empty(17, device="meta"),
    )
    assert output.shape == (17, 64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("overlaps", [False, True], ids=["", "overlap"])
def test_gradients_of_all_experts_are_added_at_once(overlaps, dtype, tmp_path, mesh, monkeypatch):
    """With two micro-batches under DistributedDataParallel, `main_grad` equals the sum that its hooks compute one by
    one.
    """
    directory = make_tiny_hf(tmp_path, "qwen3_moe", num_experts=4, vocab_size=131)
    sums, additions = [], []
    for at_once in (False, True):
        (chunk,), _ = open_model(resolve(directory), mesh, dtype=dtype, kernels=Kernels(has_grouped_experts=True))
        monkeypatch.setattr(GroupedMLP, "works_with_overlap", at_once)
        monkeypatch.setattr(GroupedMLP, "add_gradients_in_place", AddsGradients.add_gradients_in_place)
        if not at_once:
            monkeypatch.setattr(GroupedMLP, "add_gradients_in_place", lambda self: None)
        (model,) = wrap_model([chunk], mesh, dtype, DistributedArgs(overlap_grad_reduce=overlaps))
        model.zero_grad_buffer()
        with Additions() as counted:
            for seed in (1, 2):
                tokens = torch.randint(0, 131, (2, 12), generator=torch.Generator().manual_seed(seed))
                losses: Any = model(
                    ModelInputs(tokens, torch.arange(12).expand(2, 12)), Target(tokens.roll(-1, dims=1))
                )
                losses.main.loss_BS.sum().backward()
        additions.append(counted.number)
        parameters: Any = chunk.named_parameters()
        sums.append({name: each.main_grad for name, each in parameters if ".experts." in name})
    assert sums[0].keys() == sums[1].keys()
    for name, total in sums[0].items():
        assert torch.equal(sums[1][name], total), name
        assert bool(total.any())
    # In each of 2 layers and 2 micro-batches: 2 matrices of 4 experts.
    assert additions[0] - additions[1] == 2 * 2 * (2 * 4 - 2)


class Additions(TorchDispatchMode):
    """Counts additions to float32 matrices, and additions to several matrices at once."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.add_.Tensor:
            self.number += args[0].dtype is torch.float32 and args[0].dim() > 1
        return func(*args, **(kwargs or {}))


def test_sums_that_are_not_evenly_apart_are_added_one_by_one():
    buffer, other = torch.zeros(40), torch.zeros(4)
    evenly = [buffer[start : start + 4].view(2, 2) for start in (20, 10, 0)]
    whole = together(evenly)
    assert whole is not None
    whole[0].fill_(1)
    assert evenly[2].tolist() == [[1, 1], [1, 1]]
    assert float(buffer.sum()) == 4
    assert together([buffer[0:4].view(2, 2)]) is not None
    assert together([buffer[20:24], buffer[11:15], buffer[0:4]]) is None
    assert together([buffer[0:4], buffer[10:14]]) is None  # the first expert first
    assert together([buffer[2:6], buffer[0:4]]) is None  # one in the other
    assert together([other, buffer[0:4]]) is None
