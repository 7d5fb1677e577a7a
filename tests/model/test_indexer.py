"""Test models with indexers (DSA): up to `index_topk` tokens are exact, and the indexer's tensors are only held."""

from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from swiftlite.acceptance.teacher_forced import teacher_forced
from swiftlite.base.errors import UserError
from swiftlite.base.heads import Heads
from swiftlite.bridge.transfer import load_hf, save_hf
from swiftlite.data.sample import IGNORED, Sample
from swiftlite.families.resolved import resolve
from swiftlite.model.gpt import GPTModel
from swiftlite.model.inputs import ModelInputs
from swiftlite.model.open import build_hf_model, open_model
from tests.messages import naming
from tests.model.test_deepseek_v3 import TOLERANCE
from tests.model.test_logits import ids_and_positions, load_megatron, load_transformers
from tests.tiny import DSA, make_tiny_hf

TOPK = 24
NAMES = {"wq_b.weight", "wk.weight", "k_norm.weight", "k_norm.bias", "weights_proj.weight"}


def logits_of_both(directory, mesh, family: str, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    input_ids, position_ids = ids_and_positions(length)
    with torch.no_grad():
        ours = load_megatron(directory, mesh, torch.float32)(ModelInputs(input_ids, position_ids)).main
        return ours, load_transformers(directory, family, torch.float32)(input_ids).logits


@pytest.mark.parametrize("family", DSA)
def test_an_indexer_changes_only_tokens_after_topk(tmp_path, mesh, family):
    """The logits of transformers, which computes the indexer, show that rows must not be longer."""
    directory = make_tiny_hf(tmp_path, family, num_attention_heads=4, index_topk=TOPK)
    ours, theirs = logits_of_both(directory, mesh, family, 2 * TOPK)
    torch.testing.assert_close(ours[:, :TOPK], theirs[:, :TOPK], **TOLERANCE[torch.float32])
    assert (ours[:, TOPK:] - theirs[:, TOPK:]).abs().amax(dim=-1).min() > 1000 * TOLERANCE[torch.float32]["atol"]


@pytest.mark.parametrize("offset", [2, 3])
def test_layers_that_share_a_selection(tmp_path, mesh, offset):
    shared: dict[str, Any] = {"num_hidden_layers": 5, "index_topk_freq": 4, "index_skip_topk_offset": offset}
    directory = make_tiny_hf(tmp_path, "glm_moe_dsa", num_attention_heads=4, index_topk=TOPK, **shared)
    ours, theirs = logits_of_both(directory, mesh, "glm_moe_dsa", TOPK)
    torch.testing.assert_close(ours, theirs, **TOLERANCE[torch.float32])


def of_indexers(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in tensors.items() if ".indexer." in name}


def opened(directory, mesh, dtype: torch.dtype, **options: Any) -> GPTModel:
    (model,), _ = open_model(resolve(directory), mesh, dtype=dtype, **options)
    return model


def test_tensors_in_float32_stay_exact_in_bfloat16(tmp_path, mesh):
    directory = make_tiny_hf(tmp_path / "in", "deepseek_v32", depth=1, dtype=torch.bfloat16)
    tensors = load_file(directory / "model.safetensors")
    for name in tensors:
        if "k_norm" in name or "weights_proj" in name:
            tensors[name] = torch.randn(tensors[name].shape)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    hf_model = resolve(directory)
    (model,) = build_hf_model(hf_model, mesh, dtype=torch.bfloat16)
    model.bfloat16()  # as megatron-core's wrapper does
    load_hf([model], directory, hf_model.family, hf_model.config)
    dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
    save_hf([model], tmp_path / "out", hf_model.family, hf_model.config, dtypes=dtypes)
    written = load_file(tmp_path / "out/model.safetensors")
    assert len(of_indexers(tensors)) == 3 * len(NAMES)
    for name, tensor in of_indexers(tensors).items():
        assert written[name].dtype is tensor.dtype
        assert torch.equal(written[name], tensor), name


def test_indexers_are_not_trained(tmp_path, mesh):
    model = opened(make_tiny_hf(tmp_path, "deepseek_v32", depth=1), mesh, torch.float32)
    held = {name for name in model.state_dict() if ".indexer." in name}
    assert len(held) == 3 * len(NAMES)
    assert not held & {name for name, _ in model.named_parameters()}


@pytest.mark.parametrize("mtp_init", ["random", "copy_last_layer"])
def test_new_heads_have_the_indexer_of_the_trunk(tmp_path, mesh, mtp_init):
    """Of the last layer that has one, which is layer 2 here."""
    shared: dict[str, Any] = {"num_hidden_layers": 4, "index_topk_freq": 4, "index_skip_topk_offset": 3}
    directory = make_tiny_hf(tmp_path, "glm_moe_dsa", **shared)
    model = opened(directory, mesh, torch.float32, heads=Heads(2), mtp_init=mtp_init)
    state = model.state_dict()
    for head in (0, 1):
        names = [name for name in state if name.startswith(f"mtp.layers.{head}.") and ".indexer." in name]
        assert len(names) == len(NAMES)
        for name in names:
            part = name.partition(".self_attention.")[2]
            assert torch.equal(state[name], state[f"decoder.layers.2.self_attention.{part}"])
            assert state[name].any()


def test_longer_rows_are_refused(tmp_path, mesh):
    directory = make_tiny_hf(tmp_path, "glm_moe_dsa", index_topk=TOPK)

    def measure(length: int) -> Any:
        ids = np.arange(length, dtype=np.int32)
        labels = np.where(ids > 0, ids, IGNORED).astype(np.int32)
        sample = Sample(ids, labels, (labels != IGNORED).astype(np.float32))
        return teacher_forced(resolve(directory), [sample], torch_dtype="float32", mesh=mesh)

    assert measure(TOPK)["all"]["samples"] == 1
    with pytest.raises(UserError, match=naming(f"{directory} {TOPK + 1} glm_moe_dsa {TOPK} index_topk")):
        measure(TOPK + 1)
    assert resolve(directory).max_length == TOPK
