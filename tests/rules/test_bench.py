"""Test the rules of `bench`."""

import dataclasses

import pytest

from tests.messages import mentions
from tests.rules.good import BENCH, problems_of


@pytest.mark.parametrize(
    ("change", "problem", "hint"),
    [
        ({"val_dataset": []}, "--val_dataset", ""),
        ({"output_dir": ""}, "--output_dir", ""),
        ({"media_root": "gone"}, "--media_root gone", ""),
        ({"num_speculative_tokens": [1, 2]}, "--num_speculative_tokens 1,2", "0"),
        ({"num_speculative_tokens": [0]}, "--num_speculative_tokens 0", "0,1"),
        ({"num_speculative_tokens": [0, 1, 1]}, "--num_speculative_tokens 0,1,1", "--rounds"),
        ({"num_speculative_tokens": [0, 1, -1]}, "--num_speculative_tokens -1", ""),
        ({"concurrency": [1, 0]}, "--concurrency 1,0", "1,8"),
        ({"concurrency": []}, "--concurrency", "1,8"),
        ({"concurrency": [8, 8]}, "--concurrency 8,8", "--rounds"),
        ({"max_prompts": 8}, "--concurrency 32 --max_prompts 8", "128"),
        ({"rounds": 0}, "--rounds 0 1", ""),
        ({"model": "plain"}, "plain/config.json", ""),
        ({"model": "plain", "speculative": "ngram"}, "--speculative ngram --infer_backend vllm", "llamacpp"),
        (
            {"vllm_speculative_config": {"num_speculative_tokens": 2}},
            "--vllm_speculative_config num_speculative_tokens",
            "",
        ),
        ({"sglang_engine_kwargs": {}}, "--sglang_engine_kwargs --infer_backend vllm", "--infer_backend sglang"),
        (
            {"vllm_engine_kwargs": {"speculative_config": {}}},
            "--vllm_engine_kwargs 'speculative_config'",
            "--vllm_speculative_config",
        ),
    ],
)
def test_bench(here, monkeypatch, change, problem, hint):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    ((found, advice),) = problems_of(dataclasses.replace(BENCH, **change))
    assert mentions(found, problem)
    assert mentions(advice, hint)


def test_bench_needs_the_engine(here, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for backend in ("vllm", "sglang"):
        ((problem, _),) = problems_of(dataclasses.replace(BENCH, infer_backend=backend, num_speculative_tokens=[0, 1]))
        assert mentions(problem, f"--infer_backend {backend}")
