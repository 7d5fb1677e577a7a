"""Test real vLLM in float32: its tokens and draft counts must equal those of an independent reference.

Tokens alone do not test heads, because they are correct whatever a head drafts.
"""

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from swiftlite.acceptance.counts import DraftCounts
from swiftlite.base.drafting import Drafting
from swiftlite.base.errors import UserError
from swiftlite.engines.draft_schedule import DraftSchedule
from swiftlite.engines.engine import Completion, EngineConfig, Sampling, start_engine
from swiftlite.engines.served_model import resolve_served
from swiftlite.engines.vllm import options
from swiftlite.families import FAMILIES
from tests import torchvision_here
from tests.e2e.draft_logits import LOGIT_TOLERANCE, compare_draft_logits
from tests.e2e.vllm_here import drafted_after_load, drafted_by_load, load_draft, serve
from tests.e2e.vllm_with_images import results_of
from tests.engines.chi_square import FALSE_ALARM, probability
from tests.engines.joint import PROMPT, TEMPERATURE, joint_distribution
from tests.engines.reference import UNDECIDED, Reference, convention, follow, with_vocab, write_trained
from tests.messages import mentions
from tests.tiers import some_of
from tests.tiny import DSA, HYBRID, WITHOUT_GATES, WRAPPED, make_tiny_hf

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]
HERE = Path(__file__).parent
ROOT = HERE.parents[1]
NEW_TOKENS = 16
REPEATED = [5 + number % 50 for number in range(3 * 128 + 10)]
"""A prompt of more than three blocks of vLLM's prefix cache."""


def expected_counts(counts):
    return counts.drafts, counts.drafted, counts.accepted_per_position


def others(drafting: Drafting) -> dict[str, Drafting]:
    """Return the `Drafting` values that differ from `drafting` in one field, for a single head."""
    of_one = {name: value for name, value in vars(drafting).items() if name != "chains_before_norm"}
    return {name: replace(drafting, **{name: not value}) for name, value in of_one.items()}


# vLLM's classes of Qwen3.5 and of models with a vision tower require torchvision (tests/torchvision_here.py).
HYBRID_IN_VLLM = ["qwen3_next"]
# Indexers, and experts without gates, run on GPUs only.
FLOAT32 = [name for name in FAMILIES if name not in (*DSA, *HYBRID, *WRAPPED, *WITHOUT_GATES)]
WITH_FIRST_HEAD = [name for name in FLOAT32 if convention("vllm", name).heads == "first"]


# Of vLLM's classes the one with the most kinds of layers of its own. Below: one of the families that share ours, and
# with two heads another one of vLLM's.
CLASSES = ("deepseek_v3",)


# The first of three drafts is that of requests with a single draft.
@pytest.mark.parametrize(
    ("family", "num_tokens"),
    some_of(product(FLOAT32, (1, 3)), *((family, 3) for family in CLASSES)),
)
def test_counts_and_draft_logits_are_those_of_the_table(family, num_tokens, vllm, trained):
    line = convention("vllm", family)
    directory, prompts = trained(family, 1, "vllm")
    reference = follow(Reference.load(directory, family, depth=1), line.drafting)
    served = vllm(directory, prompts, NEW_TOKENS, num_tokens, num_alone=2)
    assert served.draft == line.draft
    expected, counts = reference.simulate(prompts, NEW_TOKENS, num_tokens)
    assert served.token_ids == expected
    assert expected_counts(served.counts) == expected_counts(counts)
    assert 0.1 < counts.accepted_per_position[0] / counts.drafts < 0.9  # some right, some wrong
    assert counts.accepted_per_position[-1] > 0
    for prompt, row, found in zip(prompts, expected, served.logits, strict=False):
        compare_draft_logits(reference, prompt, row, found)


@pytest.mark.parametrize("family", some_of(["mistral", "phi3"]))
def test_heads_have_the_window_of_all_layers(family, vllm, tmp_path):
    prompts = write_trained(tmp_path / "model", family, depth=1, sliding_window=6)
    reference = Reference.load(tmp_path / "model", family, depth=1)
    served = vllm(tmp_path / "model", prompts, NEW_TOKENS, 3)
    expected, counts = reference.simulate(prompts, NEW_TOKENS, 3)
    assert (served.token_ids, expected_counts(served.counts)) == (expected, expected_counts(counts))
    reference.trunk.config.layer_types = ["full_attention"]  # the heads of this reference have no window
    assert reference.simulate(prompts, NEW_TOKENS, 3)[1] != counts


