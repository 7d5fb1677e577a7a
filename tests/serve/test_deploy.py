"""Test the command of the server. tests/e2e/test_engines.py starts vLLM's server."""

import importlib.util
import json
import logging
import shlex
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from swiftlite.args.commands import DeployArgs
from swiftlite.base import log
from swiftlite.base.errors import UserError
from swiftlite.base.lora import Lora
from swiftlite.bridge.adapters.files import AdapterBase, digest_of, write_adapter, write_heads
from swiftlite.engines.served_model import resolve_served
from swiftlite.engines.server.process import free_port
from swiftlite.serve import deploy
from tests.messages import naming
from tests.tiny import make_tiny_hf, make_tiny_vision_hf

needs_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")


def command(model, **options: Any) -> list[str]:
    given: dict[str, Any] = {"infer_backend": "sglang", "torch_dtype": "float32"} | options
    args = DeployArgs(model=str(model), **given)
    made = deploy.server_command(args, resolve_served(model))
    return [*(f"{name}={value}" for name, value in made.variables.items()), *made.words]


def test_sglang_is_told_all_three_numbers(tmp_path, monkeypatch):
    monkeypatch.setattr("swiftlite.engines.sglang.options.is_on_cpu", lambda: False)
    model = make_tiny_hf(tmp_path / "a model", "mimo", 1)
    fixed = f"--model-path '{model}' --served-model-name 'a model' --host 127.0.0.1 --port 8000 --dtype float32"
    start = [sys.executable, "-m", "sglang.launch_server", *shlex.split(fixed)]
    drafting = "--speculative-algorithm {} --speculative-num-steps {} --speculative-eagle-topk {}"
    tokens = "--speculative-num-draft-tokens {}"

    def expected(*values):
        return [*start, *f"{drafting} {tokens}".format(*values).split()]

    assert command(model) == expected("NEXTN", 1, 1, 2)
    assert command(model, num_speculative_tokens=3) == expected("NEXTN", 3, 1, 4)
    tree = {
        "sglang_speculative_algorithm": "EAGLE",
        "sglang_speculative_num_steps": 3,
        "sglang_speculative_eagle_topk": 2,
        "sglang_speculative_num_draft_tokens": 6,
    }
    assert command(model, **tree) == expected("EAGLE", 3, 2, 6)
    assert command(model, speculative="none") == start
    named = command(model, speculative="none", served_model_name="name")
    assert named == ["name" if word == "a model" else word for word in start]
    more = {"disable_cuda_graph": True, "dtype": None, "enable_metrics": False, "page_size": 1}
    assert command(model, speculative="none", sglang_engine_kwargs=more) == [
        *start[:-2],
        "--disable-cuda-graph",
        "--page-size",
        "1",
    ]
    monkeypatch.setattr("swiftlite.engines.sglang.options.is_on_cpu", lambda: True)
    cpu = "--device cpu --disable-cuda-graph --max-total-tokens 32768"
    assert command(model, speculative="none") == ["SGLANG_USE_CPU_ENGINE=1", *start, *cpu.split()]


def test_sglang_reads_a_schedule_from_a_file(tmp_path):
    model = make_tiny_hf(tmp_path / "model", "mimo", 1)
    chosen = [{"concurrency": c, "num_speculative_tokens": k} for c, k in ((1, 3), (8, 1), (32, 0))]
    bench_json = tmp_path / "bench.json"
    bench_json.write_text(json.dumps({"options": {"infer_backend": "sglang"}, "recommendations": chosen}))
    args = DeployArgs(model=str(model), infer_backend="sglang", draft_schedule=str(bench_json))
    made = deploy.server_command(args, resolve_served(model))
    words = shlex.join(made.words)
    config = tmp_path / "bench.sglang.json"
    assert "--speculative-num-steps 3 " in words
    assert f"--speculative-adaptive --speculative-adaptive-config {config}" in words
    assert not config.exists()
    made.write_files("--draft_schedule")
    steps = {number: slot["candidate_steps"] for number, slot in json.loads(config.read_text()).items()}
    assert steps == {"1": [3], "8": [1], "32": [0]}


