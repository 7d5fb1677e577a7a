"""Rules of `bench`."""

import dataclasses

import pytest

from tests.rules.good import BENCH, problems_of


@pytest.mark.parametrize(
    ("change", "problem", "hint"),
    [
        ({"val_dataset": []}, "--val_dataset is required", "give files with prompts"),
        ({"output_dir": ""}, "--output_dir is required", "name the directory"),
        ({"num_speculative_tokens": [1, 2]}, "--num_speculative_tokens 1,2: drafting is compared with not", "give 0"),
        ({"num_speculative_tokens": [0]}, "--num_speculative_tokens 0: drafting is compared with not", "tokens 0,1"),
        ({"num_speculative_tokens": [0, 1, 1]}, "--num_speculative_tokens 0,1,1 names a number twice", "--rounds"),
        ({"num_speculative_tokens": [0, 1, -1]}, "one cannot draft -1 tokens", ""),
        ({"concurrency": [1, 0]}, "--concurrency 1,0: at least one request", "1,8"),
        ({"concurrency": []}, "--concurrency : at least one request", "1,8"),
        ({"concurrency": [8, 8]}, "--concurrency 8,8 names a number twice", "--rounds"),
        ({"max_prompts": 8}, "--concurrency 32 with --max_prompts 8: so many are never under way", "128"),
        ({"rounds": 0}, "--rounds 0 must be at least 1", ""),
        ({"model": "plain"}, "plain/config.json promises no MTP layer", "train heads"),
        ({"vllm_speculative_config": {"num_speculative_tokens": 2}}, "of which bench tries several", "leave it out"),
        ({"sglang_engine_kwargs": {}}, "--sglang_engine_kwargs with --infer_backend vllm", "--infer_backend sglang"),
        (
            {"vllm_engine_kwargs": {"speculative_config": {}}},
            "--vllm_engine_kwargs has 'speculative_config'",
            "--vllm_speculative_config",
        ),
    ],
)
def test_bench(here, monkeypatch, change, problem, hint):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    ((found, advice),) = problems_of(dataclasses.replace(BENCH, **change))
    assert problem in found
    assert hint in advice


def test_bench_needs_the_engine(here, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for backend in ("vllm", "sglang"):
        ((problem, _),) = problems_of(dataclasses.replace(BENCH, infer_backend=backend))
        assert problem == f"--infer_backend {backend}, but it is not installed"