WITHOUT_EXPERTS: dict[str, Any] = {
    "layers_block_type": ["linear_attention", "mlp", "linear_attention", "full_attention", "mlp"],
    "mamba_head_dim": 32,
    "ssm_state_size": 32,
}


@pytest.mark.slow
def test_nemotron_h_without_experts(vllm_host, vllm, tmp_path):
    """vLLM on a CPU computes it without drafts. Heads with experts have the same class, frame and inputs as those of
    attention only; their first drafts do not depend on how many drafts were accepted before.
    """
    directory = tmp_path / "model"
    prompts = write_trained(directory, "nemotron_h", depth=1, **WITHOUT_EXPERTS)
    reference = Reference.load(directory, "nemotron_h", depth=1)
    assert vllm(directory, prompts, NEW_TOKENS, 0).token_ids == reference.simulate(prompts, NEW_TOKENS, 1)[0]
    drafting = vllm_host.call(partial(first_drafts, directory, prompts))
    assert drafting.draft == convention("vllm", "nemotron_h").draft
    for prompt, found in zip(prompts, drafting.logits, strict=True):
        logits = reference.draft_logits(prompt + reference.greedy(prompt, 1), 3)
        torch.testing.assert_close(found[0], logits, rtol=0, atol=LOGIT_TOLERANCE)


def first_drafts(directory: Path, prompts: list[list[int]]) -> Any:
    options.why_no_drafts = lambda model: ""  # in a process of its own
    return serve(directory, prompts, 2, 3, num_alone=len(prompts))


@pytest.mark.slow
def test_heads_of_exaone4_are_rotary_if_no_layer_has_a_window(vllm, tmp_path):
    without = {"sliding_window": None, "layer_types": ["full_attention"] * 2}
    prompts = write_trained(tmp_path / "model", "exaone4", depth=1, **without)
    reference = Reference.load(tmp_path / "model", "exaone4", depth=1)
    served = vllm(tmp_path / "model", prompts, NEW_TOKENS, 3)
    expected, counts = reference.simulate(prompts, NEW_TOKENS, 3)
    assert (served.token_ids, expected_counts(served.counts)) == (expected, expected_counts(counts))
    head: Any = reference.heads[0]
    head["block"].self_attn.sliding_window = 8  # of other layers: the head has no rotary embeddings
    assert reference.simulate(prompts, NEW_TOKENS, 3)[1] != counts


@pytest.mark.parametrize("family", some_of(FLOAT32, "deepseek_v3"))
def test_they_are_of_no_other_table(family, trained):
    """If any entry of the family's convention is changed, the reference drafts and counts something else."""
    drafting = convention("vllm", family).drafting
    directory, prompts = trained(family, 1, "vllm")
    reference = follow(Reference.load(directory, family, depth=1), drafting)
    first = prompts[0] + reference.greedy(prompts[0], 1)
    logits = reference.draft_logits(first, 3)
    some = prompts[:12]  # those of one token show the first embedding
    _, counts = reference.simulate(some, NEW_TOKENS, 3)

    def is_another(reference: Reference) -> bool:
        differs = float((reference.draft_logits(first, 3) - logits).abs().max()) > 1000 * LOGIT_TOLERANCE
        return differs and reference.simulate(some, NEW_TOKENS, 3)[1] != counts

    for field, wrong in others(drafting).items():
        assert is_another(follow(reference, wrong)), field
    follow(reference, drafting).takes_hidden_first = not reference.takes_hidden_first
    assert is_another(reference)


@pytest.mark.parametrize("family", some_of(WITH_FIRST_HEAD, "mimo"))
def test_of_several_heads_the_first_drafts(family, vllm, trained):
    directory, prompts = trained(family, 2, "vllm")
    reference = follow(Reference.load(directory, family, depth=2), convention("vllm", family).drafting)
    expected, counts = reference.simulate(prompts, NEW_TOKENS, 1)
    served = vllm(directory, prompts, NEW_TOKENS, 1)
    assert (served.token_ids, expected_counts(served.counts)) == (expected, expected_counts(counts))
    reference.heads = reference.heads[1:]
    assert reference.simulate(prompts, NEW_TOKENS, 1)[1] != counts