def test_a_dry_run_writes_no_file(tmp_path, capsys):
    """The printed line writes the file of the schedule when it is run."""
    model = make_tiny_hf(tmp_path / "model", "mimo", 1)
    chosen = [{"concurrency": c, "num_speculative_tokens": k} for c, k in ((1, 3), (8, 1))]
    bench_json = tmp_path / "bench.json"
    bench_json.write_text(json.dumps({"options": {"infer_backend": "sglang"}, "recommendations": chosen}))
    before = sorted(tmp_path.iterdir())
    args = DeployArgs(model=str(model), infer_backend="sglang", draft_schedule=str(bench_json), dry_run=True)
    deploy.run(args)
    assert sorted(tmp_path.iterdir()) == before
    first = capsys.readouterr().out.partition(" && ")[0]
    subprocess.run(["bash", "-c", first], check=True)
    assert json.loads((tmp_path / "bench.sglang.json").read_text())["8"] == {"candidate_steps": [1]}


def write_adapters(directory, base, rank: int = 4, saved: tuple[str, ...] = (), heads: bool = False) -> str:
    """Write adapters of one layer."""
    module = "model.layers.0.self_attn.o_proj"
    shape = load_file(base / "model.safetensors")[f"{module}.weight"].shape
    tensors = {
        f"{module}.lora_A.weight": torch.ones(rank, shape[1]),
        f"{module}.lora_B.weight": torch.ones(shape[0], rank),
    }
    directory.mkdir()
    whole = load_file(base / "model.safetensors")
    of_base = AdapterBase(str(base), digest_of(base))
    write_adapter(directory, Lora(rank, 8.0), of_base, tensors, {name: whole[name] for name in saved})
    if heads:
        model = resolve_served(base)
        of_heads = {name: whole[name] for name in whole if model.family.is_mtp(model.config, name)}
        write_heads(directory, of_base, of_heads, model.heads, "qwen3")
    return str(directory)


def with_magnitudes(adapters: str) -> str:
    """Convert adapters to DoRA."""
    directory = Path(adapters)
    config = json.loads((directory / "adapter_config.json").read_text())
    (directory / "adapter_config.json").write_text(json.dumps(config | {"use_dora": True}))
    path = directory / "adapter_model.safetensors"
    tensors = load_file(path)
    (rows,) = [len(tensor) for key, tensor in tensors.items() if "lora_B" in key]
    tensors["base_model.model.model.layers.0.self_attn.o_proj.lora_magnitude_vector"] = torch.ones(rows)
    save_file(tensors, path)
    return adapters


@needs_vllm
def test_vllm_serves_adapters_beside_the_model(tmp_path):
    model = make_tiny_hf(tmp_path / "model", "qwen3", 1)
    adapters = write_adapters(tmp_path / "tuned", model, rank=9)
    words = shlex.join(command(model, infer_backend="vllm", adapters=adapters))
    assert f"--enable-lora --max-lora-rank 16 --lora-modules tuned={adapters}" in words


@needs_vllm
def test_adapters_that_vllm_would_serve_in_part(tmp_path):
    model = make_tiny_hf(tmp_path / "model", "qwen3", 1)
    other = make_tiny_hf(tmp_path / "other", "qwen3", 1, seed=5)
    refused = {
        write_adapters(tmp_path / "saved", model, saved=("model.norm.weight",)): "vLLM model.norm.weight",
        write_adapters(tmp_path / "heads", model, heads=True): "vLLM --model",
        write_adapters(tmp_path / "large", model, rank=513): "vLLM 512 513",
        with_magnitudes(write_adapters(tmp_path / "dora", model)): "vLLM DoRA",
        write_adapters(tmp_path / "of_other", other): f"{model} config.json",
    }
    for adapters, why in refused.items():
        with pytest.raises(UserError, match=naming(f"--adapters {adapters} {why}")):
            command(model, infer_backend="vllm", adapters=adapters)
    without = command(model, infer_backend="vllm", adapters=str(tmp_path / "heads"), speculative="none")
    assert "--enable-lora" in without
    assert "--speculative-config" not in without


def test_a_schedule_that_drafts_nothing(tmp_path):
    model = make_tiny_hf(tmp_path / "model", "mimo", 1)
    bench_json = tmp_path / "bench.json"
    chosen = [{"concurrency": 1, "num_speculative_tokens": 0}]
    bench_json.write_text(json.dumps({"options": {"infer_backend": "sglang"}, "recommendations": chosen}))
    assert command(model, draft_schedule=str(bench_json)) == command(model, speculative="none")


