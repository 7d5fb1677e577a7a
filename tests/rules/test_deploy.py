"""Test the rules of `deploy`."""

import dataclasses

import pytest

from swiftlite import rules
from tests.messages import mention_each, mentions
from tests.rules.good import CHAIN, DEPLOY, TREE, problems_of


@pytest.mark.parametrize(
    "args",
    [
        DEPLOY,
        dataclasses.replace(DEPLOY, model="plain"),
        dataclasses.replace(DEPLOY, **TREE),
        dataclasses.replace(DEPLOY, num_speculative_tokens=2, sglang_engine_kwargs={"page_size": 1}),
    ],
)
def test_good_options_pass_without_a_note(here, args):
    assert rules.check(args) == []


@pytest.mark.parametrize(
    ("change", "problem", "hint"),
    [
        ({"model": "run"}, "--model run", "export --to_hf"),
        ({"port": 0}, "--port 0 1 65535", ""),
        ({"vllm_engine_kwargs": {}}, "--vllm_engine_kwargs --infer_backend sglang", "--infer_backend vllm"),
        ({"model": "plain", "speculative": "mtp"}, "--speculative mtp plain/config.json", ""),
        ({"model": "plain", "num_speculative_tokens": 1}, "--num_speculative_tokens plain/config.json", ""),
        ({"speculative": "none", "num_speculative_tokens": 1}, "--num_speculative_tokens --speculative none", ""),
        ({"speculative": "mtp,ngram"}, "--speculative mtp,ngram --infer_backend sglang", "--infer_backend vllm"),
        ({"speculative": "ngram"}, "--speculative ngram --infer_backend sglang", "--infer_backend llamacpp"),
        ({"model": "features"}, "--infer_backend sglang mtp_features", "--infer_backend vllm --speculative none"),
        ({"model": "plain", "speculative": "ngram"}, "--speculative ngram", "--speculative none"),
        ({"speculative": "none", "draft_schedule": "bench.json"}, "--draft_schedule --speculative none", ""),
        ({"model": "plain", "draft_schedule": "bench.json"}, "--draft_schedule plain/config.json", ""),
        (
            {"num_speculative_tokens": 1, "draft_schedule": "bench.json"},
            "--draft_schedule --num_speculative_tokens",
            "",
        ),
        (
            {"sglang_speculative_num_steps": 2},
            "--sglang_speculative_num_steps 2 --sglang_speculative_eagle_topk --sglang_speculative_num_draft_tokens",
            "",
        ),
        (CHAIN | {"num_speculative_tokens": 2}, "--num_speculative_tokens 2 --sglang_speculative_num_steps", ""),
        (
            CHAIN | {"sglang_speculative_num_draft_tokens": 4},
            "--sglang_speculative_num_draft_tokens 4 2 1 3",
            "--sglang_speculative_num_draft_tokens 3",
        ),
        (TREE | {"sglang_speculative_num_draft_tokens": 14}, "--sglang_speculative_num_draft_tokens 14 2 3 12", "13"),
        (
            {"sglang_engine_kwargs": {"speculative_num_steps": 2}},
            "--sglang_engine_kwargs 'speculative_num_steps'",
            "--sglang_speculative_num_steps 2",
        ),
        ({"live_weights": True}, "--live_weights SGLang", "--infer_backend vllm"),
        ({"log_requests": "log.jsonl"}, "--log_requests --infer_backend sglang", "--infer_backend vllm"),
        ({"log_requests_max_size_mb": 5.0}, "--log_requests_max_size_mb --log_requests", "--log_requests"),
        ({"weight_transport": "nccl"}, "--weight_transport nccl --live_weights", "--live_weights"),
    ],
)
def test_deploy(here, change, problem, hint):
    ((found, advice),) = problems_of(dataclasses.replace(DEPLOY, **change))
    assert mentions(found, problem)
    assert mentions(advice, hint)