@pytest.mark.parametrize("family", some_of(["qwen3", "llama"], "qwen3"))
def test_drafts_are_of_the_draft_vocabulary(family, vllm, trained, tmp_path):
    """The output layer is tied or untied. The answers are those of the whole vocabulary."""
    directory, prompts = trained(family, 1, "vllm")
    reference = follow(Reference.load(directory, family, depth=1), convention("vllm", family).drafting)
    _, counts_of_all = reference.simulate(prompts, NEW_TOKENS, 3)
    reference.draft_vocab = [token for token in range(reference.trunk.config.vocab_size) if token % 4]
    with_vocab(directory, tmp_path / "model", reference.draft_vocab)
    clear = [prompt for prompt in prompts if reference.closest_choice(prompt, NEW_TOKENS, 3) > UNDECIDED]
    served = vllm(tmp_path / "model", clear, NEW_TOKENS, 3)
    expected, counts = reference.simulate(clear, NEW_TOKENS, 3)
    assert (served.token_ids, expected_counts(served.counts)) == (expected, expected_counts(counts))
    assert 0.1 < counts.acceptance_rate < counts_of_all.acceptance_rate


@pytest.mark.parametrize("family", some_of([*HYBRID_IN_VLLM, "qwen3_5", "qwen3_5_moe"]))
def test_linear_attention_in_bfloat16(family, vllm, trained):
    """vLLM's kernel for a CPU supports only bfloat16, which changes these logits by 0.1.

    Prompts are used for which each most likely token leads by 0.5, so that tokens and counts equal the float32
    reference.
    """
    directory, prompts = trained(family, 1, "vllm")
    reference = follow(Reference.load(directory, family, depth=1), convention("vllm", family).drafting)
    learned = [prompt + reference.greedy(prompt, 22 - len(prompt)) for prompt in prompts[:8]]
    beginnings = [row[:length] for row in learned for length in range(2, 22, 4)]
    clear = [prompt for prompt in beginnings if reference.closest_choice(prompt, NEW_TOKENS, 3) > 0.5]
    assert len(clear) >= 3
    call = partial(serve, directory, clear, NEW_TOKENS, 3, dtype="bfloat16", repeated=REPEATED)
    if family in HYBRID_IN_VLLM:
        served = vllm(*call.args, **call.keywords)
    elif torchvision_here.missing():
        pytest.skip(torchvision_here.missing())
    else:
        (served,) = results_of([call])
    assert served.draft == convention("vllm", family).draft
    expected, counts = reference.simulate(clear, NEW_TOKENS, 3)
    assert served.token_ids == expected
    assert expected_counts(served.counts) == expected_counts(counts)
    assert counts.acceptance_rate > 0.8
    # vLLM does not cache the state of a prefix. swiftlite disables the cache, because vLLM 0.32 cannot draft for linear
    # attention with this cache.
    assert served.prefix_hits == 0


def test_a_schedule_drafts_by_the_load(vllm_host, trained):
    """A single request gets three drafts per step, and three concurrent requests get none. The answers are always the
    trunk's.

    Drafts leave the prefix cache enabled. A benchmark whose prompts share no prefix would not detect a disabled cache
    (vllm-project/vllm#57616). vLLM caches whole blocks of 128 tokens. With drafts, it computes the last block again for
    the head's state.
    """
    directory, prompts = trained("qwen3", 1, "vllm")
    reference = Reference.load(directory, "qwen3", depth=1)
    prompts = prompts[:3]
    schedule = DraftSchedule({1: 3, 3: 0})
    loads = [prompts[:1], prompts]
    (alone, together), hits = vllm_host.call(partial(drafted_by_load, directory, schedule, loads, REPEATED))
    expected, counts = reference.simulate(prompts[:1], 12, 3)
    assert alone.token_ids == expected
    assert expected_counts(alone.counts) == expected_counts(counts)
    assert alone.draft_depths == reference.draft_depths(prompts[:1], 12, 3)
    assert together.token_ids == reference.simulate(prompts, 12, 3)[0]
    assert together.counts.drafted == 0
    assert together.draft_depths == [[0] * 12] * 3
    assert hits == 2 * 128


