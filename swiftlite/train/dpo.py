"""`swiftlite megatron dpo`: a run as in `sft.py`, over pairs of answers, with what a reference model says of them."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase

from swiftlite.args.commands import DpoArgs
from swiftlite.bridge.hf_config import read_config
from swiftlite.data.batch import Batch
from swiftlite.data.dataset import Data, load_train_val
from swiftlite.data.encoder import ConversationEncoder, Encoder
from swiftlite.data.rated import mismatch
from swiftlite.data.sample import Sample
from swiftlite.data.sampler import Sampler
from swiftlite.data.template import ChatTemplate
from swiftlite.heads import Heads
from swiftlite.hub.model import local_model
from swiftlite.plan.layout import data_parallel_size, ranks_of
from swiftlite.plan.preference import preference_of, reference_layout
from swiftlite.plan.run import row_multiple_of
from swiftlite.runtime.mesh import Mesh
from swiftlite.train import phases, sft
from swiftlite.train.batches import Batches, MicroBatches
from swiftlite.train.kto import KtoObjective, measure_kl
from swiftlite.train.preference import PreferenceObjective
from swiftlite.train.reference import Reference
from swiftlite.train.trainer import Trainer


def run(args: DpoArgs, after_step: phases.AfterStep | None = None) -> int:
    """Learn from pairs; returns 0, or 128 plus the number of the signal that stopped the run (a checkpoint was saved).

    Args:
        after_step: as for `sft.run`.
    """
    with phases.open_session(args) as mesh, phases.claim_output_dir(args):
        prepared = prepare(args, mesh)
        state = phases.restore(prepared)
        trainer = make_trainer(args, prepared, state, after_step)
        outcome = phases.fit(prepared, trainer, state["step"], sft.make_held_out(prepared))
        return phases.finish(prepared, outcome)


def prepare(args: DpoArgs, mesh: Mesh) -> phases.Run:
    """As `sft.prepare`; what the reference model says of the pairs is written to its cache.

    Raises:
        UserError: also where the reference model or its cache cannot be used.
    """
    prepared = sft.prepare(args, mesh, make_pair_encoder, load_pairs)
    return compare_with_reference(args, prepared) if preference_of(args).needs_reference else prepared


def make_trainer(
    args: DpoArgs, prepared: phases.Run, state: dict, after_step: phases.AfterStep | None = None
) -> Trainer:
    """The trainer of a run that has been restored.

    Args:
        state: what `phases.restore` returned.
    """
    of_run = (preference_of(args), prepared.plan.heads, args.mtp_loss_scaling_factor)
    if args.loss_type != "kto":
        return sft.make_trainer(prepared, state, after_step, PreferenceObjective(*of_run))
    objective = KtoObjective(*of_run)

    def look_ahead(batches: Sequence[Batch]) -> KtoObjective:
        assert isinstance(batches, MicroBatches)  # KTO reads no streams
        return replace(objective, kl=measure_kl(prepared.learner.wrapped, prepared.mesh, batches.mismatched))

    return replace(sft.make_trainer(prepared, state, after_step, objective), look_ahead=look_ahead)


def make_pair_encoder(args: DpoArgs, tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> Encoder:
    """Return the encoder of pairs, or with --loss_type kto of single answers; of each row the last turn alone trains.

    (`parse_pair` and `parse_rated` weigh all others 0.)
    """
    template = ChatTemplate(tokenizer, vocab_size=vocab_size)
    kind = "rated" if args.loss_type == "kto" else "pairs"
    return ConversationEncoder(template, args.max_length, args.truncation_strategy, kind)


def load_pairs(args: DpoArgs, encoder: Encoder, vocab_size: int) -> Data:
    """The rows to train on and those held out.

    Raises:
        UserError: files or rows that cannot be used.
    """
    data = load_train_val(
        encoder,
        args.dataset,
        args.val_dataset,
        split_dataset_ratio=args.split_dataset_ratio,
        max_bad_rows=args.max_bad_rows,
        system=args.system,
        num_proc=args.dataset_num_proc,
        seed=args.seed,
        interleave_prob=args.interleave_prob,
    )
    if args.loss_type != "kto":
        return data
    # All at once, so that one held-out row is no lonely one.
    samples = mismatch([*data.train, *data.val], args.max_length, args.truncation_strategy, args.seed)
    return replace(data, train=samples[: len(data.train)], val=samples[len(data.train) :])


def compare_with_reference(args: DpoArgs, run: phases.Run) -> phases.Run:
    """The run, its pairs with what the reference model says of them; collective.

    Raises:
        UserError: the reference model or its cache cannot be used.
    """
    reference = open_reference(args, run)
    used = pairs_of_steps(args, run)
    asked = [*(run.data.train[index] for index in used), *run.data.val]
    answers = reference.of([_as_pair(sample) for sample in asked])
    scored = [replace(sample, reference=pair.reference) for sample, pair in zip(asked, answers, strict=True)]
    train = list(run.data.train)
    for index, sample in zip(used, scored, strict=False):  # those held out follow
        train[index] = sample
    data = replace(run.data, train=train, val=scored[len(used) :])
    return replace(run, data=data, rows=run.batches.rows(train))


def _as_pair(sample: Sample) -> Sample:
    """The two that the reference model is asked about: a pair itself, or a single answer and what is mismatched."""
    if sample.mismatched is None:
        return sample
    return replace(sample, rejected=sample.mismatched, mismatched=None, desirable=None)


def pairs_of_steps(args: DpoArgs, run: phases.Run) -> list[int]:
    """Indices of the training pairs that the steps of the run use."""
    num_rows, batch_size = len(run.rows), run.plan.global_batch_size
    if run.schedule.steps * batch_size >= num_rows:
        return list(range(len(run.data.train)))
    sampler = Sampler(num_rows, batch_size, args.seed, args.dataset_shuffle)
    rows = np.concatenate([sampler.global_batch(step) for step in range(run.schedule.steps)])
    indices = np.concatenate([run.rows.rows[row] for row in rows])
    return sorted(indices.tolist())


def open_reference(args: DpoArgs, run: phases.Run) -> Reference:
    """The reference model on a mesh of its own layout, which may leave the last ranks out; collective."""
    layout = reference_layout(args)
    model = args.ref_model or args.model
    mesh = run.mesh
    ranks = ranks_of(layout, run.plan.world_size)
    if layout != mesh.layout:
        tied = bool(read_config(local_model(model)).get("tie_word_embeddings"))
        minutes = args.distributed_timeout_minutes
        mesh = Mesh.create(mesh.device, layout, ranks=ranks, tied_embeddings=tied, timeout_minutes=minutes)
    packing = "none" if run.plan.packing == "none" else "micro_batch"
    plan = replace(
        run.plan,
        layout=layout,
        data_parallel_size=data_parallel_size(layout, len(ranks)),
        packing=packing,
        row_multiple=row_multiple_of(layout, packing, mesh.device.is_cuda),
        heads=Heads(),
    )
    return Reference(
        model=model,
        torch_dtype=args.torch_dtype,
        mesh=mesh,
        batches=Batches(plan, mesh.dp.rank() if mesh.is_here else 0, run.batches.pad_token_id, run.batches.flops),
        directory=Path(args.ref_logprobs_cache or run.output_dir / "reference"),
    )
