"""Rules of `export`."""

import os
from collections.abc import Iterator
from pathlib import Path

from swiftlite.args.commands import ExportArgs
from swiftlite.args.config import Problem
from swiftlite.hub.name import model_name
from swiftlite.hub.push import has_token, is_offline
from swiftlite.plan.facts import Facts, is_run, method_of_run, model_of_run, near_path, run_checkpoints
from swiftlite.rules import common


def export_has_one_direction(args: ExportArgs, facts: Facts) -> Iterator[Problem]:
    if args.to_hf == args.to_mcore:
        given = "both --to_hf and --to_mcore" if args.to_hf else "neither --to_hf nor --to_mcore"
        yield given, "give one: --to_hf for a Hugging Face model, --to_mcore for a megatron-core checkpoint"


def export_source_fits(args: ExportArgs, facts: Facts) -> Iterator[Problem]:
    if args.to_mcore and not args.to_hf:
        yield from common.hf_model_is_a_directory(args, facts)
        return
    if not args.model:
        yield "--model is required", "give a run's output_dir, or one of its checkpoint-N"
        return
    path = Path(args.model)
    if not path.exists():
        yield f"--model {path} does not exist", near_path(path) or "give the --output_dir of a training run"
    elif path.is_file():
        yield f"--model {path} is a file", f"give the directory that holds it: --model {path.parent}"
    elif not args.to_hf or (path.name.startswith("checkpoint-") and is_run(path.parent)):
        return
    elif not is_run(path):
        hint = "it is a Hugging Face model already; --to_mcore goes the other way" if facts.hf_config else ""
        hint = hint or "give the --output_dir of a training run"
        yield f"--model {path} is not a training run: it has no source/config.json", hint
    elif not run_checkpoints(path):
        yield f"--model {path} is a run without any checkpoint-N", "let it reach its first checkpoint (--save_steps)"


def export_output_can_take_its_name(args: ExportArgs, facts: Facts) -> Iterator[Problem]:
    """Require an --output_dir that a rename can replace: an export is written next to it and renamed when complete."""
    given = Path(args.output_dir)
    directory = given.resolve()
    if not args.output_dir or not directory.is_dir():
        return
    name_one_in_it = f"name a directory in it: --output_dir {given / 'export'}"
    if any(directory.iterdir()):
        yield f"--output_dir {given} is not empty", "name a new directory, or delete this one"
    elif directory.is_mount():
        yield f"--output_dir {given} is a mount point, whose place no other directory can take", name_one_in_it
    elif directory == Path.cwd():
        yield f"--output_dir {given} is the working directory, whose place another one would take", name_one_in_it
    elif not os.access(directory.parent, os.W_OK):
        yield f"--output_dir {given} is written beside its place, and {directory.parent} is not yours", name_one_in_it


def export_output_is_outside_of_checkpoints(args: ExportArgs, facts: Facts) -> Iterator[Problem]:
    """Reject an --output_dir inside a run's checkpoints or `source/`.

    A run deletes its old checkpoints with all files in them, and only the run itself writes to `source/`.
    """
    given = Path(args.output_dir)
    for directory in (given.resolve(), *given.resolve().parents):
        is_inside = directory.name == "source" or directory.name.startswith("checkpoint-")
        if args.output_dir and is_inside and is_run(directory.parent):
            run = directory.parent
            yield f"--output_dir {given} lies in {directory}, which is the run's own", f"name another: {run / 'export'}"


def acceptance_can_be_measured(args: ExportArgs, facts: Facts) -> Iterator[Problem]:
    asked = [f"--{name}" for name in ("min_acceptance", "max_regression") if vars(args)[name] is not None]
    if not asked:
        return
    flags = " and ".join(asked)
    if not args.to_hf or args.mtp == "strip":
        yield f"{flags}: there are no heads to export" if args.to_hf else f"{flags} without --to_hf", "leave it out"
    if not args.val_dataset:
        yield f"{flags} needs rows to measure on", "add --val_dataset FILE"
    yield from common.val_dataset_files_exist(args, facts)
    if facts.world_size > 1:
        yield f"{flags} with {facts.world_size} processes: one measures", "export with one process"
    yield from common.baseline_is_a_model(args, facts)
    if args.max_regression is not None and not args.baseline and not model_of_run(Path(args.model)):
        yield (
            "--max_regression compares with the model that the run began with, and that is not there any more",
            "add --baseline DIR",
        )


