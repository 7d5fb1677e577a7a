"""Rules that several commands share."""

import importlib.util
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from swiftlite.args.bounds import describe, out_of_bounds
from swiftlite.args.command_line import shell_line
from swiftlite.args.commands import BenchArgs, EvaluateArgs, ExportArgs, InferArgs, RmArgs, SftArgs
from swiftlite.args.config import Problem, not_supported
from swiftlite.args.data_file import (
    DATA_SUFFIXES,
    SPEED_BENCH,
    data_suffix,
    is_number_of_rows,
    prepared_files,
    split_sample,
)
from swiftlite.args.docs import options, unsupported
from swiftlite.args.fields import ParallelLayout
from swiftlite.base.errors import UserError
from swiftlite.base.heads import DRAFTER_KEY, MTP, Heads, depth_key, kind_of
from swiftlite.data.rows.hub_rows import commit_of_dataset
from swiftlite.data.template_kwargs import impossible_names
from swiftlite.families.architecture import Architecture
from swiftlite.families.drafters import is_published
from swiftlite.families.index import get as get_family
from swiftlite.families.index import image_sizes
from swiftlite.families.reward_model import is_reward_model
from swiftlite.hub.name import MODELSCOPE, dataset_name, model_name
from swiftlite.methods.index import method_of
from swiftlite.plan.facts import Facts, is_run, near_path, run_checkpoints
from swiftlite.plan.heads import heads_of
from swiftlite.plan.layout import layout_of, layout_problems, process_problems, ranks_of

_PATHS = ("model", "output_dir", "dataset", "val_dataset", "baseline", "mtp_graft_from", "result_path")
_PATHS += ("ref_model", "ref_logprobs_cache", "cache_trunk_states", "acceptance_json", "adapters", "runs", "output")
_PATHS += ("teacher_model", "dataset_cache", "reward_model")
# Linux allows 255 and 4095 bytes. Temporary files next to a path have longer names.
_MAX_NAME = 235
_MAX_PATH = 4000
TRAIN_HEADS = "train heads first: swiftlite megatron sft --mtp_num_layers 1"
_GIVE_A_MODEL = "give the directory of a Hugging Face model"
Rule = Callable[[Any, Facts], Iterator[Any]]


def numbers_are_in_range(args: Any, facts: Facts) -> Iterator[Problem]:
    for name, bounds in out_of_bounds(args).items():
        value = vars(args)[name]
        allowed = describe(bounds)
        if isinstance(value, float) and not math.isfinite(value):
            allowed = f"a finite number, {allowed}"
        yield f"--{name} {value} must be {allowed}", ""


def options_are_of_the_command(args: Any) -> Iterator[Problem]:
    """Reject options that the command does not have, which code can set; the command line rejects them earlier."""
    known = options(type(args), with_unsupported=True)
    for name, why in unsupported(type(args)).items():
        if getattr(args, name) != known[name].default:
            yield not_supported(name, method_of(args).words, why)


def template_variables_can_be_set(args: Any) -> Iterator[Problem]:
    given = vars(args).get("chat_template_kwargs") or {}
    try:
        json.dumps(given, allow_nan=False)
    except ValueError:
        yield "--chat_template_kwargs has a number that JSON does not have", "replace NaN and Infinity"
    for name in impossible_names(given):
        problem = f"--chat_template_kwargs cannot set {name!r}"
        yield problem, "give names of variables of the chat template; --system and rows set the conversation"


def texts_can_be(args: Any) -> Iterator[Problem]:
    """Reject texts that cannot be written to a file, and impossible paths.

    Python would raise unclear errors for them.
    """
    for option, given in vars(args).items():
        texts = given if isinstance(given, list) else [given]
        for text in texts:
            if not isinstance(text, str):
                continue
            encoded = text.encode(errors="backslashreplace")
            if "\0" in text or encoded.decode() != text:
                yield f"--{option} {text!r} contains NUL or bytes that are not valid UTF-8", "write it in UTF-8"
            elif option in _PATHS and _is_too_long(text):
                yield (
                    f"--{option} {text[:40]}... is too long: at most {_MAX_NAME} bytes per name, {_MAX_PATH} per path",
                    "give a shorter path",
                )


def _is_too_long(path: str) -> bool:
    return len(path.encode()) > _MAX_PATH or any(len(name.encode()) > _MAX_NAME for name in Path(path).parts)


def hf_model_is_a_directory(args: Any, facts: Facts) -> Iterator[Problem]:
    if problems := list(hf_model_is_described(args, facts)):
        yield from problems
    elif facts.directory == Path(args.model) and not any(facts.directory.glob("*.safetensors")):
        hint = "download the weights to this directory"
        if any(facts.directory.glob("*.bin")):
            hint = "convert the weights: load and save the model with transformers' save_pretrained"
        yield f"--model {facts.directory} has no *.safetensors file", hint
    elif is_reward_model(facts.hf_config) and not isinstance(args, RmArgs | ExportArgs):
        problem = f"--model {args.model} is a reward model, which has no output layer for tokens"
        yield problem, "give the model that it was trained from, or use swiftlite megatron rm"


