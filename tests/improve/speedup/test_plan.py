"""Test that the commands of `speedup` are valid command lines of swiftlite."""

from dataclasses import replace
from pathlib import Path

import pytest

from swiftlite.args.commands import SpeedupArgs
from swiftlite.cli.parse import parse
from swiftlite.cli.table import find
from swiftlite.engines.index import ENGINES
from swiftlite.engines.info import EngineInfo
from swiftlite.families.resolved import resolve
from swiftlite.improve.speedup.plan import Commands, only_fits
from swiftlite.improve.steps import CommandStep
from tests.tiny import make_tiny_hf


def options_of(step: CommandStep):
    """Return the options of a step as its process parses them."""
    command, rest = find(list(step.words))
    args, _ = parse(command.args_class, rest, command.words, command.choices())
    return args


@pytest.fixture
def make_commands(tmp_path):
    def make(depth: int = 0, vocab_size: int = 64, **options) -> Commands:
        model = make_tiny_hf(tmp_path / f"model{depth}", "qwen3", depth=depth, vocab_size=vocab_size)
        args = SpeedupArgs(model=str(model), output_dir=str(tmp_path / "out"), **options)
        return Commands(args, resolve(str(model)), tmp_path / "out")

    return make


def test_every_command_parses(make_commands, tmp_path):
    variables = {"enable_thinking": False}
    options = {"torch_dtype": "float32", "trust_remote_code": True, "chat_template_kwargs": variables}
    commands = make_commands(system="Be brief.", **options)
    steps = [
        commands.answers(1, 128, 0, 0),
        commands.training([128, 500], "round-1"),
        commands.export("round-1"),
        commands.bench("round-1", [0.3, 0.1, 0.05], 2, 99.5),
    ]
    for step in steps:
        args = options_of(step)
        assert Path(args.output_dir).is_relative_to(tmp_path / "out")
        assert step.result.is_relative_to(args.output_dir)
        if step.name != "round-1/export":
            assert {name: getattr(args, name) for name in options} == options


def test_rounds_write_different_prompts(make_commands):
    """A prompt is sampled with the seed plus its number."""
    assert options_of(make_commands(seed=2**32 - 1).answers(2, 128, 0, 128)).seed == 127  # the largest is 2**32 - 1
    commands = make_commands(seed=7)
    first, second = options_of(commands.answers(1, 128, 0, 0)), options_of(commands.answers(2, 300, 0, 128))
    assert (first.seed, first.self_prompts) == (7, 128)
    assert (second.seed, second.self_prompts) == (7 + 128, 300)
    assert first.dataset == []


def test_few_answers_are_only_fitted():
    """The time of such a round says little about the next one, which is trained (`budget.next_round`)."""
    assert only_fits([192], "")
    assert not only_fits([192, 64], "")
    assert not only_fits([64], "model")


@pytest.mark.parametrize(("num_rows", "self_prompts"), [(0, 200), (50, 150), (200, 0)])
def test_rows_of_the_round_and_prompts_of_the_model(make_commands, tmp_path, num_rows, self_prompts):
    args = options_of(make_commands().answers(3, 200, num_rows, 0))
    assert args.self_prompts == self_prompts
    assert (args.openings, args.openings_share) == (("builtin", 1.0) if self_prompts else (None, 1.0))
    assert args.dataset == ([str(tmp_path / "out/round-3/rows.jsonl")] if num_rows else [])


def test_training_fits_the_model(make_commands):
    commands = make_commands()
    small = options_of(commands.training([128, 500], ""))
    assert small.model == commands.args.model
    assert [Path(name).parent.name for name in small.dataset] == ["round-1", "round-2"]
    assert (small.mtp_mode, small.mtp_unroll, small.draft_vocab) == ("heads_only", 3, None)
    assert small.lr is None  # that of new heads
    assert small.num_train_epochs == 3
    fitted, trained = commands.training([128], ""), make_commands(depth=1).training([128], "model")
    assert (options_of(fitted).train_iters, options_of(fitted).cache_trunk_states) == (0, None)
    assert options_of(trained).train_iters is None
    assert options_of(trained).cache_trunk_states
    large = make_commands(vocab_size=10_000)
    assert options_of(large.training([128], "")).draft_vocab == 8192
    later = options_of(large.training([128, 500], "round-1"))
    assert Path(later.model) == large.directory / "round-1" / "hf"
    assert (later.draft_vocab, later.lr) == (None, 1e-3)  # None: that of the checkpoint
    several_heads = options_of(make_commands(depth=2).training([128], "model"))
    assert (several_heads.mtp_unroll, several_heads.lr) == (1, 3e-4)


