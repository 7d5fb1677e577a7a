"""Test SGLang's options for a checkpoint, and reading its counts. tests/e2e/test_sglang.py runs SGLang."""

import importlib.util
import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from swiftlite.acceptance.counts import DraftCounts
from swiftlite.args.commands import DeployArgs
from swiftlite.base.errors import UserError
from swiftlite.engines.engine import EngineConfig
from swiftlite.engines.index import ENGINES
from swiftlite.engines.plugin import require_plugin
from swiftlite.engines.served_model import resolve_served
from swiftlite.engines.sglang.engine import draft_counts, engine_options
from swiftlite.engines.sglang.options import cpu_variables, known_report
from swiftlite.engines.sglang.server import server_command
from tests.engines.dflash_reference import add_drafter
from tests.messages import mentions, naming
from tests.tiny import make_tiny_hf


def speculative(directory: Path, **options: Any) -> dict[str, Any]:
    """Return SGLang's speculative options, by the last part of their names."""
    given = engine_options(EngineConfig(resolve_served(directory), **options))
    prefix = "speculative_"
    return {name.removeprefix(prefix): value for name, value in given.items() if name.startswith(prefix)}


def test_drafting_is_derived_from_the_checkpoint(tmp_path):
    mimo = make_tiny_hf(tmp_path / "mimo", "mimo", depth=1)
    chain = {"algorithm": "NEXTN", "num_steps": 1, "eagle_topk": 1, "num_draft_tokens": 2}
    assert speculative(mimo, num_speculative_tokens=None) == chain
    assert speculative(mimo, num_speculative_tokens=3) == chain | {"num_steps": 3, "num_draft_tokens": 4}
    assert speculative(mimo, num_speculative_tokens=0) == {}
    tree = {"speculative_num_steps": 2, "speculative_eagle_topk": 2, "speculative_num_draft_tokens": 5}
    expected = {"algorithm": "NEXTN", "num_steps": 2, "eagle_topk": 2, "num_draft_tokens": 5}
    assert speculative(mimo, num_speculative_tokens=None, speculative_config=tree) == expected


@pytest.mark.parametrize(
    ("family", "depth", "words"),
    [("mimo", 0, "config.json --mtp_num_layers"), ("mimo", 2, "SGLang MiMoMTP 2"), ("qwen3", 2, "SGLang 2")],
)
def test_another_draft_than_the_heads_is_refused(tmp_path, family, depth, words):
    directory = make_tiny_hf(tmp_path, family, depth)
    with pytest.raises(UserError, match=naming(words)):
        speculative(directory, num_speculative_tokens=None)


@pytest.mark.parametrize("depth", [1, 3])
def test_heads_that_draft_once(tmp_path, depth):
    directory = make_tiny_hf(tmp_path, "mimo_v2_flash", depth)
    assert speculative(directory, num_speculative_tokens=None)["num_steps"] == 1
    with pytest.raises(UserError, match=naming("SGLang MiMoV2MTP 3 1")):
        speculative(directory, num_speculative_tokens=3)


@pytest.fixture
def has_gpu(monkeypatch):
    monkeypatch.setattr("swiftlite.engines.info.sees_gpu", lambda: True)


def add_block_drafter(directory: Path, rank: int, drafts: int = 3, **keys: Any) -> Path:
    """Write a model with a drafter of 3 drafts, whose folder has one tensor."""
    add_drafter(make_tiny_hf(directory, "llama", num_hidden_layers=4), [1, 2], rank=rank)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"mtp_unroll": drafts, **keys}))
    (directory / "draft").mkdir()
    (directory / "draft/config.json").write_text('{"num_hidden_layers": 1}')
    save_file({"fc.weight": torch.zeros(8)}, directory / "draft/model.safetensors")
    return directory


@pytest.mark.parametrize(("rank", "algorithm"), [(0, "DFLASH"), (8, "DSPARK")])
def test_a_block_is_one_step(has_gpu, tmp_path, rank, algorithm):
    """As `_handle_dflash` and `_handle_dspark` require (arg_groups/speculative_hook.py of 0.5.23)."""
    model = add_block_drafter(tmp_path, rank)
    block = {"algorithm": algorithm, "draft_model_path": str(tmp_path / "draft"), "num_steps": 1, "eagle_topk": 1}
    for given, number in ((None, 3), (2, 2)):
        size = {"dspark_block_size": number} if rank else {}
        expected = block | size | {"num_draft_tokens": number + 1}
        assert speculative(model, num_speculative_tokens=given) == expected
        assert speculative(model, num_speculative_tokens=given, draws_drafts=True) == expected
    with pytest.raises(UserError, match=naming("3 4")):
        speculative(model, num_speculative_tokens=4)


