"""`swiftlite megatron sft`: every object of the run is made here, in order, and nowhere else."""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from transformers import PreTrainedTokenizerBase

from swiftlite.acceptance.generated import measure_acceptance
from swiftlite.args.commands import SftArgs
from swiftlite.args.config import to_config, write_config
from swiftlite.args.fields import MoeArgs, RecomputeArgs
from swiftlite.bridge.hf_config import read_config
from swiftlite.bridge.tensors import describe
from swiftlite.bridge.transfer import LoadReport, load_hf
from swiftlite.data.conversation import Conversation
from swiftlite.data.dataset import Data, Encoder, load_train_val
from swiftlite.data.mock import mock_samples
from swiftlite.data.sampler import Sampler
from swiftlite.data.stream import Stream
from swiftlite.data.template import ChatTemplate, load_tokenizer, stop_token_ids
from swiftlite.errors import UserError
from swiftlite.families import index
from swiftlite.families.family import Family
from swiftlite.heads import Heads
from swiftlite.log import logger
from swiftlite.model.build import build_model, check_computable
from swiftlite.model.gpt import GPTModel
from swiftlite.plan.flops import training_flops
from swiftlite.plan.layout import group_of, layout_of, sequence_multiple
from swiftlite.plan.run import Plan, make_plan, make_schedule
from swiftlite.runtime.agreement import check_agreement, digest
from swiftlite.runtime.distributed import session
from swiftlite.runtime.mesh import Mesh
from swiftlite.train.batches import Batches
from swiftlite.train.checkpoint import Checkpointer, load_checkpoint, read_state, resolve_checkpoint
from swiftlite.train.live_weights import LiveWeights
from swiftlite.train.optim import make_optimizer, wrap_model
from swiftlite.train.report import check_frozen, compare_tensors, hash_tensors, write_json
from swiftlite.train.sinks import open_sinks
from swiftlite.train.source import describe_heads, write_source
from swiftlite.train.streaming import StreamedBatches
from swiftlite.train.trainer import Trainer, whole_parameters

ACCEPTANCE_FILE = "acceptance.json"
REPORT_FILE = "run_report.json"


def run(args: SftArgs, after_step: Callable[[int, LiveWeights], None] | None = None) -> int:
    """Fine-tune; returns 0, or 128 plus the number of the signal that stopped the run (a checkpoint was saved).

    Args:
        after_step: called on every rank after each step with its number and the weights as they are then.
    """
    hf_config = read_config(Path(args.model))
    with session(
        layout_of(args),
        tied_embeddings=bool(hf_config.get("tie_word_embeddings")),
        seed=args.seed,
        timeout_minutes=args.distributed_timeout_minutes,
    ) as mesh:
        return _run(args, mesh, after_step)