def test_other_drafters_are_trained(make_commands):
    commands = make_commands(drafter="dspark", vocab_size=10_000)
    first = options_of(commands.training([128], ""))
    assert (first.drafter, first.mtp_unroll, first.drafter_layers, first.drafter_anchors) == ("dspark", 5, 2, 0.5)
    assert (first.train_iters, first.num_train_epochs, first.draft_vocab) == (None, 3, 8192)  # it cannot be fitted
    commands = make_commands(drafter="auto")
    assert options_of(commands.training([128], "")).drafter is None
    step = commands.training([128, 500], "", "dspark")
    assert (options_of(step).drafter, len(options_of(step).dataset)) == ("dspark", 2)
    assert step.result == commands.directory / "dspark" / "run" / "run_report.json"
    assert options_of(commands.export("dspark")).model == str(commands.directory / "dspark" / "run")


@pytest.mark.parametrize(("engine", "reason"), [("vllm", ""), ("sglang", "SGLang"), ("llamacpp", "")])
def test_engines_that_do_not_draft_with_a_candidate_are_named(make_commands, engine, reason):
    commands = make_commands(infer_backend=engine)
    model = commands.model
    found = ENGINES[engine].why_no_drafter(model.family, model.config, "dspark")
    assert bool(found) == bool(reason)
    assert reason in found


@pytest.mark.parametrize(
    ("accepted", "numbers"),
    [([0.5, 0.3, 0.1], "0 1 2 3"), ([0.28, 0.09, 0.04], "0 1 2"), ([0.05, 0.01, 0.0], "0 1")],
)
def test_drafts_that_are_rarely_accepted_are_not_measured(make_commands, accepted, numbers):
    step = make_commands().bench("round-1", accepted, 2, 99.5)
    assert f"--num_speculative_tokens {numbers} --concurrency" in str(step)


@pytest.mark.parametrize(("engine", "has_gpu", "numbers"), [("vllm", False, "0 1"), ("vllm", True, "0 1 2 3")])
def test_the_text_drafts_as_well_without_a_gpu(make_commands, monkeypatch, engine, has_gpu, numbers):
    """In a small budget, only one draft of the heads is then measured."""
    monkeypatch.setattr("swiftlite.improve.speedup.plan.sees_gpu", lambda: has_gpu)
    words = str(make_commands(infer_backend=engine).bench("round-1", [0.5, 0.3, 0.1], 1, 99.5))
    assert ("--speculative mtp,ngram" in words) is not has_gpu
    assert f"--num_speculative_tokens {numbers} --concurrency" in words


@pytest.mark.parametrize("is_file", [False, True])
def test_llamacpp_is_measured_where_it_can_serve_the_model(make_commands, monkeypatch, tmp_path, is_file):
    monkeypatch.setattr("swiftlite.improve.speedup.plan.sees_gpu", lambda: False)
    monkeypatch.setattr(EngineInfo, "is_installed", property(lambda info: True))
    commands = make_commands(concurrency=[1])
    if is_file:
        file = tmp_path / "model.gguf"
        file.touch()
        commands = replace(commands, args=replace(commands.args, model=str(file)))
    *exports, bench = commands.other_engine(14.4)
    assert len(exports) == (0 if is_file else 1)
    if exports:
        assert options_of(exports[0]).gguf_type == "q8_0"
        assert exports[0].result.name == "gguf-q8_0.gguf"
    args = options_of(bench)
    assert (args.infer_backend, args.speculative) == ("llamacpp", "ngram")
    assert args.max_seconds == 14
    assert args.model == str(file if is_file else exports[0].result)
    assert make_commands(infer_backend="llamacpp").other_engine(30) == []
    monkeypatch.setattr("swiftlite.improve.speedup.plan.sees_gpu", lambda: True)
    assert commands.other_engine(30) == []


@pytest.mark.parametrize(
    ("engine", "drafter", "draft_vocab"),
    [
        ("vllm", "mtp", 8192),
        ("llamacpp", "mtp", None),
        ("vllm", "dspark", 8192),
        ("sglang", "eagle3.1", 8192),
        ("sglang", "dspark", None),
    ],
)
def test_a_draft_vocabulary_is_only_for_engines_that_support_it(make_commands, engine, drafter, draft_vocab):
    commands = make_commands(vocab_size=9000, infer_backend=engine, drafter=drafter)
    assert options_of(commands.training([128], "")).draft_vocab == draft_vocab


@pytest.mark.parametrize(("engine", "draft_for"), [("vllm", None), ("llamacpp", "llamacpp")])
def test_heads_are_trained_for_the_engine(tmp_path, engine, draft_for):
    """The inputs of heads in llama.cpp differ from those in vLLM for GLM-4.5."""
    model = make_tiny_hf(tmp_path / "glm", "glm4_moe")
    args = SpeedupArgs(model=str(model), output_dir=str(tmp_path / "out"), infer_backend=engine)
    step = Commands(args, resolve(str(model)), tmp_path / "out").training([128], "")
    assert options_of(step).draft_for == draft_for
