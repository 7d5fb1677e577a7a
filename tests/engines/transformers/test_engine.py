"""Test the generation loop: output, stopping, and that drafts change only the speed."""

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from swiftlite.base.errors import UserError
from swiftlite.engines.engine import EngineConfig, Sampling, start_engine
from swiftlite.engines.served_model import resolve_served
from swiftlite.engines.stop_strings import stop_strings
from swiftlite.engines.transformers.engine import load_trunk
from tests.bridge.test_fp8 import expected, make_fp8
from tests.engines.reference import Reference
from tests.messages import mentions
from tests.tiers import some_of
from tests.tiny import make_tiny_hf, make_tiny_tokenizer, memory_name, per_expert


def start(directory, num_tokens: int | None = 0, torch_dtype: Any = "float32", **options):
    config = EngineConfig(resolve_served(directory), torch_dtype, num_speculative_tokens=num_tokens, **options)
    return start_engine("transformers", config)


def answers(engine, prompts, sampling):
    return [completion.token_ids for completion in engine.generate(prompts, sampling)]


def test_plain_greedy_is_what_transformers_generates(trained):
    directory, prompts = trained("qwen3", 1)
    model: Any = AutoModelForCausalLM.from_pretrained(directory).eval()
    options = {"max_new_tokens": 16, "do_sample": False}
    expected = [model.generate(torch.tensor([prompt]), **options)[0, len(prompt) :].tolist() for prompt in prompts]
    assert answers(start(directory), prompts, Sampling(16)) == expected


@pytest.mark.parametrize("family", ["exaone4_5", "gemma3", "gemma4", "gemma4_unified", "step3p7"])
def test_the_language_model_of_a_wrapper_drafts(family, tmp_path):
    directory = make_tiny_hf(tmp_path, family, depth=3 if family == "step3p7" else 1)
    plain = answers(start(directory), [[1, 2, 3, 4]], Sampling(6))
    engine = start(directory, 1)
    assert answers(engine, [[1, 2, 3, 4]], Sampling(6)) == plain
    assert engine.draft_counts().drafts > 0


@pytest.mark.parametrize("num_tokens", [0, 2])
def test_greedy_with_a_penalty_is_what_transformers_generates(trained, num_tokens):
    directory, prompts = trained("qwen3", 2)
    model: Any = AutoModelForCausalLM.from_pretrained(directory).eval()
    options = {"max_new_tokens": 16, "do_sample": False, "repetition_penalty": 1.3}
    expected = [model.generate(torch.tensor([prompt]), **options)[0, len(prompt) :].tolist() for prompt in prompts]
    engine = start(directory, num_tokens)
    assert answers(engine, prompts, Sampling(16, repetition_penalty=1.3)) == expected
    assert answers(engine, prompts, Sampling(16)) != expected
    assert engine.draft_counts().accepted > 0.1 * engine.draft_counts().drafted or not num_tokens


@pytest.mark.parametrize("num_tokens", [0, 2])
def test_a_text_ends_an_answer(trained, num_tokens):
    directory, prompts = trained("qwen3", 2)
    tokenizer = make_tiny_tokenizer()
    engine = start(directory, num_tokens)
    (whole,) = engine.generate(prompts[2:3], Sampling(12, log_p=True))
    text = str(tokenizer.decode(whole.token_ids[4:6]))[:-1]  # ends within a token, if it has several characters
    ends = [end for end in range(1, 13) if text in str(tokenizer.decode(whole.token_ids[:end]))]
    stops = stop_strings(("not in the answer", text), tokenizer)
    (cut,) = engine.generate(prompts[2:3], Sampling(12, log_p=True, stop_strings=stops))
    assert cut.token_ids == whole.token_ids[: ends[0]]
    assert (cut.finish_reason, len(cut.log_p or []), len(cut.draft_depths or [])) == ("stop", ends[0], ends[0])
    assert 1 < ends[0] < 12


@pytest.mark.parametrize("torch_dtype", ["float32", "bfloat16"])
def test_speculative_greedy_is_plain_greedy(trained, torch_dtype):
    directory, prompts = trained("qwen2", 2)
    plain = answers(start(directory, 0, torch_dtype), prompts, Sampling(16))
    engine = start(directory, 2, torch_dtype)
    # Learned prompts: their next token is certain, so that bfloat16's rounding of another batch shape turns none over.
    assert answers(engine, prompts[:4], Sampling(16)) == plain[:4]
    assert engine.draft_counts().accepted > 0.5 * engine.draft_counts().drafted


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_accepted_drafts_are_reported(trained, temperature):
    """The last step of an answer can be truncated, and its drafts count nevertheless."""
    directory, prompts = trained("qwen3", 2)
    engine = start(directory, 2)
    completions = engine.generate(prompts, Sampling(16, temperature=temperature))
    depths = [each.draft_depths or [] for each in completions]
    assert {len(of_answer) for of_answer in depths} == {16}
    if not temperature:
        assert depths == Reference.load(directory, "qwen3", 2).draft_depths(prompts, 16, 2)
    for depth, number in enumerate(engine.draft_counts().accepted_per_position, start=1):
        reported = sum(of_answer.count(depth) for of_answer in depths)
        assert number - len(prompts) <= reported <= number