def test_a_block_drafter_that_sglang_does_not_run(has_gpu, tmp_path, monkeypatch):
    model = add_block_drafter(tmp_path, 0, mtp_draft_vocab="0-40")
    with pytest.raises(UserError, match=naming("SGLang dflash --draft_vocab 0")):
        speculative(model, num_speculative_tokens=None)
    monkeypatch.setattr("swiftlite.engines.info.sees_gpu", lambda: False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)  # SGLang is installed
    model = add_block_drafter(tmp_path / "whole", 0)
    with pytest.raises(UserError, match=naming("SGLang dflash GPU")):
        speculative(model, num_speculative_tokens=None)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
@pytest.mark.parametrize("is_there", [False, True])
def test_a_file_of_the_drafter_is_missing_or_cut_short(has_gpu, tmp_path, name, is_there):
    model = add_block_drafter(tmp_path, 0)
    file = model / "draft" / name
    content = file.read_bytes()
    file.unlink()
    if is_there:
        file.write_bytes(content[:-9])
    with pytest.raises(UserError, match=naming(f"draft/{name}")):
        speculative(model, num_speculative_tokens=2)


@pytest.mark.parametrize("depth", [0, 1])
def test_recurrent_layers_require_a_gpu(tmp_path, monkeypatch, depth):
    model = resolve_served(make_tiny_hf(tmp_path, "nemotron_h", depth, n_groups=8, mamba_num_heads=8))
    config = EngineConfig(model, num_speculative_tokens=depth)
    monkeypatch.setattr("swiftlite.engines.sglang.options.is_on_cpu", lambda: True)
    for refuse in (lambda: engine_options(config), lambda: server_command(DeployArgs(model.name), model, False, None)):
        with pytest.raises(UserError, match=naming("SGLang nemotron_h GPU")):
            refuse()


def test_groups_of_mamba_that_sglang_does_not_read(tmp_path):
    model = resolve_served(make_tiny_hf(tmp_path, "nemotron_h", n_groups=2))
    with pytest.raises(UserError, match=naming("SGLang n_groups 2")):
        engine_options(EngineConfig(model, num_speculative_tokens=0))
    assert mentions("\n".join(known_report(model).problems), "n_groups 2")


def test_engine_kwargs_come_last_and_null_removes(tmp_path):
    directory = make_tiny_hf(tmp_path, "mimo", depth=1)
    config = EngineConfig(
        resolve_served(directory), max_model_len=64, engine_kwargs={"dtype": "half", "context_length": None}
    )
    options = engine_options(config)
    assert options["dtype"] == "half"
    assert "context_length" not in options


@pytest.mark.parametrize(("has_accelerator", "drafts"), [(False, True), (False, False), (True, True)])
def test_a_cpu_gets_its_own_options(tmp_path, monkeypatch, has_accelerator, drafts):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: has_accelerator)
    directory = make_tiny_hf(tmp_path, "mimo", depth=1)
    options = engine_options(EngineConfig(resolve_served(directory), num_speculative_tokens=int(drafts)))
    assert ("device" in options) is not has_accelerator
    assert ("decode_attention_backend" in options) is (drafts and not has_accelerator)
    assert cpu_variables() == ({} if has_accelerator else {"SGLANG_USE_CPU_ENGINE": "1"})


@pytest.mark.parametrize("has_accelerator", [False, True])
def test_drafts_are_drawn_where_sglang_can_verify_them(tmp_path, monkeypatch, has_accelerator):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: has_accelerator)
    mimo = make_tiny_hf(tmp_path, "mimo", depth=1)
    drawn = {"use_rejection_sampling": True} if has_accelerator else {}
    greedy = speculative(mimo, num_speculative_tokens=2)
    assert speculative(mimo, num_speculative_tokens=2, draws_drafts=True) == greedy | drawn
    tree = {"speculative_num_steps": 2, "speculative_eagle_topk": 2, "speculative_num_draft_tokens": 5}
    given = {"num_speculative_tokens": None, "speculative_config": tree}
    assert speculative(mimo, **given, draws_drafts=True) == speculative(mimo, **given)
    with nullcontext() if has_accelerator else pytest.raises(UserError, match=naming("SGLang CPU")):
        ENGINES["sglang"].check_temperature(0.5)


def test_counts_by_position_from_steps_by_hits():
    meta_info = {"spec_correct_drafts_histogram": [2, 1, 3], "spec_num_proposed_drafts": 18}
    assert draft_counts(meta_info, 3) == DraftCounts(6, 18, (4, 3, 0))
    assert draft_counts({}, 2) == DraftCounts(0, 0, (0, 0))
    assert draft_counts({}, 0) == DraftCounts(0, 0, ())


def test_a_plugin_that_would_not_be_loaded(monkeypatch):
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: [])
    with pytest.raises(UserError, match=naming("SGLang swiftlite pip install")):
        require_plugin(ENGINES["sglang"])
