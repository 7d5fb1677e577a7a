"""Test run_report.json: hashes against hashlib, and changed tensors."""

import hashlib
import json
from typing import Any

import pytest
import torch

from swiftlite.base.errors import UserError
from swiftlite.bridge.transfer import WeightsReport
from swiftlite.data.dataset import Data, DataReport
from swiftlite.plan.trainable import HEADS_ONLY, JOINT, Trainable
from swiftlite.train.metrics.run_report import check_frozen, compare_tensors, hash_tensors, write_report
from tests.messages import naming


def make_chunk() -> Any:
    """Return parameters with the names of a trunk and a head."""
    return torch.nn.ModuleDict({"decoder": torch.nn.Linear(3, 2), "mtp": torch.nn.Linear(2, 2, bias=False)})


def add_one(parameter: torch.Tensor) -> None:
    with torch.no_grad():
        parameter += 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_hash_is_that_of_the_bytes(dtype):
    chunk = make_chunk().to(dtype)
    found = hash_tensors([chunk])
    assert list(found) == ["decoder.weight", "decoder.bias", "mtp.weight"]
    content = (
        chunk["mtp"].weight.detach().view(torch.int16 if dtype is torch.bfloat16 else torch.int32).numpy().tobytes()
    )
    assert found["mtp.weight"] == hashlib.sha256(content).hexdigest()


def test_virtual_stages_are_told_apart():
    assert list(hash_tensors([make_chunk(), make_chunk()])) == [
        f"stage{number}.{name}" for number in (0, 1) for name in ("decoder.weight", "decoder.bias", "mtp.weight")
    ]


def test_what_changed_and_what_did_not(mesh):
    chunk = make_chunk()
    before = hash_tensors([chunk])
    add_one(chunk["decoder"].weight)
    add_one(chunk["mtp"].weight)
    joint = compare_tensors([chunk], before, JOINT)
    assert joint["trained_tensors"] == 2
    assert joint["trained_but_unchanged"] == ["rank0.decoder.bias"]
    assert joint["frozen_tensors"] == 0
    assert joint["frozen_but_changed"] == []
    check_frozen(joint, JOINT)

    heads = compare_tensors([chunk], before, HEADS_ONLY)
    assert heads["trained_tensors"] == 1
    assert heads["trained_but_unchanged"] == []
    assert heads["frozen_tensors"] == 1
    assert heads["frozen_but_changed"] == ["rank0.decoder.weight"]
    with pytest.raises(UserError, match=naming("--mtp_mode heads_only rank0.decoder.weight")):
        check_frozen(heads, HEADS_ONLY)


def test_the_hash_of_the_trunk_leaves_the_heads_out(mesh):
    chunk = make_chunk()
    before = hash_tensors([chunk])
    add_one(chunk["mtp"].weight)
    same = compare_tensors([chunk], before, HEADS_ONLY)
    assert same["trunk_sha256_before"] == same["trunk_sha256_after"]
    add_one(chunk["decoder"].bias)
    other = compare_tensors([chunk], before, HEADS_ONLY)
    assert other["trunk_sha256_before"] == same["trunk_sha256_before"]
    assert other["trunk_sha256_after"] != other["trunk_sha256_before"]


def test_any_choice_of_parameters_is_proven(mesh):
    """The trained parameters, like those of adapters, are neither the whole trunk nor the whole heads."""
    biases = Trainable(lambda name: name.endswith("bias"), "biases alone", "--train biases")
    chunk = make_chunk()
    biases.apply([chunk])
    assert [name for name, parameter in chunk.named_parameters() if parameter.requires_grad] == ["decoder.bias"]
    before = hash_tensors([chunk])
    chunk["decoder"](torch.ones(1, 3)).sum().backward()
    torch.optim.SGD([p for p in chunk.parameters() if p.requires_grad], lr=1.0).step()
    found = compare_tensors([chunk], before, biases)
    assert (found["trained_tensors"], found["frozen_tensors"]) == (1, 2)
    check_frozen(found, biases)


def test_the_file_accounts_for_data_and_weights(tmp_path):
    data = Data([], [], [], DataReport(train_samples=3), "digest")
    loaded = WeightsReport(("a", "b"), {"mtp.x": "random"}, ("lm_head.weight",))
    write_report(tmp_path, {"steps": 2, "seconds": 0.1, "evaluation": {}}, data, loaded, {"trained_tensors": 1})
    content = json.loads((tmp_path / "run_report.json").read_text())
    assert list(content) == ["steps", "seconds", "evaluation", "data", "data_sha256", "weights", "tensors"]
    assert content["data"]["train_samples"] == 3
    assert content["weights"] == {"loaded": 2, "initialized": {"mtp.x": "random"}, "dropped": ["lm_head.weight"]}