@pytest.mark.parametrize(
    ("change", "problem", "hint"),
    [
        (
            {"vllm_engine_kwargs": {"async_scheduling": True}},
            "--vllm_engine_kwargs async_scheduling",
            "async_scheduling",
        ),
        ({"vllm_speculative_config": {"method": "ngram"}}, "--vllm_speculative_config ngram", "--speculative mtp"),
    ],
)
def test_drafts_from_the_text_in_vllm(here, monkeypatch, change, problem, hint):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    joined = dataclasses.replace(DEPLOY, infer_backend="vllm", speculative="mtp,ngram")
    ((found, advice),) = problems_of(dataclasses.replace(joined, **change))
    assert mentions(found, f"--speculative mtp,ngram {problem}")
    assert mentions(advice, hint)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"host": "0.0.0.0"}, "--live_weights --host 0.0.0.0"),
        ({"vllm_engine_kwargs": {"api_key": ["a", "b"]}}, "--live_weights"),
        ({"vllm_engine_kwargs": {"middleware": "mine.Guard"}}, "--live_weights 'middleware'"),
        ({"vllm_engine_kwargs": {"pipeline_parallel_size": 2}}, "--live_weights pipeline_parallel_size 2"),
        ({"vllm_engine_kwargs": {"enable_expert_parallel": True}}, "--live_weights enable_expert_parallel"),
        (
            {"weight_transport": "ipc", "vllm_engine_kwargs": {"tensor_parallel_size": 2}},
            "--weight_transport ipc tensor_parallel_size 2",
        ),
    ],
)
def test_the_routes_of_live_weights_are_guarded(here, monkeypatch, change, problem):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    live = dataclasses.replace(DEPLOY, infer_backend="vllm", live_weights=True)
    assert rules.check(live) == []
    ((found, _),) = problems_of(dataclasses.replace(live, **change))
    assert mentions(found, problem)
    key = {"api_key": "one"}
    assert rules.check(dataclasses.replace(live, host="0.0.0.0", vllm_engine_kwargs=key)) == []


def test_adapters(here, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    vllm = dataclasses.replace(DEPLOY, infer_backend="vllm")
    ((absent, hint),) = problems_of(dataclasses.replace(vllm, adapters="nowhere"))
    assert mentions(absent, "--adapters nowhere")
    assert "export --to_hf --merge_lora false" in hint
    ((other, _),) = problems_of(dataclasses.replace(vllm, adapters="plain"))
    assert mentions(other, "--adapters plain adapter_config.json")
    (here / "plain" / "adapter_config.json").write_text("{}")
    ((same, hint),) = problems_of(dataclasses.replace(vllm, adapters="plain", served_model_name="plain"))
    assert mentions(same, "--adapters plain")
    assert "--served_model_name" in hint
    ((problem, hint),) = problems_of(dataclasses.replace(DEPLOY, adapters="plain"))
    assert mentions(problem, "--adapters SGLang")
    assert "--infer_backend vllm" in hint


def test_deploy_with_vllm(here, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    vllm = dataclasses.replace(DEPLOY, infer_backend="vllm", vllm_engine_kwargs={"speculative_config": {"a": 1}})
    ((problem, hint),) = problems_of(vllm)
    assert mentions(problem, "--vllm_engine_kwargs 'speculative_config'")
    assert hint.endswith("""--vllm_speculative_config '{"a": 1}'""")
    problems = problems_of(dataclasses.replace(DEPLOY, infer_backend="vllm", **CHAIN))
    assert mention_each([hint for _, hint in problems], ["--infer_backend sglang"] * 3)
    twice = {"num_speculative_tokens": 1, "vllm_speculative_config": {"method": "mtp", "num_speculative_tokens": 2}}
    ((problem, _),) = problems_of(dataclasses.replace(DEPLOY, infer_backend="vllm", **twice))
    assert mentions(problem, "--num_speculative_tokens --vllm_speculative_config")


def test_deploy_needs_the_engine_but_to_print_a_command_for_sglang(here, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert rules.check(DEPLOY) == []
    ((problem, hint),) = problems_of(dataclasses.replace(DEPLOY, dry_run=False))
    assert mentions(problem, "--infer_backend sglang")
    assert mentions(hint, "--dry_run")
    ((problem, _),) = problems_of(dataclasses.replace(DEPLOY, infer_backend="vllm"))
    assert mentions(problem, "--infer_backend vllm")
