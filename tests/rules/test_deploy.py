"""Rules of `deploy`."""

import dataclasses

import pytest

from swiftlite import rules
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
        ({"model": "run"}, "holds megatron-core checkpoints", "export --to_hf"),
        ({"port": 0}, "--port 0 must be at least 1 and at most 65535", ""),
        ({"vllm_engine_kwargs": {}}, "--vllm_engine_kwargs with --infer_backend sglang", "add --infer_backend vllm"),
        (
            {"model": "plain", "speculative": "mtp"},
            "--speculative mtp, but plain/config.json promises no",
            "train heads",
        ),
        (
            {"model": "plain", "num_speculative_tokens": 1},
            "--num_speculative_tokens, but plain/config.json",
            "leave it",
        ),
        ({"speculative": "none", "num_speculative_tokens": 1}, "--num_speculative_tokens with --speculative none", ""),
        ({"speculative": "none", "draft_schedule": "bench.json"}, "--draft_schedule with --speculative none", ""),
        ({"model": "plain", "draft_schedule": "bench.json"}, "--draft_schedule, but plain/config.json", "leave it"),
        (
            {"num_speculative_tokens": 1, "draft_schedule": "bench.json"},
            "--draft_schedule and --num_speculative_tokens both say",
            "leave one",
        ),
        (
            {"sglang_speculative_num_steps": 2},
            "2 without --sglang_speculative_eagle_topk and --sglang_spec",
            "all three",
        ),
        (CHAIN | {"num_speculative_tokens": 2}, "both say how many tokens to draft", "leave the first out"),
        (
            CHAIN | {"sglang_speculative_num_draft_tokens": 4},
            "4 with 2 steps of topk 1: SGLang would take 3",
            "tokens 3",
        ),
        (TREE | {"sglang_speculative_num_draft_tokens": 14}, "draft 12 tokens, one more is verified", "at most 13"),
        (
            {"sglang_engine_kwargs": {"speculative_num_steps": 2}},
            "--sglang_engine_kwargs has 'speculative_num_steps', which is checked nowhere",
            "--sglang_speculative_num_steps 2",
        ),
        ({"live_weights": True}, "--live_weights with SGLang, whose server is given none", "--infer_backend vllm"),
        ({"weight_transport": "nccl"}, "--weight_transport nccl, but no --live_weights", "add --live_weights"),
    ],
)
def test_deploy(here, change, problem, hint):
    ((found, advice),) = problems_of(dataclasses.replace(DEPLOY, **change))
    assert problem in found
    assert hint in advice


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"host": "0.0.0.0"}, "--live_weights with --host 0.0.0.0 and no key"),
        ({"vllm_engine_kwargs": {"api_key": ["a", "b"]}}, "--live_weights with several api_keys"),
        ({"vllm_engine_kwargs": {"middleware": "mine.Guard"}}, "with 'middleware', which it sets"),
        ({"vllm_engine_kwargs": {"pipeline_parallel_size": 2}}, "--live_weights with pipeline_parallel_size 2"),
        ({"vllm_engine_kwargs": {"enable_expert_parallel": True}}, "--live_weights with enable_expert_parallel True"),
        (
            {"weight_transport": "ipc", "vllm_engine_kwargs": {"tensor_parallel_size": 2}},
            "--weight_transport ipc with tensor_parallel_size 2",
        ),
    ],
)
def test_the_routes_of_live_weights_are_guarded(here, monkeypatch, change, problem):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    live = dataclasses.replace(DEPLOY, infer_backend="vllm", live_weights=True)
    assert rules.check(live) == []
    ((found, _),) = problems_of(dataclasses.replace(live, **change))
    assert problem in found
    key = {"api_key": "one"}
    assert rules.check(dataclasses.replace(live, host="0.0.0.0", vllm_engine_kwargs=key)) == []


def test_adapters(here, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    vllm = dataclasses.replace(DEPLOY, infer_backend="vllm")
    ((absent, hint),) = problems_of(dataclasses.replace(vllm, adapters="nowhere"))
    assert absent == "--adapters nowhere does not exist"
    assert "export --to_hf --merge_lora false" in hint
    ((other, _),) = problems_of(dataclasses.replace(vllm, adapters="plain"))
    assert other == "--adapters plain has no adapter_config.json"
    (here / "plain" / "adapter_config.json").write_text("{}")
    ((problem, hint),) = problems_of(dataclasses.replace(DEPLOY, adapters="plain"))
    assert problem.startswith("--adapters with SGLang, which was not found")
    assert "--infer_backend vllm" in hint


def test_deploy_with_vllm(here, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    vllm = dataclasses.replace(DEPLOY, infer_backend="vllm", vllm_engine_kwargs={"speculative_config": {"a": 1}})
    ((problem, hint),) = problems_of(vllm)
    assert "which is checked nowhere" in problem
    assert hint == """--vllm_speculative_config '{"a": 1}'"""
    problems = problems_of(dataclasses.replace(DEPLOY, infer_backend="vllm", **CHAIN))
    assert [hint for _, hint in problems] == ["add --infer_backend sglang"] * 3
    twice = {"num_speculative_tokens": 1, "vllm_speculative_config": {"method": "mtp", "num_speculative_tokens": 2}}
    ((problem, _),) = problems_of(dataclasses.replace(DEPLOY, infer_backend="vllm", **twice))
    assert problem.startswith("--num_speculative_tokens and --vllm_speculative_config both say")


def test_deploy_needs_the_engine_but_to_print_a_command_for_sglang(here, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert rules.check(DEPLOY) == []
    ((problem, hint),) = problems_of(dataclasses.replace(DEPLOY, dry_run=False))
    assert problem == "--infer_backend sglang, but it is not installed"
    assert hint.endswith("or add --dry_run")
    ((problem, _),) = problems_of(dataclasses.replace(DEPLOY, infer_backend="vllm"))
    assert problem == "--infer_backend vllm, but it is not installed"
