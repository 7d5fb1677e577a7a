"""Test the audit of a directory: no problem for a valid directory, and the name of the tensor for an invalid one."""

import re

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from safetensors.torch import load_file, save_file

from swiftlite import families
from swiftlite.bridge.audit import audit_hf, mtp_depth_on_disk
from swiftlite.bridge.hf_config import read_config
from tests.messages import mention_each, mentions
from tests.tiny import make_tiny_hf, mtp_names, promise


def audit(hf_dir) -> list[str]:
    return audit_hf(hf_dir, families.get(read_config(hf_dir)))


def rewrite(hf_dir, change) -> None:
    tensors = load_file(hf_dir / "model.safetensors")
    change(tensors)
    save_file(tensors, hf_dir / "model.safetensors")


@pytest.mark.parametrize("family", families.FAMILIES)
def test_heads_on_disk_and_in_the_config(tmp_path, family):
    hf_dir = make_tiny_hf(tmp_path, family, depth=2)
    known = families.FAMILIES[family]
    assert audit(hf_dir) == []
    on_disk = mtp_depth_on_disk(hf_dir, known, read_config(hf_dir))
    assert (on_disk.promised, on_disk.depth, on_disk.missing) == (2, 2, ())

    promise(hf_dir, 1)
    assert mention_each(audit(hf_dir), ["config.json 1 2"])
    promise(hf_dir, 3)
    problem, *problems = audit(hf_dir)
    assert mentions(problem, "config.json 3 2")
    missing = mtp_depth_on_disk(hf_dir, known, read_config(hf_dir)).missing
    assert mtp_names(family, 2)[0]["projection"] in missing
    assert mention_each(problems, missing)

    promise(hf_dir, 2)
    keys = [key for row in known.head_rows(read_config(hf_dir), 0) for key in row.hf]
    stored = keys
    if family == "gpt_oss":  # whose files have all experts in one tensor
        stored = dict.fromkeys(re.sub(r"experts\.\d+\.", "experts.", key) for key in keys)
    rewrite(hf_dir, lambda tensors: [tensors.pop(key) for key in stored])
    on_disk = mtp_depth_on_disk(hf_dir, known, read_config(hf_dir))
    assert (on_disk.depth, set(on_disk.missing)) == (2, set(keys))
    assert mention_each(audit(hf_dir), keys)


# One directory serves all examples; each writes its own files over it.
@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data())
def test_any_subset_of_missing_tensors_is_named(tmp_path, data):
    hf_dir = tmp_path / "in"
    if not hf_dir.exists():
        make_tiny_hf(hf_dir, "mimo", depth=1)
        (hf_dir / "model.safetensors").rename(hf_dir / "whole")
    tensors = load_file(hf_dir / "whole")
    missing = data.draw(st.sets(st.sampled_from(sorted(tensors)), max_size=8))
    save_file({key: tensor for key, tensor in tensors.items() if key not in missing}, hf_dir / "model.safetensors")
    problems = "\n".join(audit(hf_dir))
    assert {key for key in tensors if mentions(problems, key)} == missing


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda t: t.update(extra=torch.ones(1)), "extra"),
        (lambda t: t.update({"mtp.stray": torch.ones(1)}), "mtp.stray"),
        (
            lambda t: t.update({"mtp.fc.weight": torch.ones(64, 64)}),
            "mtp.fc.weight [64, 64] config.json [64, 128]",
        ),
        (
            lambda t: t.update({"lm_head.weight": t["lm_head.weight"].int()}),
            "lm_head.weight torch.int32",
        ),
        (lambda t: t["lm_head.weight"][3, 5:7].fill_(float("nan")), "lm_head.weight: 2 8192"),
        (lambda t: t["mtp.norm.weight"][:1].fill_(float("inf")), "mtp.norm.weight: 1 64"),
    ],
)
def test_wrong_tensors(tmp_path, change, expected):
    hf_dir = make_tiny_hf(tmp_path, "qwen3", depth=1)
    rewrite(hf_dir, change)
    assert mention_each(audit(hf_dir), [expected])


def test_tied_copy_that_differs(tmp_path):
    hf_dir = make_tiny_hf(tmp_path, "qwen2", tied=True)
    rewrite(hf_dir, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    assert audit(hf_dir) == []
    rewrite(hf_dir, lambda t: t["lm_head.weight"][-1].add_(1))
    assert mention_each(audit(hf_dir), ["lm_head.weight model.embed_tokens.weight"])


def test_unreadable_directory(tmp_path):
    hf_dir = make_tiny_hf(tmp_path, "qwen3", depth=1)
    family, config = families.FAMILIES["qwen3"], hf_dir / "config.json"
    whole = (hf_dir / "model.safetensors").read_bytes()
    (hf_dir / "model.safetensors").write_bytes(whole[:-1])
    assert mentions(audit_hf(hf_dir, family)[0], "model.safetensors:")
    (hf_dir / "model.safetensors").unlink()
    assert mentions(audit_hf(hf_dir, family)[0], "model.safetensors model.safetensors.index.json")
    config.unlink()
    assert mentions(audit_hf(hf_dir, family)[0], "config.json")
