"""Test `megatron dpo` with several layouts of the model and the reference model against one process."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from swiftlite.args.commands import DpoArgs, SftArgs
from swiftlite.base.errors import UserError
from swiftlite.bridge.hf_config import read_config
from swiftlite.families.resolved import resolve
from swiftlite.plan.cost.frozen_memory import before_first_step, reference_parts
from swiftlite.plan.cost.memory import estimate
from swiftlite.plan.cost.setup import Setup
from swiftlite.plan.facts import read_facts
from swiftlite.plan.run import plan_of
from swiftlite.train import phases
from swiftlite.train.methods import reference
from swiftlite.train.methods.reference import log_probabilities
from tests.messages import mentions
from tests.parallel.launch import launch
from tests.parallel.parity import OPTIONS, SIZES
from tests.parallel.runs import CP2, EP2, PP2, TP2, check_layouts
from tests.tiers import some_of
from tests.tiny import make_tiny_hf
from tests.train.pairs import write_pairs, write_rated
from tests.train.prepared import prepare

pytestmark = pytest.mark.gloo

REF_TP2 = {"ref_tensor_model_parallel_size": 2, "ref_pipeline_model_parallel_size": 1}
REF_PP2 = {"ref_tensor_model_parallel_size": 1, "ref_pipeline_model_parallel_size": 2}
LORA = {"tuner_type": "lora", "lora_rank": 4, "lr": 1e-2}
# By what is trained (a family and options): the layouts that are to have the numbers of one process.
TRAINED: dict[str, tuple[str, dict[str, Any]]] = {
    "full": ("qwen3", {}),
    "lora": ("qwen3", LORA),
    "experts": ("qwen3_moe", LORA),
    "bfloat16": ("qwen3_moe", LORA | {"torch_dtype": "bfloat16"}),
    "kto": ("qwen3", {"loss_type": "kto"}),
    "thirds": ("qwen3", {"global_batch_size": 3, "micro_batch_size": 1}),
}
LAYOUTS: dict[tuple[str, str], dict[str, Any]] = {
    ("full", "TP2, reference PP2"): TP2 | REF_PP2,
    ("full", "PP2, reference TP2"): PP2 | REF_TP2,
    ("full", "CP2, packed"): CP2 | {"padding_free": True},
    ("lora", "TP2"): TP2,
    ("experts", "EP2, reference TP2"): EP2 | REF_TP2,
    ("bfloat16", "EP2"): EP2,
    ("kto", "DP2, reference TP2"): REF_TP2,
    ("kto", "PP2, packed, micro-batches of 1"): PP2 | {"padding_free": True, "micro_batch_size": 1},
    ("thirds", "DP3, reference TP2"): REF_TP2,  # of three ranks that all train, two hold the reference model
}
# By what is trained: layouts that CI runs. The others divide a model or a batch in ways that test_parity.py has too.
IN_CI = [("full", "PP2, reference TP2"), ("full", "CP2, packed"), ("kto", "DP2, reference TP2")]
THIRDS = ("thirds", "DP3, reference TP2")
GROUPS = [IN_CI, [key for key in LAYOUTS if key not in IN_CI]]
# Float32 sums in another order, on log-probabilities of about 100; rewards are differences of these.
FLOAT32: dict[str, Any] = {"rel": 1e-3, "abs": 1e-3}
# bfloat16 rounds to 3 digits.
BFLOAT16: dict[str, Any] = {"rel": 3e-2, "abs": 5e-2}
# Adam's first steps have the size of the learning rate whatever the gradient's, so a small gradient that is rounded to
# the other sign moves its weight the other way: how many are depends on the machine's instructions.
BFLOAT16_AFTER_A_STEP: dict[str, Any] = {"rel": 1e-1, "abs": 1e-1}


def tolerance_of(args: SftArgs, step: int) -> dict[str, Any]:
    if args.torch_dtype == "float32":
        return FLOAT32
    return BFLOAT16_AFTER_A_STEP if step else BFLOAT16


def make_options(place: Path, family: str, name: str, **changed: Any) -> DpoArgs:
    """Return options for 2 steps of a tiny model. Its reference model is another model."""
    models = [place / f"{family}-{which}" for which in ("model", "reference")]
    for seed, hf_dir in enumerate(models):
        if not hf_dir.exists():
            make_tiny_hf(hf_dir, family, depth=1, seed=seed, with_tokenizer=True, **SIZES)
    rows = write_pairs(place / "pairs.jsonl")
    if changed.get("loss_type") == "kto":
        rows = write_rated(place / "rated.jsonl")
    usual: dict[str, Any] = OPTIONS | {"global_batch_size": 4, "micro_batch_size": 2, "train_iters": 2}
    return DpoArgs(
        model=str(models[0]),
        ref_model=str(models[1]),
        dataset=[str(rows)],
        split_dataset_ratio=0.25,
        output_dir=str(place / name.replace(" ", "_")),
        acceptance_samples=0,
        report_to=[],
        **(usual | changed),
    )


@pytest.mark.parametrize("group", some_of(GROUPS, IN_CI), ids=["ci", "others"])
def test_a_layout_changes_no_number(tmp_path, group):
    alone = {what: make_options(tmp_path, family, what, **options) for what, (family, options) in TRAINED.items()}
    expected = check_layouts(alone, {key: LAYOUTS[key] for key in group}, tolerance_of, on_three=[THIRDS])
    assert all(len(lines) == 3 for lines in expected.values())
    if "kto" in expected:
        assert max(line.get("kl", 0.0) for line in expected["kto"]) > 0.1


def prepare_with(args: list[DpoArgs]) -> str:
    """Return the error on a rank with different options."""
    with phases.open_session(args[0], resolve(args[0].model)) as mesh:
        try:
            prepare(args[dist.get_rank()], mesh)
        except UserError as error:
            return str(error)
    return ""


def test_ranks_with_other_references_are_told(tmp_path):
    args = make_options(tmp_path, "qwen3", "run")
    other = make_tiny_hf(tmp_path / "other", "qwen3", depth=0, with_tokenizer=True)
    told = launch(2, prepare_with, [args, replace(args, ref_model=str(other))])
    assert told[0] == told[1]
    assert mentions(told[0].splitlines()[1], "--ref_model")


LENGTH = 44  # most answers are longer, and cut


class Logits(TorchDispatchMode):
    """Records the bytes of the largest tensor over the vocabulary, by precision.

    Args:
        size: size of the vocabulary on this rank.
        hidden: hidden size, which is the number of rows of the transposed output matrix.
    """

    def __init__(self, size: int, hidden: int):
        super().__init__()
        self.size, self.hidden = size, hidden
        self.largest: dict[torch.dtype, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        is_tensor = isinstance(result, torch.Tensor) and result.dim() > 1
        if is_tensor and result.shape[-1] == self.size and result.shape[0] != self.hidden:
            self.largest[result.dtype] = max(result.nbytes, self.largest.get(result.dtype, 0))
        return result


def hold_both(args: DpoArgs) -> dict[str, int]:
    """Return the bytes on this rank while the reference model is evaluated, of both models."""
    with phases.open_session(args, resolve(args.model)) as mesh:
        run = prepare(args, mesh)
        model = reference.open_reference(run)
        chunks = model.open()
        config = run.hf_model.config
        logits = Logits(config["vocab_size"] // model.mesh.tp.size(), config["hidden_size"])
        with logits:
            long = next(pair for pair in run.data.train if min(map(len, pair.sequences)) == LENGTH)
            log_probabilities(chunks, model.mesh, model.batches, [long])
        wrapped: Any = run.train_state.wrapped  # `buffers` is taken for torch's method
        held = [parameter for chunk in run.train_state.chunks for parameter in chunk.parameters()]
        held += [buffer.grad_data for chunk in wrapped for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
        held += [tensor for group in run.train_state.optimizer.param_groups for tensor in group["params"]]
        each_once = {tensor.untyped_storage().data_ptr(): tensor.nbytes for tensor in held}
        frozen = [parameter for chunk in chunks for parameter in chunk.parameters()]
        return {
            "model": sum(each_once.values()),
            "weights": sum(parameter.nbytes for parameter in frozen),
            # Logits are made where there are labels; a plan takes every token to have one.
            "logits": sum(logits.largest.values()) * 2 * LENGTH // sum(a.num_trained_tokens for a in long.sequences),
        }


@pytest.mark.parametrize("torch_dtype", some_of(["float32", "bfloat16"], "bfloat16"))
def test_a_plan_counts_both_models(tmp_path, torch_dtype):
    layouts = TP2 | REF_PP2
    options: dict[str, Any] = {"torch_dtype": torch_dtype, "max_length": LENGTH, **layouts}
    args = make_options(tmp_path, "qwen3", "run", truncation_strategy="right", **options)
    facts = read_facts(args, 2)
    setup = Setup.of(args, plan_of(args, facts))
    stages = estimate(facts.hf_config, setup)
    (part,) = reference_parts(args, setup, read_config(str(args.ref_model)))
    measured = launch(2, hold_both, args)  # the second stage of the reference model is the larger one
    expected = {"model": before_first_step(stages[0]), "weights": part.weights, "logits": part.logits}
    assert max(measured, key=lambda each: each["weights"] + each["logits"]) == expected