def _run(args: SftArgs, mesh: Mesh, after_step: Callable[[int, LiveWeights], None] | None) -> int:
    device = mesh.device
    hf_dir, output_dir, is_first = Path(args.model), Path(args.output_dir), dist.get_rank() == 0
    hf_config = read_config(hf_dir)
    family = index.get(hf_config, hf_dir)
    plan = make_plan(args, dist.get_world_size(), Heads.from_config(hf_config))
    check_computable(plan.layout, device)
    dtype = torch.bfloat16 if args.torch_dtype == "bfloat16" else torch.float32

    tokenizer = load_tokenizer(hf_dir, args.trust_remote_code)
    data = _load_data(args, tokenizer, hf_config)
    flops = training_flops(hf_config, plan.heads, heads_only=args.mtp_mode == "heads_only")
    batches = Batches(plan, parallel_state.get_data_parallel_rank(), cast(int, tokenizer.pad_token_id or 0), flops)
    rows = batches.rows(data.train)
    schedule = make_schedule(args, len(rows))

    model = build_model(
        family.architecture(hf_config),
        hf_config,
        mesh=mesh,
        dtype=dtype,
        heads=plan.heads,
        freeze_trunk=args.mtp_mode == "heads_only" and plan.heads.layers > 0,
        recompute=group_of(args, RecomputeArgs),
        moe=group_of(args, MoeArgs),
        drafting=family.mtp.drafting,
        mtp_loss=args.mtp_loss,
    )
    checkpoint = resolve_checkpoint(output_dir) if args.resume else None
    _check_agreement(args, data, checkpoint)
    load_report = _load_weights(args, plan, model, family, hf_config)
    if not checkpoint:  # which replaces what was loaded or initialised
        logger.info("%s", load_report)
    hashes = hash_tensors(model)
    wrapped = wrap_model(model, dtype, args)
    optimizer, scheduler = make_optimizer(args, plan, schedule, wrapped, device)

    first, state = 0, {}
    if checkpoint:
        state = read_state(checkpoint)
        first = state["step"]
        if first > schedule.steps:
            raise UserError(
                f"{checkpoint} is past the {schedule.steps} steps that were asked for",
                "give more with --train_iters or --num_train_epochs",
            )
        load_checkpoint(checkpoint, model, optimizer)
        scheduler.step(increment=first)
        logger.info("going on from %s", checkpoint)
    elif is_first:
        write_source(hf_dir, output_dir, family, hf_config, plan.heads, args.mtp_graft_from)
        write_config(args, output_dir / "args.json")

    if args.streaming:
        streamed = StreamedBatches(batches, _open_stream(args, plan, tokenizer, state) if is_first else None, device)
        train_batches, data_state = streamed.train, streamed.state
    else:
        sampler = Sampler(len(rows), plan.global_batch_size, args.seed, args.dataset_shuffle)
        train_batches, data_state = partial(batches.train, rows, sampler), dict
    checkpoint_state = {"mtp_num_layers": plan.heads.layers, "torch_dtype": args.torch_dtype}
    trainer = Trainer(
        model=wrapped,
        optimizer=optimizer,
        scheduler=scheduler,
        plan=plan,
        schedule=schedule,
        mtp_loss_scaling_factor=args.mtp_loss_scaling_factor,
        train_batches=train_batches,
        data_state=data_state,
        flops=flops,
        eval_batches=batches.evaluation(data.val, args.eval_iters),
        mesh=mesh,
        sinks=open_sinks(output_dir, first, schedule.steps, args.tensorboard) if is_first else [],
        logging_steps=args.logging_steps,
        checkpointer=Checkpointer(
            output_dir, model, optimizer, checkpoint_state, args.save_total_limit, args.async_save
        ),
    )
    if after_step:
        live = LiveWeights(wrapped, family, hf_config, _hf_dtypes(args, family, hf_config))
        trainer.after_step = lambda step: after_step(step, live)
    acceptance = _Acceptance(args, plan, data.val_conversations, tokenizer, hf_dir, trainer)
    if not args.resume:
        acceptance.measure("before", trainer.evaluate())
    start = time.perf_counter()
    stopped_by = trainer.fit(first)
    seconds = time.perf_counter() - start
    if stopped_by:
        trainer.close()
        logger.warning("stopped by signal %d after saving; the same command with --resume goes on", stopped_by)
        return 128 + stopped_by

    evaluation = trainer.evaluate()
    trainer.log(schedule.steps, evaluation)
    acceptance.measure("after", evaluation)
    trainer.close()
    with whole_parameters(wrapped):
        tensors = compare_tensors(model, hashes)
    if is_first:
        measured = {"steps": schedule.steps, "seconds": round(seconds, 1), "evaluation": evaluation}
        write_json(output_dir / REPORT_FILE, {**measured, **_account(data, load_report), "tensors": tensors})
    check_frozen(tensors)
    logger.info("done. Next: swiftlite export --to_hf --model %s --output_dir %s-hf", output_dir, output_dir)
    return 0


def _load_weights(
    args: SftArgs, plan: Plan, model: Sequence[GPTModel], family: Family, hf_config: dict[str, Any]
) -> LoadReport:
    """From --model, heads from where --mtp_init says.

    Raises:
        UserError: there are heads that nothing asked for, and nothing said to drop.
    """
    report = load_hf(
        model,
        Path(args.model),
        family,
        hf_config,
        mtp_init=args.mtp_init,
        graft_from=args.mtp_graft_from,
        seed=args.seed,
    ).over_all_ranks()
    heads_were_forgotten = args.mtp_num_layers is None and plan.heads.layers == 0
    if heads_were_forgotten and any(family.is_mtp(hf_config, key) for key in report.dropped):
        raise UserError(
            f"{args.model} has MTP tensors, but its config.json promises no MTP layer",
            "--mtp_num_layers 0 drops them; to keep them, correct num_nextn_predict_layers in config.json",
        )
    return report


def _hf_dtypes(args: SftArgs, family: Family, hf_config: dict[str, Any]) -> dict[str, str]:
    """Precision of each tensor in an export of this run, by HF name."""
    tensors = describe(Path(args.model))
    if args.mtp_graft_from:
        tensors |= describe_heads(args.mtp_graft_from, family, hf_config)
    return {key: tensor["dtype"] for key, tensor in tensors.items()}


def _account(data: Data, loaded: LoadReport) -> dict[str, Any]:
    """What became of every row and of every tensor."""
    weights = {
        "loaded": len(loaded.loaded),
        "initialised": dict(loaded.initialised),
        "dropped": list(loaded.dropped),
    }
    return {"data": data.report.as_dict(), "data_sha256": data.digest, "weights": weights}