def push_can_be_tried(args: ExportArgs, facts: Facts) -> Iterator[Problem]:
    if args.push_to_hub is None:
        return
    flag = f"--push_to_hub {args.push_to_hub}"
    is_bare = "@" not in args.push_to_hub and model_name(f"{args.push_to_hub}@main") is not None
    if not is_bare:
        yield f"{flag} is no name of a repository", "for example --push_to_hub ORG/NAME"
    elif not args.to_hf:
        yield f"{flag} without --to_hf", "add --to_hf: the hub takes Hugging Face models"
    elif not has_token():
        yield f"{flag} needs a token that may write", "hf auth login, or set HF_TOKEN"
    elif is_offline():
        yield f"{flag}, but HF_HUB_OFFLINE forbids to ask the hub", "unset HF_HUB_OFFLINE"


def draft_vocab_can_be_chosen(args: ExportArgs, facts: Facts) -> Iterator[Problem]:
    if args.draft_vocab is None:
        return
    flag = f"--draft_vocab {args.draft_vocab}"
    size = facts.hf_config.get("vocab_size")
    method = method_of_run(Path(args.model))
    if not args.to_hf:
        yield f"{flag} without --to_hf", "leave it out; megatron sft --draft_vocab trains with it"
    elif method and not method.imitates_rows:
        yield (
            f"{flag} counts the answers that heads have learned from, and this run is one of {method.words}, whose "
            "rows are no such answers",
            "export without it, and train the heads of that: swiftlite megatron sft --mtp_mode heads_only "
            f"{flag} --dataset FILE",
        )
    elif args.mtp == "strip" or args.mtp_graft_from:
        yield f"{flag} is for the run's own heads", "leave one of the two out"
    elif not facts.heads.layers:
        yield f"{flag}: the run has no heads", common.TRAIN_HEADS
    elif facts.heads.draft_vocab:
        yield f"{flag}: the run's heads draft {len(facts.heads.draft_vocab)} tokens already", "leave it out"
    elif size and args.draft_vocab >= size:
        yield f"{flag}, but the model's whole vocabulary is {size}", "choose fewer, or leave it out"


def export_settings_without_effect(args: ExportArgs, facts: Facts) -> Iterator[str]:
    unmeasured = (args.min_acceptance is None and args.max_regression is None, "no acceptance is asked for")
    not_compared = (args.max_regression is None, "--max_regression is not given")
    not_pushed = (args.push_to_hub is None, "--push_to_hub is not given")
    idle = {"val_dataset": unmeasured, "force": unmeasured, "baseline": not_compared, "hub_private_repo": not_pushed}
    yield from common.without_effect(args, idle)


def adapters_alone_take_no_other_wish(args: ExportArgs, facts: Facts) -> Iterator[Problem]:
    if args.merge_lora:
        return
    if args.to_mcore:
        yield "--merge_lora false is for --to_hf: a Hugging Face model has no adapters", "leave it out"
    names = ("mtp_graft_from", "torch_dtype", "draft_vocab", "min_acceptance", "max_regression", "push_to_hub")
    for name in common.changed(args, (*names, "max_shard_size_gb")):
        yield f"--{name} with --merge_lora false, which writes adapters alone", "leave one of the two out"


def graft_is_not_stripped(args: ExportArgs, facts: Facts) -> Iterator[Problem]:
    if args.mtp_graft_from is not None and args.mtp == "strip":
        yield "--mtp_graft_from brings heads that --mtp strip leaves out", "leave one of them out"


RULES = (
    export_has_one_direction,
    export_source_fits,
    common.output_dir_is_given,
    export_output_can_take_its_name,
    export_output_is_outside_of_checkpoints,
    common.numbers_are_in_range,
    common.layout_fits,
    acceptance_can_be_measured,
    common.graft_has_heads,
    graft_is_not_stripped,
    adapters_alone_take_no_other_wish,
    draft_vocab_can_be_chosen,
    push_can_be_tried,
)
NOTES = (export_settings_without_effect,)