def hf_model_is_described(args: Any, facts: Facts) -> Iterator[Problem]:
    """Require the directory and config.json of a model, but no weights."""
    if not args.model:
        yield (
            "--model is required",
            "give a directory (config.json, safetensors, tokenizer), a model on the hub (ORG/NAME), or a GGUF file",
        )
        return
    path = facts.directory
    if not path.exists():
        yield _absent_model(args.model)
    elif path.is_file():
        hint = "give a directory with config.json, ORG/NAME or a .gguf file"
        if (path.parent / "config.json").is_file():
            hint = f"give its directory: --model {path.parent}"
        yield f"--model {path} is a file", hint
    elif is_run(path) or (is_run(path.parent) and path in run_checkpoints(path.parent)):
        yield (
            f"--model {path} contains megatron-core checkpoints, not a Hugging Face model",
            f"convert it first: swiftlite export --to_hf --model {path} --output_dir DIR",
        )
    elif not (path / "config.json").is_file():
        yield f"--model {path} has no config.json", _GIVE_A_MODEL
    elif not os.access(path / "config.json", os.R_OK):
        yield f"--model {path}: config.json cannot be read", "allow this user to read it"
    elif not facts.hf_config:
        yield (
            f"--model {path}: config.json is not a JSON object with a model's settings",
            "download config.json again",
        )


def _absent_model(model: str) -> Problem:
    hub = "give the directory of a Hugging Face model, or a model on the hub: ORG/NAME"
    if model_name(f"{model}@main"):
        hub = f"for the model {model} on the hub: --model {model}@main"
    return f"--model {model} does not exist", _lower_prefix(model) or near_path(Path(model)) or hub


def _lower_prefix(name: str) -> str:
    """Return the hint for a name with the prefix of ModelScope in capitals; "" for other names."""
    prefix, rest = name[: len(MODELSCOPE)], name[len(MODELSCOPE) :]
    if prefix.lower() != MODELSCOPE or prefix == MODELSCOPE:
        return ""
    return f"for ModelScope, write {MODELSCOPE}{rest}"


def family_takes_the_model(args: Any, facts: Facts) -> Iterator[Problem]:
    """Reject a model that `get_family` rejects, so that a dry run rejects it as well."""
    if not facts.hf_config:
        return  # another rule reports it
    hf_config = dict(facts.hf_config)
    # `drafter_fits_the_model` reports a drafter that config.json does not declare.
    given = ("drafter", "mtp_features", "mtp_graft_from")
    if any(getattr(args, name, None) for name in given):
        hf_config.pop(DRAFTER_KEY, None)
    try:
        get_family(hf_config, facts.directory)
    except UserError as error:
        yield f"--model {args.model}: {error.problem}", error.hint


def file_problems(flag: str, name: str) -> Iterator[Problem]:
    """Yield the reasons why a data file, FILE or FILE#N, cannot be read."""
    if name.startswith(SPEED_BENCH):
        files = prepared_files(name)
        if not files:
            hint = "prepare SPEED-Bench with the script of its dataset card, and give the directory with its files"
            yield f"{flag} {name}: no *.jsonl or *.parquet is in this directory", hint
        for each in files:
            yield from file_problems(flag, each)
        return
    file, sample = split_sample(name)
    path = Path(file)
    dataset = dataset_name(file)
    if file != name and not (is_number_of_rows(sample) and int(sample) > 0):
        yield f"invalid value for {flag}: {name}: # must be followed by a number of rows", f"for example {file}#500"
    if dataset is not None:
        try:
            commit_of_dataset(dataset)
        except UserError as error:
            yield f"{flag} {error.problem}", error.hint
    elif path.is_dir():
        inside = sorted(entry.name for entry in path.iterdir() if data_suffix(entry.name))
        hint = f"give files that end in {', '.join(DATA_SUFFIXES)}"
        if inside:
            hint = f"give files: {flag} {' '.join(str(path / entry) for entry in inside[:3])}"
        yield f"{flag} {file} is a directory", hint
    elif not path.exists():
        hub = f"give a file ({', '.join(DATA_SUFFIXES)}) or a dataset on the hub (ORG/NAME)"
        if dataset_name(f"{file}@main") is not None:
            hub = f"for the dataset {file} on the hub: {flag} {file}@main"
        yield f"{flag} {file} does not exist", _lower_prefix(file) or near_path(path) or hub
    elif not data_suffix(path.name):
        problem = f"{flag} {file} has an unknown extension, not one of {', '.join(DATA_SUFFIXES)}"
        yield problem, "rename it, or convert it to JSON lines"
    elif path.stat().st_size == 0:
        yield f"{flag} {file} is empty", "write one JSON object per line"


