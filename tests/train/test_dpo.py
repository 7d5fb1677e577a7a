"""Test `megatron dpo` in one process: results against formulas with transformers' logits, caches, resuming."""

import json
import math
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from swiftlite.args.commands import DpoArgs, ExportArgs
from swiftlite.base.errors import UserError
from swiftlite.data.packing.sampler import Sampler
from swiftlite.data.sample import Sample, make_sample
from swiftlite.export.run import convert
from swiftlite.report.run_page import write_run_page
from swiftlite.train import phases
from swiftlite.train import run as training
from swiftlite.train.batches.micro_batches import Batches
from swiftlite.train.methods import reference
from swiftlite.train.methods.reference import log_probabilities
from tests.messages import has_line, naming
from tests.tiny import make_tiny_hf
from tests.train.pairs import LOSSES, check_gradients, first_step, log_p, open_hf, train, write_pairs
from tests.train.prepared import prepare
from tests.train.test_sft import metrics


@pytest.fixture
def options(hf_dir, tmp_path):
    """Return the options of a run of 4 steps, some of them replaced."""
    usual = DpoArgs(
        model=str(hf_dir),
        dataset=[str(write_pairs(tmp_path / "pairs.jsonl"))],
        split_dataset_ratio=0.2,
        output_dir=str(tmp_path / "run"),
        torch_dtype="float32",
        micro_batch_size=2,
        global_batch_size=4,
        train_iters=4,
        lr=1e-3,
        acceptance_samples=0,
        report_to=[],
        clip_grad=0.0,
    )
    return lambda **changed: replace(usual, **changed)


@pytest.fixture
def ref_dir(tmp_path) -> Path:
    return make_tiny_hf(tmp_path / "ref", "qwen3", depth=0, seed=1, with_tokenizer=True)


def formula(args: DpoArgs, chosen, rejected, ref_chosen, ref_rejected, lengths) -> torch.Tensor:
    """Compute the losses of one pair by the formulas of the papers and TRL, without the next-token loss of simpo and
    orpo.
    """
    beta, smoothing = args.beta, args.label_smoothing
    better, worse = chosen - ref_chosen, rejected - ref_rejected

    def log_sigmoid(value: torch.Tensor) -> torch.Tensor:
        return -(1 + (-value).exp()).log()

    mean_chosen, mean_rejected = chosen / lengths[0], rejected / lengths[1]
    match args.loss_type:
        case "sigmoid":
            return -log_sigmoid(beta * (better - worse))
        case "hinge":
            return (1 - beta * (better - worse)).clamp(min=0)
        case "ipo":
            return (better / lengths[0] - worse / lengths[1] - 1 / (2 * beta)) ** 2
        case "robust":
            logits = beta * (better - worse)
            return (-(1 - smoothing) * log_sigmoid(logits) + smoothing * log_sigmoid(-logits)) / (1 - 2 * smoothing)
        case "apo_zero":
            return 1 - (beta * better).sigmoid() + (beta * worse).sigmoid()
        case "apo_down":
            return (beta * better).sigmoid() + 1 - (beta * (better - worse)).sigmoid()
        case "simpo":
            logits = beta * (mean_chosen - mean_rejected) - args.simpo_gamma
            return -(1 - smoothing) * log_sigmoid(logits) - smoothing * log_sigmoid(-logits)
        case "orpo":
            odds = (mean_chosen.exp() / (1 - mean_chosen.exp())) / (mean_rejected.exp() / (1 - mean_rejected.exp()))
            return -beta * log_sigmoid(odds.log())
        case "kto":  # of single answers: test_kto.py
            raise AssertionError


@pytest.mark.parametrize("loss_type", LOSSES)
def test_loss_and_gradients_are_those_of_the_formula(options, mesh, hf_dir, ref_dir, loss_type):
    """There are no heads, so that the trunk's gradients come only from the pairs."""
    args = options(
        loss_type=loss_type,
        ref_model=str(ref_dir),
        split_dataset_ratio=0.0,
        global_batch_size=20,
        padding_free=loss_type == "ipo",
        mtp_num_layers=0,
        **LOSSES[loss_type],
    )
    ours, gradients, pairs = first_step(args, mesh)

    model, reference = open_hf(hf_dir), open_hf(ref_dir)
    losses, nll, tokens, rewards = [], torch.zeros(()), 0, []
    needs_reference = loss_type not in ("simpo", "orpo")
    for pair in pairs:
        (chosen, length), (rejected, other_length) = (log_p(model, answer) for answer in pair.sequences)
        with torch.no_grad():
            ref_chosen, ref_rejected = (log_p(reference, answer)[0] * needs_reference for answer in pair.sequences)
        losses.append(formula(args, chosen, rejected, ref_chosen, ref_rejected, (length, other_length)))
        lengths = (1, 1) if needs_reference else (length, other_length)
        rewards.append(args.beta * float((chosen - ref_chosen) / lengths[0]))
        nll, tokens = nll - chosen, tokens + length
    weight = {"simpo": args.cpo_alpha, "orpo": 1.0}.get(loss_type, 0.0)
    loss = torch.stack(losses).mean() + weight * nll / tokens
    loss.backward()
    # Sums of float32 over log-probabilities of about 100, in another order.
    assert ours["loss"] == pytest.approx(float(loss.detach()), rel=2e-5)
    assert ours["rewards/chosen"] == pytest.approx(sum(rewards) / len(rewards), rel=2e-5, abs=1e-5)
    check_gradients(gradients, model, 1e-4)


