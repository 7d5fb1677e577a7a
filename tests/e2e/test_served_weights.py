"""Test a server of `swiftlite deploy --live_weights` that receives new weights over HTTP.

Its tokens and counts are compared with those of a model that was loaded from files; its errors are checked as well.
There is only one test, so that the server starts once.
"""

import importlib.util
import shutil
import sys
import urllib.error
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from swiftlite.base.errors import UserError
from swiftlite.engines.engine import Completion, Sampling
from swiftlite.engines.vllm.served import ServedVllm
from tests.e2e.test_engines import expected_counts, get, running, wait_for_health
from tests.engines.reference import Reference, convention, follow
from tests.gpu_links.gpu_links import install
from tests.messages import naming
from tests.stand_ins import gpu_link_environment
from tests.tiny import make_tiny_hf, make_tiny_tokenizer

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]
PORT = 8141
URL = f"http://127.0.0.1:{PORT}"
KEY = "of the test"
NEW_TOKENS = 16


def parts_of(directory: Path) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return the tensors of a checkpoint's trunk and of its heads."""
    tensors = load_file(directory / "model.safetensors")
    heads = {name: tensor for name, tensor in tensors.items() if name.startswith("mtp.")}
    return {name: tensor for name, tensor in tensors.items() if name not in heads}, heads


def joined(directory: Path, trunk_of: Path, heads_of: Path) -> Path:
    shutil.copytree(trunk_of, directory)
    save_file(parts_of(trunk_of)[0] | parts_of(heads_of)[1], directory / "model.safetensors")
    return directory


def expected(directory: Path, prompts: list[list[int]]) -> tuple:
    """Return the answers and counts of an engine started from a checkpoint. test_engines.py tests vLLM against the same
    values.
    """
    reference = follow(Reference.load(directory, "qwen3", depth=1), convention("vllm", "qwen3").drafting)
    completions, counts = reference.simulate(prompts, NEW_TOKENS, 1)
    return completions, expected_counts(counts)


def measured(engine: ServedVllm, prompts: list[list[int]]) -> tuple:
    before = engine.draft_counts()
    completions: list[Completion] = engine.generate(prompts, Sampling(NEW_TOKENS))
    return [one.token_ids for one in completions], expected_counts(engine.draft_counts().since(before))


@pytest.mark.slow
def test_a_server_takes_new_weights_from_another_gpu(trained, tmp_path, monkeypatch):
    new, prompts = trained("qwen3", 1, "vllm")
    prompts = [prompt for prompt in prompts if len(prompt) > 1]
    old = make_tiny_hf(tmp_path / "old", "qwen3", depth=1)
    make_tiny_tokenizer().save_pretrained(old)
    words = f"deploy --model {old} --torch_dtype float32 --port {PORT} --max_model_len 128 --live_weights".split()
    words += ["--weight_transport", "nccl"]
    monkeypatch.setenv("PYTHONPATH", gpu_link_environment()["PYTHONPATH"])
    install(monkeypatch.setattr)  # in the place of the trainer
    with running([sys.executable, "-m", "swiftlite", *words], tmp_path / "log") as server:
        wait_for_health(server, URL, tmp_path / "log")
        engine = ServedVllm(URL)
        engine.update_weights(*(iter([tensors]) for tensors in parts_of(new)))
        assert measured(engine, prompts) == expected(new, prompts)
        assert engine.weight_version() == "1"
        with pytest.raises(UserError, match=naming("model.embed_tokens.weight")):
            engine.update_weights(iter(()))
        engine.close()


def test_a_server_takes_new_weights_or_answers_no_more(trained, tmp_path, monkeypatch):
    new, prompts = trained("qwen3", 1, "vllm")
    # A prompt of one token that comes while others are answered is counted as one draft more, which nothing accepts.
    prompts = [prompt for prompt in prompts if len(prompt) > 1]
    old = make_tiny_hf(tmp_path / "old", "qwen3", depth=1)
    make_tiny_tokenizer().save_pretrained(old)
    monkeypatch.setenv("VLLM_API_KEY", KEY)
    trunk, heads = parts_of(new)
    half = len(trunk) // 2
    buckets = [dict(list(trunk.items())[:half]), dict(list(trunk.items())[half:])]
    words = f"deploy --model {old} --torch_dtype float32 --port {PORT} --max_model_len 128 --live_weights".split()
    words += ["--vllm_engine_kwargs", '{"enable_scale_out": true}']  # for the route that says the version

    with running([sys.executable, "-m", "swiftlite", *words], tmp_path / "log") as server:
        wait_for_health(server, URL, tmp_path / "log")
        with pytest.raises(UserError, match=naming("VLLM_API_KEY")):
            ServedVllm(URL, "another")
        with pytest.raises(urllib.error.HTTPError, match="401"):
            get(f"{URL}/pause", {})  # which vLLM itself asks no key for

        engine = ServedVllm(URL)
        assert engine.num_speculative_tokens == 1
        assert measured(engine, prompts) == expected(old, prompts)
        assert engine.weight_version() == "default"
        engine.update_weights(iter(buckets))
        assert measured(engine, prompts) == expected(joined(tmp_path / "mixed", new, old), prompts)
        engine.update_weights(iter(buckets), iter([heads]))
        assert measured(engine, prompts) == expected(new, prompts)
        assert engine.weight_version() == "2"
        request = {"token_ids": prompts[0], "sampling_params": {"max_tokens": 4}}
        (choice,) = engine._server.call("POST", "/inference/v1/generate", request)["choices"]
        assert [span["version"] for span in choice["weight_versions"]] == ["2"]

        with pytest.raises(UserError, match=naming(f"model.embed_tokens.weight {URL}")):
            engine.update_weights(iter(()))
        with pytest.raises(UserError):  # half of its weights are new
            engine.generate(prompts, Sampling(1))
        with pytest.raises(UserError, match=naming(URL)):  # it is paused
            ServedVllm(URL)

        # End the transfer that the server still waits for, as nobody should, so that it takes one more.
        with pytest.raises(UserError, match=naming("/update_weights")):
            engine._server.call("POST", "/update_weights", {"update_info": {"path": "nowhere"}})
        engine._server.call("POST", "/resume")

        def killing() -> Iterator[dict[str, torch.Tensor]]:
            yield buckets[0]
            server.kill()
            server.wait()
            yield buckets[1]

        with pytest.raises(UserError, match=naming(URL)):
            ServedVllm(URL).update_weights(killing())