def _check_agreement(args: SftArgs, data: Data, checkpoint: Path | None) -> None:
    """Every rank must be about to do the same; nodes have files of their own."""
    where = ("model", "mtp_graft_from", "output_dir", "dataset", "val_dataset")  # may differ from node to node
    options = {f"--{name}": str(value) for name, value in to_config(args).items() if name not in where}
    versions = {name: version(name) for name in ("torch", "megatron-core", "transformers")}
    check_agreement(
        {
            **options,
            **versions,
            "rows of the dataset": data.digest[:16],
            "tensors of --model": digest(describe(Path(args.model))),
            "checkpoint": checkpoint.name if checkpoint else "none",
        }
    )


def _load_data(args: SftArgs, tokenizer: PreTrainedTokenizerBase, hf_config: dict[str, Any]) -> Data:
    """All samples; without the training ones if those are read while training goes on."""
    mock = args.sft_mock_dataset_config_json
    is_read_here = not args.streaming and mock is None
    data = load_train_val(
        tokenizer,
        args.dataset if is_read_here else (),
        args.val_dataset,
        split_dataset_ratio=args.split_dataset_ratio if is_read_here else 0,
        max_length=args.max_length,
        truncation_strategy=args.truncation_strategy,
        loss_scale=args.loss_scale,
        max_bad_rows=args.max_bad_rows,
        system=args.system,
        num_proc=args.dataset_num_proc,
        seed=args.seed,
    )
    if mock is None:
        return data
    samples = mock_samples(mock, hf_config["vocab_size"], seed=args.seed)
    if (longest := int(samples.lengths.max())) > args.max_length:
        raise UserError(
            f"--sft_mock_dataset_config_json: a sample of {longest} tokens, over --max_length {args.max_length}",
            f"--max_length {longest}",
        )
    data.report.train_samples = len(samples)
    return replace(data, train=samples, digest=digest({"lengths": samples.lengths.tolist(), "val": data.digest}))


def _open_stream(args: SftArgs, plan: Plan, tokenizer: PreTrainedTokenizerBase, state: dict[str, Any]) -> Stream:
    encoder = Encoder(ChatTemplate(tokenizer, args.loss_scale), args.max_length, args.truncation_strategy)
    return Stream(
        args.dataset,
        encoder,
        plan.packing_length,
        buffer_size=args.streaming_buffer_size,
        multiple=sequence_multiple(plan.layout),
        max_bad_rows=args.max_bad_rows,
        system=args.system,
        state=state.get("stream"),
    )


class _Acceptance:
    """acceptance.json: what an engine would accept of the heads' drafts, before and after training."""

    def __init__(
        self,
        args: SftArgs,
        plan: Plan,
        conversations: list[Conversation],
        tokenizer: PreTrainedTokenizerBase,
        hf_dir: Path,
        trainer: Trainer,
    ):
        self.path = Path(args.output_dir) / ACCEPTANCE_FILE
        self.num_drafts = plan.heads.drafts
        self.trainer = trainer
        template = ChatTemplate(tokenizer)
        chosen = conversations[: args.acceptance_samples]
        self.prompts = [template.encode_prompt(chat.prompt().messages, chat.tools) for chat in chosen]
        self.generate = partial(
            measure_acceptance,
            trainer.model,
            self.prompts,
            num_drafts=self.num_drafts,
            eos_token_ids=stop_token_ids(template, hf_dir),
            max_new_tokens=args.acceptance_max_new_tokens,
            max_length=read_config(hf_dir)["max_position_embeddings"],
            batch_size=max(args.micro_batch_size, 8),
            mesh=trainer.mesh,
        )

    def measure(self, when: str, evaluation: dict[str, float]) -> None:
        """Add the figures of `when` (before, after) to the file; nothing without heads or held-out prompts."""
        if not (self.num_drafts and self.prompts):
            return
        with self.trainer.evaluating():
            counts = self.generate()
        if dist.get_rank():
            return
        content: dict[str, Any] = {"depths": self.num_drafts}
        if when == "after" and self.path.exists():
            content = json.loads(self.path.read_text())
        per_depth = [evaluation[f"eval_mtp_{depth}_acceptance"] for depth in range(1, self.num_drafts + 1)]
        generated = {"prompts": len(self.prompts), **counts.to_json()}
        content[when] = {"teacher_forced": {"acceptance_per_depth": per_depth}, "generated": generated}
        write_json(self.path, content)
        logger.info(
            "acceptance %s training: %d of %d drafted tokens on %d held-out prompts (%.1f %%)",
            when,
            counts.accepted,
            counts.drafted,
            len(self.prompts),
            100 * counts.accepted / max(counts.drafted, 1),
        )