def reference_of(pair: Sample) -> list[float]:
    """Return the reference model's scores of both answers."""
    return [answer.extras["reference"] for answer in pair.sequences]


def test_heads_learn_from_the_preferred_answers_alone(options, mesh):
    """The loss of the heads equals that of `megatron sft` on the preferred answers."""
    run = prepare(options(global_batch_size=16, micro_batch_size=16), mesh)
    (batch,) = run.batches.train(run.rows, Sampler(16, 16, 0, shuffle=False), 0)
    preferred = replace(run.data, train=[replace(pair, others=()) for pair in run.data.train])
    (alone,) = run.batches.train(run.batches.rows(preferred.train), Sampler(16, 16, 0, shuffle=False), 0)
    length = alone.labels_KBS.size(2)
    assert batch.labels_KBS[1, ::2, :length].equal(alone.labels_KBS[1])
    assert (batch.labels_KBS[1, 1::2] == -100).all()
    assert (batch.labels_KBS[0, 1::2] != -100).any()


def test_at_the_first_step_the_model_is_its_own_reference(options, mesh):
    run = train(options(tuner_type="lora", lora_rank=4), mesh)
    first, *_, last = metrics(run)
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-6)  # the same weights, padded otherwise
    assert abs(first["rewards/margins"]) < 1e-5
    assert last["rewards/margins"] > 0.01
    page = write_run_page(run).read_text()
    assert "swiftlite megatron dpo" in page
    assert 'id="rewards-title"' in page


@pytest.mark.parametrize(
    ("changed", "merge_lora"),
    [({}, True), ({"tuner_type": "lora"}, False)],
)
def test_an_export_says_what_the_run_has_learned(options, mesh, hf_dir, tmp_path, changed, merge_lora):
    """Log-probabilities of the export equal those of the trained model, with transformers and, for
    adapters, with PEFT.
    """
    args = options(lr=1e-2, **changed)
    run = prepare(args, mesh)
    trainer = training.make_trainer(run, phases.restore(run))
    trainer.fit(0)
    trainer.close()
    ours = log_probabilities(run.train_state.chunks, mesh, run.batches, run.data.val)
    export = tmp_path / "export"
    convert(ExportArgs(model=args.output_dir, output_dir=str(export), to_hf=True, merge_lora=merge_lora), mesh)
    if merge_lora:
        model = open_hf(export)
        heads = [key for key in load_file(export / "model.safetensors") if key.startswith("mtp.")]
    else:
        model = pytest.importorskip("peft").PeftModel.from_pretrained(open_hf(hf_dir), export)
        heads = list(load_file(export / "mtp_heads.safetensors"))
    for pair, numbers in zip(run.data.val, ours, strict=True):
        with torch.no_grad():
            theirs = torch.stack([log_p(model, answer)[0] for answer in pair.sequences])
        assert (theirs - torch.tensor(reference_of(pair))).abs().max() > 0.1  # something was learned
        torch.testing.assert_close(numbers, theirs, rtol=2e-5, atol=0)  # float32 sums in another order
    assert heads


def test_a_resumed_run_takes_the_steps_of_an_unbroken_one(options, mesh, tmp_path):
    constant = {"lr_decay_style": "constant", "lr_warmup_fraction": 0.0}
    constant |= {"packing": True, "packing_length": 128, "max_length": 64}
    unbroken = train(options(output_dir=str(tmp_path / "unbroken"), **constant), mesh)
    stopped = options(output_dir=str(tmp_path / "stopped"), train_iters=2, **constant)
    train(stopped, mesh)
    resumed = train(replace(stopped, train_iters=4, resume=True), mesh)
    steps = [[line for line in metrics(run) if "loss" in line] for run in (unbroken, resumed)]
    assert steps[0] == steps[1]