@pytest.mark.parametrize(
    ("family", "draft"),
    [("qwen2", "Qwen2ForCausalLMMTP"), ("mimo", "MiMoMTP"), ("glm4_moe", "Glm4MoeForCausalLMNextN")],
)
def test_sglang_would_not_draft_with_these_heads(tmp_path, family, draft):
    with pytest.raises(UserError, match=naming(f"{draft} 2")) as error:
        command(make_tiny_hf(tmp_path, family, 2))
    assert "--infer_backend vllm" in error.value.hint


def test_sglang_runs_the_first_head_of_a_qwen3_moe_at_every_step(tmp_path):
    model = make_tiny_hf(tmp_path, "qwen3_moe", 2)
    assert "--speculative-num-steps 1 " in shlex.join(command(model))
    with pytest.raises(UserError, match=naming("SGLang 2 1")):
        command(model, num_speculative_tokens=2)


def test_a_model_without_heads_is_served_without_drafts(tmp_path):
    assert not [word for word in command(make_tiny_hf(tmp_path, "qwen3")) if "speculative" in word]


def test_heads_that_are_not_whole_are_refused(tmp_path):
    model = make_tiny_hf(tmp_path, "mimo", 1)
    config = model / "config.json"
    config.write_text(config.read_text().replace('"num_nextn_predict_layers": 1', '"num_nextn_predict_layers": 2'))
    with pytest.raises(UserError, match=naming("config.json 2")):
        command(model)


def test_the_printed_command_is_one_line_for_a_shell(tmp_path, capsys):
    model = make_tiny_hf(tmp_path / "a model", "mimo", 1)
    deploy.run(DeployArgs(model=str(model), infer_backend="sglang", dry_run=True, torch_dtype="float32"))
    (line,) = capsys.readouterr().out.splitlines()
    assert shlex.split(line) == ["PYTHONSAFEPATH=1", *command(model)]


@needs_vllm
@pytest.mark.engine
def test_vllm_is_told_what_its_heads_can_draft(tmp_path):
    model = make_tiny_hf(tmp_path, "qwen3", 1)
    words = command(model, infer_backend="vllm", num_speculative_tokens=3, vllm_engine_kwargs={"max_num_seqs": 4})
    module = words.index("vllm.entrypoints.openai.api_server")
    flags = dict(zip(words[module + 1 :], words[module + 2 :], strict=False))
    assert json.loads(flags["--speculative-config"]) == {
        "method": "mtp",
        "num_speculative_tokens": 3,
        "draft_sample_method": "probabilistic",
    }
    assert flags["--max-num-seqs"] == "4"
    assert flags["--model"] == str(model)
    plain = command(model, infer_backend="vllm", speculative="none")
    assert not {"--speculative-config", "--override-generation-config", "--compilation-config"} & set(plain)


@needs_vllm
def test_vllm_does_not_download_images(tmp_path, monkeypatch):
    """vLLM downloads the images of requests from all domains, unless it is given some."""
    monkeypatch.setattr("swiftlite.engines.vllm.options.find_spec", lambda name: name)  # torchvision, for this command
    model = make_tiny_vision_hf(tmp_path / "model", "qwen3_vl")
    words = command(model, infer_backend="vllm")
    assert words[words.index("--allowed-media-domains") + 1].endswith(".invalid")
    given = command(model, infer_backend="vllm", vllm_engine_kwargs={"allowed_media_domains": ["a.org", "b.org"]})
    place = given.index("--allowed-media-domains")
    assert given[place + 1 : place + 3] == ["a.org", "b.org"]
    assert "--allowed-media-domains" not in command(make_tiny_hf(tmp_path / "text", "qwen3"), infer_backend="vllm")


@needs_vllm
@pytest.mark.engine
def test_vllm_is_kept_from_its_wrong_rotary_kernel(tmp_path):
    """The kernel is wrong on a CPU with latent attention: without this option, tests/e2e/test_engines.py fails for
    glm4_moe_lite.
    """
    words = command(make_tiny_hf(tmp_path, "glm4_moe_lite", 1), infer_backend="vllm")
    assert words[words.index("--compilation-config") + 1] == '{"custom_ops": ["-rotary_embedding"]}'


@needs_vllm
@pytest.mark.engine
def test_a_request_to_vllm_chooses_its_temperature(tmp_path):
    """No option of the server overrides a request's temperature, and drafts are sampled, also on a CPU."""
    words = command(make_tiny_hf(tmp_path, "qwen3", 1), infer_backend="vllm")
    assert "--override-generation-config" not in words
    assert "probabilistic" in " ".join(words)