def test_depth_of_the_checkpoint_is_the_default(trained):
    directory, _ = trained("qwen3", 2)
    assert start(directory, None).num_speculative_tokens == 2
    assert start(directory, 0).num_speculative_tokens == 0


@pytest.mark.parametrize("position", [0, 1, 4, 5])
def test_stops_at_a_stop_token_wherever_it_was_drafted(trained, position):
    directory, prompts = trained("qwen3", 2)
    (whole,) = answers(start(directory), prompts[2:3], Sampling(12))
    stop = whole[position]
    (completion,) = start(directory, 2).generate(prompts[2:3], Sampling(12, stop_token_ids=(stop,)))
    assert completion.token_ids == whole[: whole.index(stop) + 1]
    assert completion.finish_reason == "stop"


@pytest.mark.parametrize("max_new_tokens", [1, 2, 3, 4])
def test_never_more_tokens_than_wanted(trained, max_new_tokens):
    directory, prompts = trained("qwen3", 2)
    (completion,) = start(directory, 2).generate(prompts[2:3], Sampling(max_new_tokens))
    assert len(completion.token_ids) == max_new_tokens
    assert completion.finish_reason == "length"


def test_max_model_len_cuts_the_answer(trained):
    directory, _ = trained("qwen3", 1)
    (completion,) = start(directory, 1, max_model_len=10).generate([[1, 2, 3, 4]], Sampling(50))
    assert len(completion.token_ids) == 6
    assert completion.finish_reason == "length"


@pytest.mark.parametrize("length", [0, 10, 11])
def test_a_prompt_without_room_for_an_answer_is_refused(trained, length):
    directory, _ = trained("qwen3", 1)
    with pytest.raises(UserError) as error:
        start(directory, max_model_len=10).generate([[1], [1] * length], Sampling(5))
    assert mentions(str(error.value), str(length))
    assert "--max_model_len" in error.value.hint


def test_sampling_follows_seed_and_top_p(trained):
    directory, prompts = trained("qwen3", 1)
    prompts, engine = prompts[:4], start(directory, 1)
    greedy = answers(engine, prompts, Sampling(12))
    assert answers(engine, prompts, Sampling(12, temperature=1, top_p=1e-6)) == greedy
    hot = Sampling(12, temperature=3, seed=7)
    assert answers(engine, prompts, hot) == answers(engine, prompts, hot)
    assert answers(engine, prompts, hot) != answers(engine, prompts, Sampling(12, temperature=3, seed=8))


@pytest.mark.parametrize("family", some_of(["qwen3", "qwen3_next"], "qwen3"))
def test_a_drawn_answer_does_not_depend_on_its_neighbors(trained, family):
    directory, prompts = trained(family, 1)
    engine = start(directory, 2)
    hot = Sampling(12, temperature=1.5, seed=7)
    together = answers(engine, prompts, hot)
    alone = [answers(engine, [prompt], replace(hot, numbers=(place,)))[0] for place, prompt in enumerate(prompts)]
    assert alone == together
    assert answers(engine, [prompts[0]] * 2, hot)[0] == together[0]
    assert 0 < engine.draft_counts().accepted < engine.draft_counts().drafted


def test_a_missing_tensor_of_the_trunk_is_an_error_and_not_random(tmp_path):
    directory = make_tiny_hf(tmp_path, "qwen3")
    tensors = load_file(directory / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError) as error:
        start(directory)
    assert "model.layers.1.mlp.up_proj.weight" in str(error.value)


def test_a_tied_mimo_needs_no_code_of_its_own(tmp_path):
    directory = make_tiny_hf(tmp_path, "mimo", depth=1, tied=True)
    assert "auto_map" not in json.loads((directory / "config.json").read_text())
    assert len(answers(start(directory, 1), [[1, 2, 3]], Sampling(8))[0]) == 8


@pytest.mark.parametrize("family", ["qwen3", "mimo", "glm4_moe", "deepseek_v3", "qwen3_5_moe"])
def test_fp8_rows_that_are_no_multiple_of_a_block(tmp_path, family):
    """DeepSeek-V3's `kv_a_proj_with_mqa` has 576 rows in blocks of 128.

    In this test no block size divides any matrix.
    """
    directory = make_fp8(tmp_path, family, depth=1)
    model = resolve_served(directory)
    held = per_expert(load_trunk(EngineConfig(model, "bfloat16")).state_dict())
    numbers = expected(directory)
    keys = [key for key in numbers if not model.family.is_mtp(model.config, key)]
    keys = [key for key in keys if not model.family.is_carried(model.config, key)]
    assert {memory_name(family, key) for key in keys} == held.keys()
    for key in keys:
        assert torch.equal(held[memory_name(family, key)].float(), numbers[key].float()), key


def test_an_fp8_model_drafts_and_answers_as_its_export_in_bfloat16(tmp_path):
    directory = make_fp8(tmp_path / "fp8", "glm4_moe", depth=1)
    plain = tmp_path / "bfloat16"
    plain.mkdir()
    save_file(expected(directory), plain / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    del config["quantization_config"]
    (plain / "config.json").write_text(json.dumps(config))
    engines = [start(each, 1, "bfloat16") for each in (directory, plain)]
    prompts = [[1, 2, 3, 4], [9, 8]]
    found, other = (answers(engine, prompts, Sampling(8)) for engine in engines)
    assert found == other
    assert engines[0].draft_counts() == engines[1].draft_counts()