def test_steps_of_the_head_without_drafts_are_postponed(vllm_host, trained):
    """Three requests get no drafts, but the last one does after the others have ended. Then the head attends to the
    keys of all its tokens, as in vLLM without the plugin. The loss of these keys would be noticed.

    21 tokens without drafts are more than one call of 16 steps.
    """
    directory, prompts = trained("qwen3", 1, "vllm")
    schedule = DraftSchedule({1: 1, 2: 0})
    lengths = [60, 22, 22]
    found = {}
    for case in ("swiftlite", "vllm", "lost"):
        call = partial(drafted_after_load, directory, schedule, prompts[:3], lengths, case)
        answers, states, sizes = vllm_host.call(call)
        found[case] = answers, states
        assert (16 in sizes) == (case == "swiftlite")
        assert (1 in sizes) == (case == "vllm")
    answers, states = found["vllm"]
    assert [answers, answers] == [found["swiftlite"][0], found["lost"][0]]
    # Attention adds the same float32 terms in another order.
    torch.testing.assert_close(found["swiftlite"][1], states, rtol=1e-5, atol=1e-5)
    assert (found["lost"][1] - states).abs().max() > 0.01


def generated(
    directory: Path, requests: list[tuple[list[list[int]], Sampling]]
) -> tuple[list[list[Completion]], DraftCounts, str]:
    """Return the completions of each request, the draft counts of the first one, and the error for a long prompt.

    vLLM's engine has its own process, as for users.
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    engine: Any = start_engine(
        "vllm", EngineConfig(resolve_served(directory), "float32", num_speculative_tokens=1, max_model_len=256)
    )
    try:
        found = [engine.generate(*requests[0])]
        counts = engine.draft_counts()
        found += [engine.generate(*request) for request in requests[1:]]
        with pytest.raises(UserError) as raised:
            engine.generate([[1] * 256], Sampling(1))
    finally:
        engine.close()
    return found, counts, str(raised.value)


def test_an_answer_ends_where_it_should(trained, vllm_host):
    directory, prompts = trained("qwen3", 1, "vllm")
    # One token that joins others on their way is padded to a draft (v1/core/sched/scheduler.py), which is counted.
    prompts = [prompt for prompt in prompts if len(prompt) > 1]
    reference = Reference.load(directory, "qwen3", depth=1)
    expected, counts = reference.simulate(prompts, NEW_TOKENS, 1)
    stop = expected[0][5]
    requests = [
        (prompts, Sampling(NEW_TOKENS)),
        (prompts[:1], Sampling(NEW_TOKENS, stop_token_ids=(stop,))),
        (prompts, Sampling(NEW_TOKENS, temperature=0.5)),  # also where drafts are verified
    ]
    (greedy, (stopped,), drawn), found, error = vllm_host.call(partial(generated, directory, requests))
    assert [completion.token_ids for completion in greedy] == expected
    assert {completion.finish_reason for completion in greedy} == {"length"}
    assert expected_counts(found) == expected_counts(counts)
    depths = reference.draft_depths(prompts, NEW_TOKENS, 1)
    assert [completion.draft_depths for completion in greedy] == depths
    assert 1 in [each[-1] for each in depths]  # the trunk's token of the last step is truncated
    assert stopped.token_ids == expected[0][: expected[0].index(stop) + 1]
    assert stopped.finish_reason == "stop"
    assert stopped.draft_depths == depths[0][: len(stopped.token_ids)]
    assert {completion.finish_reason for completion in drawn} == {"length"}
    assert mentions(error, "256 --max_model_len")


@pytest.mark.slow
def test_every_head_drafts_its_own_step(trained, tmp_path):
    """Run vLLM's model runner for GPUs with interpreted kernels. The trunk is traced as for a compiler.

    vLLM traces a model once, whatever its arguments. If several heads were compiled, the first head would draft every
    step.
    """
    directory, prompts = trained("qwen2", 2, "vllm")
    prompts = [prompts[3], prompts[8]]  # few, because kernels are interpreted: one that is learned, one that is not
    reference = Reference.load(directory, "qwen2", depth=2)
    expected, counts = reference.simulate(prompts, 8, 2)
    assert 0 < counts.accepted_per_position[1] < counts.drafts
    reference.depth = 1  # the first head, going on alone
    assert reference.simulate(prompts, 8, 2)[1].accepted_per_position[1] < counts.accepted_per_position[1]
    code = f"""