def is_address(text: str) -> bool:
    """Return whether a text is the address of a server, http://HOST:PORT."""
    try:
        parts = urlsplit(text)
        parts.port  # noqa: B018 - raises ValueError
    except ValueError:
        return False
    has_host = parts.scheme in ("http", "https") and parts.hostname is not None
    return has_host and not (parts.username or parts.query or parts.fragment)


def output_dir_is_given(args: Any, facts: Facts) -> Iterator[Problem]:
    if not args.output_dir:
        yield "--output_dir is required", "give the directory to write: --output_dir DIR"
        return
    directory = Path(args.output_dir)
    if directory.exists() and not directory.is_dir():
        yield f"--output_dir {args.output_dir} is a file", "give a directory"
        return
    place = next(path for path in (directory, *directory.absolute().parents) if path.exists())
    why = ""
    if not place.is_dir():
        why = "is a file"
    elif not os.access(place, os.W_OK):
        why = "is not writable"
    if why:
        yield f"--output_dir {args.output_dir} cannot be created: {place} {why}", "give a directory that you can write"


def no_heads(facts: Facts) -> str:
    """Return the message that the config.json of --model declares no MTP layer."""
    return f"--model: {facts.directory / 'config.json'} declares no MTP layer ({depth_key(facts.hf_config)})"


def baseline_is_a_model(args: EvaluateArgs | ExportArgs, facts: Facts) -> Iterator[Problem]:
    if args.baseline is not None and not (facts.described("baseline")[0] / "config.json").is_file():
        yield f"--baseline {args.baseline} has no config.json", _GIVE_A_MODEL


def acceptance_json_exists(args: EvaluateArgs | InferArgs, facts: Facts) -> Iterator[Problem]:
    if args.acceptance_json is not None and not Path(args.acceptance_json).is_file():
        yield (
            f"--acceptance_json {args.acceptance_json} does not exist",
            "give the acceptance.json of a training run or a quantized export",
        )


def graft_has_heads(args: SftArgs | ExportArgs, facts: Facts) -> Iterator[Problem]:
    """Require that --mtp_graft_from names a model of the same type whose config.json declares MTP heads."""
    if args.mtp_graft_from is None:
        return
    base, config = facts.described("mtp_graft_from")
    if not base.is_dir():
        yield f"--mtp_graft_from {base} is not a directory", near_path(base) or _GIVE_A_MODEL
    elif not config:
        yield f"--mtp_graft_from {base} has no config.json", _GIVE_A_MODEL
    elif is_published(config) and isinstance(args, SftArgs):
        return  # `drafter_fits_the_model` compares it with --model
    elif (kind := kind_of(config)) != MTP:
        yield f"--mtp_graft_from {base} has the drafter {kind!r} instead of MTP heads", "give a model with MTP heads"
    elif not Heads.from_config(config).layers:
        yield f"--mtp_graft_from {base}: its config.json declares no MTP layer", "give a model with MTP heads"
    elif facts.hf_config and config.get("model_type") != facts.hf_config.get("model_type"):
        yield (
            f"--mtp_graft_from {base} has model_type {config.get('model_type')}, but --model has "
            f"{facts.hf_config.get('model_type')}",
            "heads read the hidden states of their trunk: give the model that --model was fine-tuned from",
        )


def layout_fits(args: Any, facts: Facts) -> Iterator[Problem]:
    layout = layout_of(args)
    if out_of_bounds(layout):
        return  # another rule reports it
    heads = heads_of(args, facts.heads) if isinstance(args, SftArgs) else facts.heads
    yield from layout_problems(layout, facts.architecture, heads.layers)
    yield from process_problems(layout, facts.world_size)


def problems_beside(
    prefix: str, layout: ParallelLayout, architecture: Architecture | None, args: Any, facts: Facts
) -> Iterator[Problem]:
    """Yield the problems of the layout of another model that the layout of the trained model does not have.

    Args:
        prefix: prefix of the options for the sizes of this layout, such as "teacher".
    """
    sizes = [f"{kind}_model_parallel_size" for kind in ("tensor", "pipeline")]
    hint = "use other sizes: " + ", ".join(f"--{prefix}_{size}" for size in sizes)
    own, num_ranks = layout_of(args), len(ranks_of(layout, facts.world_size))
    of_model = [*layout_problems(own, facts.architecture, 0), *process_problems(own, facts.world_size)]
    for problem in (*layout_problems(layout, architecture, 0), *process_problems(layout, num_ranks)):
        if problem in of_model:  # another rule reports those
            continue
        text, _ = problem  # other models have no further options, which the hint may name
        for size in sizes:
            text = text.replace(f"--{size}", f"--{prefix}_{size}")
        yield text, hint


