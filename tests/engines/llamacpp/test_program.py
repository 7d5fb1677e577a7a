"""Test how llama.cpp's server is found and called."""

import stat
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFWriter

from swiftlite.base.errors import UserError
from swiftlite.engines.engine import Completion, Sampling
from swiftlite.engines.index import ENGINES
from swiftlite.engines.llamacpp import embedded
from swiftlite.engines.llamacpp.client import request_of
from swiftlite.engines.llamacpp.engine import cut
from swiftlite.engines.llamacpp.gguf_file import gguf_options
from swiftlite.engines.llamacpp.program import program
from swiftlite.engines.llamacpp.server import DraftNumbers, server_options
from swiftlite.engines.served_model import resolve_served
from swiftlite.engines.server.metrics import counts_of
from swiftlite.families.resolved import resolve
from tests.messages import mentions, naming
from tests.tiny import make_tiny_hf

METRICS = """\
llamacpp:spec_decode_num_draft_tokens_total 4
llamacpp:spec_decode_num_drafts_total 2
llamacpp:spec_decode_num_accepted_tokens_per_pos_total{position="0"} 1
"""


def executable(path: Path) -> Path:
    path.write_text("#!/bin/sh\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def test_an_executable_has_precedence(tmp_path, monkeypatch, caplog):
    monkeypatch.delenv("LLAMA_SERVER", raising=False)
    monkeypatch.setenv("PATH", "")
    package = program()
    on_path = executable(tmp_path / "llama-server")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert program() == [str(on_path)]
    named = executable(tmp_path / "mine")
    monkeypatch.setenv("LLAMA_SERVER", str(named))
    assert program() == [str(named)]
    monkeypatch.setenv("LLAMA_SERVER", str(tmp_path / "missing"))
    assert program() is None
    assert not ENGINES["llamacpp"].is_installed
    assert mentions(caplog.text, f"LLAMA_SERVER={tmp_path}/missing")
    assert package is None or package == [sys.executable, "-m", "swiftlite.engines.llamacpp.embedded"]


def test_an_option_that_the_package_does_not_support_is_named():
    pytest.importorskip("xllamacpp")
    with pytest.raises(SystemExit) as caught:
        embedded.main(["--model", "x.gguf", "--mlock"])
    assert mentions(str(caught.value), "--mlock LLAMA_SERVER")


def test_options_reach_the_package():
    xllamacpp = pytest.importorskip("xllamacpp")
    params = xllamacpp.CommonParams()
    for name, value in {"model": "a.gguf", "spec-draft-n-max": "3", "threads": "2", "cache-type-k": "f32"}.items():
        embedded.OPTIONS[name](params, value)
    embedded.OPTIONS["spec-type"](params, "ngram-simple,draft-mtp")
    embedded.OPTIONS["spec-ngram-simple-size-n"](params, "2")
    embedded.OPTIONS["spec-ngram-simple-size-m"](params, "4")
    embedded.OPTIONS["chat-template-kwargs"](params, '{"enable_thinking": false, "style": "a b"}')
    embedded.SWITCHES["no-spec-draft-backend-sampling"](params)
    assert (params.model.path, params.speculative.draft.n_max, params.cpuparams.n_threads) == ("a.gguf", 3, 2)
    assert params.cache_type_k == xllamacpp.ggml_type.GGML_TYPE_F32
    kinds = xllamacpp.common_speculative_type
    assert params.speculative.types == [
        kinds.COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE,
        kinds.COMMON_SPECULATIVE_TYPE_DRAFT_MTP,
    ]
    assert (params.speculative.ngram_simple.size_n, params.speculative.ngram_simple.size_m) == (2, 4)
    assert not params.speculative.draft.backend_sampling
    assert params.default_template_kwargs == {"enable_thinking": "false", "style": '"a b"'}


@pytest.mark.parametrize(
    ("stop_type", "stops", "expected"),
    [
        ("limit", (), Completion([1, 2, 3, 4], "length")),
        ("limit", (3,), Completion([1, 2, 3], "stop")),
        ("limit", (9,), Completion([1, 2, 3, 4], "length")),
        ("eos", (9,), Completion([1, 2, 3, 4], "stop")),
    ],
)
def test_an_answer_ends_at_the_first_stop_token(stop_type, stops, expected):
    assert cut({"tokens": [1, 2, 3, 4], "stop_type": stop_type}, stops) == expected


def test_counts_of_positions_without_accepted_drafts_are_zero():
    counts = counts_of(METRICS, "llamacpp:", 3)
    assert (counts.drafts, counts.drafted, counts.accepted_per_position) == (2, 4, (1, 0, 0))
    assert counts_of("", "llamacpp:", 2).accepted_per_position == (0, 0)


def write_sizes(file: Path, architecture: str, sizes: dict[str, int | list[int]]) -> None:
    writer = GGUFWriter(file, architecture)
    for key, size in sizes.items():
        add = writer.add_array if isinstance(size, list) else writer.add_uint32
        add(f"{architecture}.{key}", size)  # pyright: ignore[reportArgumentType]
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()


@pytest.mark.parametrize("architecture", ["dflash", "eagle3"])
def test_a_drafter_of_another_trunk_is_refused(tmp_path, architecture):
    """llama.cpp would crash. A model of its own can have any size."""
    model = resolve_served(make_tiny_hf(tmp_path / "model", "qwen3"))
    size = {"dflash": "embedding_length", "eagle3": "target_hidden_size"}[architecture]
    right = {size: model.config["hidden_size"], "vocab_size": model.config["vocab_size"], "target_layers": [1]}
    wrong = {size: 2 * right[size], "vocab_size": 7, "target_layers": [1, model.config["num_hidden_layers"]]}
    given = {"model_draft": str(tmp_path / "draft.gguf")}

    def check(architecture: str, sizes: dict[str, Any]) -> None:
        write_sizes(tmp_path / "draft.gguf", architecture, sizes)
        server_options(model, "float32", DraftNumbers(0, 0), None, 1, given, draws_drafts=False)

    check(architecture, right)
    check("qwen3", wrong)
    for key, value in wrong.items():
        with pytest.raises(UserError, match=naming(f"{given['model_draft']} {model.name}")):
            check(architecture, right | {key: value})


def test_the_drafter_next_to_a_file_is_named(tmp_path, caplog):
    model = resolve(make_tiny_hf(tmp_path / "model", "qwen3"))
    served = replace(model, name=str(tmp_path / "model.gguf"))
    Path(served.name).touch()
    assert gguf_options(served, "float32", drafts=True) == {"model": served.name}
    assert caplog.text == ""
    (tmp_path / "model-draft.gguf").touch()
    gguf_options(served, "float32", drafts=True)
    assert mentions(caplog.text, f"{tmp_path / 'model-draft.gguf'} --model")


def test_a_request_has_the_sampling_settings():
    request = request_of([1, 2], Sampling(8, temperature=0.5, top_p=0.9, stop_token_ids=(7,)), seed=3)
    assert (request["temperature"], request["top_p"], request["seed"], request["ignore_eos"]) == (0.5, 0.9, 3, False)
    assert request["samplers"] == ["temperature", "top_p"]