from swiftlite.engines.engine import *
from swiftlite.engines.served_model import resolve_served
if __name__ == "__main__":
    engine = start_engine("vllm", EngineConfig(
        resolve_served({str(directory)!r}), "float32", num_speculative_tokens=None, max_model_len=64, max_batch_size=2,
        engine_kwargs={{"max_num_batched_tokens": 64, "enforce_eager": False}},
    ))
    completions = engine.generate({prompts!r}, Sampling(8))
    counts = engine.draft_counts()
    print([c.token_ids for c in completions], (counts.drafts, counts.drafted, counts.accepted_per_position), sep="\\n")
    engine.close()
"""
    script = tmp_path / "serve.py"
    script.write_text(code)
    traced = {"VLLM_CPU_CI_ENV": "1", "VLLM_CACHE_ROOT": str(tmp_path / "cache")}  # inductor would ask for real Triton
    path = os.pathsep.join(map(str, (HERE / "triton_interpreter", ROOT / "tests/vllm_forks", ROOT)))
    done = run_python(script, PYTHONPATH=path, **traced)
    assert done.stdout.splitlines()[-2:] == [str(expected), str(expected_counts(counts))], done.stderr[-2000:]


@pytest.mark.slow
def test_drawn_drafts_leave_the_trunks_distribution_alone(tmp_path):
    """With the same model runner, vLLM samples drafts, and more are accepted than of the most likely tokens."""
    directory = make_tiny_hf(tmp_path / "model", "qwen3", depth=1, vocab_size=6)
    code = f"""
from swiftlite.engines.engine import *
from swiftlite.engines.served_model import resolve_served
if __name__ == "__main__":
    engine = start_engine("vllm", EngineConfig(
        resolve_served({str(directory)!r}), "float32", num_speculative_tokens=2, max_model_len=64, max_batch_size=8,
        draws_drafts=True, engine_kwargs={{"max_num_batched_tokens": 64}},
    ))
    completions = engine.generate([{PROMPT}] * 200, Sampling(3, temperature={TEMPERATURE}))
    print([c.token_ids for c in completions], engine.draft_counts().accepted_per_position[0], sep="\\n")
    engine.close()
"""
    script = tmp_path / "serve.py"
    script.write_text(code)
    done = run_python(script, PYTHONPATH=os.pathsep.join((str(HERE / "triton_interpreter"), str(ROOT))))
    assert done.returncode == 0, done.stderr[-2000:]
    found, accepted = map(json.loads, done.stdout.splitlines()[-2:])
    assert probability(found, joint_distribution(directory, top_p=1.0)) > FALSE_ALARM
    assert accepted > 100  # some 130; of the likeliest tokens it would be 75


def test_the_draft_class_is_loaded_from_whole_heads_or_not_at_all(vllm_host, tmp_path):
    directory = make_tiny_hf(tmp_path, "qwen2", depth=2)
    num_tensors = sum("mtp." in name for name in load_file(directory / "model.safetensors"))
    # vLLM joins q, k, v (weights, biases) and gate, up: 2 + 2 + 1 fewer per head. Embedding and lm_head come on top.
    assert vllm_host.call(load_draft, directory) == ("Qwen2MTPModel", num_tensors - 2 * 5 + 2)

    tensors = load_file(directory / "model.safetensors")
    del tensors["mtp.layers.1.self_attn.k_proj.bias"], tensors["mtp.heads.1.norm.weight"]
    tensors |= {"mtp.layers.0.self_attn.o_proj.bias": torch.zeros(64), "mtp.heads.2.norm.weight": torch.ones(64)}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RuntimeError) as raised:
        vllm_host.call(load_draft, directory)
    for line in (
        "missing: mtp.heads.1.norm.weight",
        "missing: mtp.layers.1.self_attn.k_proj.bias",
        "unexpected: mtp.heads.2.norm.weight",
        "unexpected: mtp.layers.0.self_attn.o_proj.bias",
    ):
        assert line in str(raised.value)


def test_vllm_has_no_draft_for_these_families_of_its_own(vllm_host, tmp_path):
    """If this test fails, vLLM no longer needs the plugin's hf_config_override."""
    with pytest.raises(RuntimeError, match="Unsupported speculative method: 'mtp'"):
        vllm_host.call(load_draft, make_tiny_hf(tmp_path, "qwen3", depth=1), "")


def environment(**variables: str) -> dict[str, str]:
    return {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR", **variables}


def run_python(*arguments: object, **variables: str) -> subprocess.CompletedProcess:
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=environment(**variables), timeout=600)