def test_the_cache_is_read_and_refused_by_name(options, mesh, tmp_path, ref_dir):
    cache = tmp_path / "cache"
    args = options(ref_model=str(ref_dir), ref_logprobs_cache=str(cache))
    first = prepare(args, mesh)
    numbers = load_file(cache / "reference.safetensors")["log_probabilities"]
    written = (cache / "reference.safetensors").stat().st_mtime_ns
    again = prepare(args, mesh)
    assert (cache / "reference.safetensors").stat().st_mtime_ns == written
    assert [reference_of(pair) for pair in first.data.train] == [reference_of(pair) for pair in again.data.train]
    assert numbers.size(1) == 2
    with pytest.raises(UserError, match=naming(f"--ref_logprobs_cache {cache} model")):
        prepare(replace(args, ref_model=None), mesh)
    save_file({"other": numbers}, cache / "reference.safetensors")
    with pytest.raises(UserError, match=naming(f"{cache / 'reference.safetensors'}")):
        prepare(args, mesh)
    (cache / "reference.safetensors").rename(cache / "notes.txt")
    with pytest.raises(UserError, match=naming(f"--ref_logprobs_cache {cache} reference.safetensors")):
        prepare(args, mesh)


def test_a_run_that_is_killed_keeps_what_was_scored(options, mesh, tmp_path, ref_dir, monkeypatch, caplog):
    whole = prepare(options(ref_model=str(ref_dir), ref_logprobs_cache=str(tmp_path / "whole")), mesh)
    cache = tmp_path / "cache"
    args = options(ref_model=str(ref_dir), ref_logprobs_cache=str(cache))
    monkeypatch.setattr(reference, "SLICE_PAIRS", 3)
    slices = []

    def scored(*given):
        slices.append(given)
        if len(slices) == 4:
            raise KeyboardInterrupt
        return log_probabilities(*given)

    monkeypatch.setattr(reference, "log_probabilities", scored)
    with pytest.raises(KeyboardInterrupt):
        prepare(args, mesh)
    assert len(list(cache.iterdir())) == 3
    with caplog.at_level("INFO"):
        again = prepare(args, mesh)
    assert has_line(caplog.text, "11")  # of 20 pairs
    assert [path.name for path in cache.iterdir()] == ["reference.safetensors"]
    assert [reference_of(pair) for pair in again.data.train] == [reference_of(pair) for pair in whole.data.train]


def test_a_slice_is_small_in_pairs_and_tokens(monkeypatch):
    pairs = [make_sample([1] * length, [1.0] * length) for length in (5, 5, 1, 1, 1, 1, 20, 3)]
    numbers = {str(number): number for number in range(len(pairs))}
    monkeypatch.setattr(reference, "SLICE_PAIRS", 3)
    monkeypatch.setattr(reference, "SLICE_TOKENS", 10)
    found = list(reference.slices(pairs.__getitem__, numbers))
    assert [keys for keys, _ in found] == [["0", "1"], ["2", "3", "4"], ["5", "6"], ["7"]]
    assert [list(map(len, own)) for _, own in found] == [[5, 5], [1, 1, 1], [1, 20], [3]]


def test_the_cache_holds_millions_of_pairs(options, mesh, tmp_path):
    """Digests are stored in a tensor, because a safetensors header is limited to 100 MB, which suffices for 1.4 million
    pairs.
    """
    args = options()
    asked = replace(reference.open_reference(prepare(args, mesh)), directory=tmp_path / "cache")
    answers = {f"{n:064x}": (float(n), -float(n)) for n in range(100_000)}
    asked._check_directory()
    asked._write_all(answers, {"model": "one"})
    assert asked._read({"model": "one"}) == answers
    with (tmp_path / "cache/reference.safetensors").open("rb") as file:
        assert int.from_bytes(file.read(8), "little") < 1000


def test_few_micro_batches_are_in_memory(options, mesh, monkeypatch):
    """Held-out rows, and pairs for the reference model, are collated when they are needed."""
    args = options(micro_batch_size=1, global_batch_size=1, split_dataset_ratio=0.5)
    run = prepare(args, mesh)
    alive: weakref.WeakSet = weakref.WeakSet()
    most = []
    collate = Batches.collate

    def counted(self, samples):
        batch = collate(self, samples)
        alive.add(batch.tokens_KBS)
        most.append(len(alive))
        return batch

    monkeypatch.setattr(Batches, "collate", counted)
    trainer = training.make_trainer(run, phases.restore(run))
    most.clear()
    trainer.evaluate(0)
    assert max(most) <= 3 < len(run.data.val)
    most.clear()
    log_probabilities(run.train_state.chunks, mesh, run.batches, run.data.train)
    assert max(most) <= 3 < len(run.data.train)


def test_pairs_that_are_ties_as_tokens_or_too_long_are_named(options, mesh, tmp_path):
    long = tmp_path / "long.jsonl"
    long.write_text(json.dumps({"query": "a", "response": "b " * 40, "rejected_response": "c"}) + "\n")
    with pytest.raises(UserError, match=naming("long.jsonl:1 --max_length 48")):
        prepare(options(dataset=[str(long)], max_length=48, truncation_strategy="error"), mesh)