def val_dataset_files_exist(args: SftArgs | InferArgs | ExportArgs | BenchArgs, facts: Facts) -> Iterator[Problem]:
    for name in args.val_dataset:
        yield from file_problems("--val_dataset", name)


def media_root_is_a_directory(args: Any, facts: Facts) -> Iterator[Problem]:
    if args.media_root == "":  # a variable of the shell that is not set
        yield "--media_root is empty", "give the directory of the images, or remove it"
    elif args.media_root is not None and not Path(args.media_root).is_dir():
        yield f"--media_root {args.media_root} is not a directory", "give the directory of the images"


def images_have_a_place_and_a_size(args: Any, facts: Facts) -> Iterator[Problem]:
    yield from media_root_is_a_directory(args, facts)
    if args.min_pixels is not None and args.max_pixels is not None and args.min_pixels > args.max_pixels:
        yield (
            f"--min_pixels {args.min_pixels} exceeds --max_pixels {args.max_pixels}",
            f"use --min_pixels {args.max_pixels} or less",
        )
    sizes = image_sizes(facts.hf_config)
    if sizes is not None and args.max_pixels is not None and args.max_pixels < sizes.group_size**2:
        one_item = sizes.group_size**2
        problem = f"--max_pixels {args.max_pixels} is less than the {one_item} pixels of one image token"
        yield problem, f"use {one_item} or more"


def recompute_options_fit(args: SftArgs, facts: Facts) -> Iterator[Problem]:
    needed_kind = {"moe": "experts", "mla_up_proj": "latent attention"}
    known = ("core_attn", "mlp", *needed_kind)
    architecture = facts.architecture
    for module in args.recompute_modules:
        if module not in known:
            yield f"invalid value for --recompute_modules: {module}", f"use {' or '.join(known)}"
        elif module in needed_kind and architecture and module not in architecture.recompute_modules:
            yield f"--recompute_modules {module}: the model has no {needed_kind[module]}", f"remove {module}"


def gradients_have_the_dtype_of_weights(args: SftArgs, facts: Facts) -> Iterator[Problem]:
    if args.grad_reduce_in_bf16 and args.torch_dtype != "bfloat16":
        yield (
            f"--grad_reduce_in_bf16 true does not support --torch_dtype {args.torch_dtype}",
            "use --torch_dtype bfloat16, or --grad_reduce_in_bf16 false",
        )


def optimizer_is_installed(args: SftArgs, facts: Facts) -> Iterator[Problem]:
    if args.optimizer == "adamw_8bit" and importlib.util.find_spec("torchao") is None:
        yield "--optimizer adamw_8bit requires torchao, which is not installed", "pip install torchao"


def optimizer_has_whole_matrices(args: SftArgs, facts: Facts) -> Iterator[Problem]:
    """megatron-core refuses its own Muon with a distributed optimizer as well (optimizer/muon.py:184 of 0.16.1)."""
    if args.optimizer == "muon" and args.use_distributed_optimizer:
        yield (
            "--optimizer muon does not support --use_distributed_optimizer true, which divides matrices",
            "remove --use_distributed_optimizer, or use --optimizer adamw",
        )


def optimizer_can_be_offloaded(args: SftArgs, facts: Facts) -> Iterator[Problem]:
    if args.optimizer_cpu_offload and args.optimizer != "adamw":
        yield (
            f"--optimizer_cpu_offload true does not support --optimizer {args.optimizer}",
            "use --optimizer adamw, or remove --optimizer_cpu_offload",
        )
    if not args.optimizer_cpu_offload and changed(args, ["optimizer_offload_fraction"]):
        flag = f"--optimizer_offload_fraction {args.optimizer_offload_fraction}"
        yield f"{flag} requires --optimizer_cpu_offload true", "add --optimizer_cpu_offload true"


def changed(args: Any, names: Iterable[str]) -> list[str]:
    """Return the names of the options among `names` whose values differ from their defaults."""
    known = options(type(args), with_unsupported=True)
    return [name for name in names if vars(args)[name] != known[name].default]


def without_effect(args: Any, idle: dict[str, tuple[bool, str]]) -> Iterator[str]:
    """Yield a note for each option that differs from its default and has no effect.

    Args:
        idle: by option name, whether the option has no effect, and the reason.
    """
    values = vars(args)
    known = options(type(args))
    for name, (is_idle, why) in idle.items():
        if is_idle and name in known and values[name] != known[name].default:
            yield f"--{name} {shell_line(values[name])} has no effect: {why}"