def test_a_taken_port_is_named_before_anything_starts(tmp_path, monkeypatch):
    monkeypatch.setattr("os.execve", lambda *words: pytest.fail("started"))
    model = make_tiny_hf(tmp_path / "model", "mimo", 1)
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)  # as vLLM's server has it
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        args = DeployArgs(model=str(model), infer_backend="sglang", port=port)
        with pytest.raises(UserError, match=f"--port {port}.*Address already in use"):
            deploy.run(args)
    deploy.check_address("127.0.0.1", port)


@pytest.mark.parametrize("host", ["192.0.2.1", "no such host"])
def test_an_address_of_another_machine_is_named(host):
    with pytest.raises(UserError, match=naming(f"--host {host}")):
        deploy.check_address(host, 8000)


@needs_vllm
@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("SECRET 123", {"VLLM_API_KEY": "SECRET 123"}),
        (11223344, {"VLLM_API_KEY": "11223344"}),
        (["SECRET,11223344"], {"VLLM_API_KEY": "SECRET,11223344"}),
        (["SECRET}1", 11223344], {"SWIFTLITE_API_KEYS": '["SECRET}1", "11223344"]', "VLLM_API_KEY": ""}),
    ],
)
def test_a_key_is_not_logged_and_not_in_the_process_list(tmp_path, monkeypatch, capsys, key, expected):
    started = []
    environment = {}

    def become(program, words, variables):
        started.extend(words)
        environment.update(variables)

    monkeypatch.setattr("os.execve", become)
    model = make_tiny_hf(tmp_path / "model", "mimo", 1)
    kwargs = {"api_key": key, "max_num_seqs": 4}
    before = logging.getLogger("swiftlite").handlers[:]
    log.setup()
    try:
        deploy.run(DeployArgs(model=str(model), port=free_port(), vllm_engine_kwargs=kwargs))
    finally:
        logging.getLogger("swiftlite").handlers[:] = before
    told = capsys.readouterr().err
    assert "--max-num-seqs 4" in told
    for secret in ("SECRET", "11223344"):
        assert secret not in told
        assert secret not in str(started)
    assert expected.items() <= environment.items()


@needs_vllm
def test_one_of_several_keys_is_required(monkeypatch):
    from starlette.applications import Starlette
    from starlette.middleware import Middleware
    from starlette.testclient import TestClient

    from swiftlite.engines.vllm.api_keys import ApiKeys

    monkeypatch.setenv("SWIFTLITE_API_KEYS", '["one", "two,2"]')
    client = TestClient(Starlette(middleware=[Middleware(ApiKeys)]))
    assert client.get("/health").status_code == 404  # not refused, but this application has no routes
    for key, status in {"one": 404, "two,2": 404, "two": 401, "": 401}.items():
        assert client.get("/v1/models", headers={"Authorization": f"Bearer {key}"}).status_code == status


@pytest.mark.parametrize(
    ("engine", "flag"),
    [
        ("sglang", "--default-chat-template-kwargs"),
        ("llamacpp", "--chat-template-kwargs"),
        ("transformers", "--chat-template-kwargs"),
        pytest.param("vllm", "--default-chat-template-kwargs", marks=needs_vllm),
    ],
)
def test_variables_of_the_template_are_defaults_of_requests(tmp_path, engine, flag):
    model = make_tiny_hf(tmp_path / "model", "llama", 0, with_tokenizer=True)
    words = command(model, infer_backend=engine, chat_template_kwargs={"enable_thinking": False})
    assert words[words.index(flag) + 1] == '{"enable_thinking": false}'
    assert flag not in command(model, infer_backend=engine)


def test_llamacpp_has_the_name(tmp_path):
    model = make_tiny_hf(tmp_path / "hf", "llama", 0, with_tokenizer=True)
    for options, name in (({}, "hf"), ({"served_model_name": "name"}, "name")):
        words = command(model, infer_backend="llamacpp", **options)
        assert words[words.index("--alias") + 1] == name


def test_a_key_of_llamacpp_is_not_on_the_command_line(tmp_path):
    model = make_tiny_hf(tmp_path / "model", "llama", 0, with_tokenizer=True)
    words = command(model, infer_backend="llamacpp", llamacpp_engine_kwargs={"api_key": ["SECRET", 12345]})
    assert [word for word in words if "SECRET" in word or "12345" in word] == ["LLAMA_API_KEY=SECRET,12345"]
