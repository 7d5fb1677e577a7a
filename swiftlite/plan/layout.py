"""Arithmetic on a parallel layout: which rank holds what, and whether it fits a model. Pure; no torch."""

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from swiftlite.args.fields import ParallelLayout

Group = TypeVar("Group")


def layout_of(args: Any) -> ParallelLayout:
    """The layout among a command's options, alone."""
    return group_of(args, ParallelLayout)


def group_of(args: Any, group: type[Group]) -> Group:
    """One group of a command's options, alone."""
    return group(**{field.name: getattr(args, field.name) for field in dataclasses.fields(group)})  # type: ignore[arg-type]


def parse_stages(pipeline_model_parallel_layout: str) -> list[str]:
    """Stages of a layout string with repetitions written out: "Et*2|(t|)*2mL" is ["Ett", "t", "t", "mL"].

    Raises:
        ValueError: a character that stands for nothing, a number that is none of layers.
    """
    text = re.sub(r"[\s,]", "", pipeline_model_parallel_layout)
    for pattern in (r"\(([^()]*)\)\*(\d+)", r"([A-Za-z|])\*(\d+)"):
        if many := re.search(r"\*(\d{5,})", text):
            raise ValueError(f"{many[1]} repetitions are more than any model has layers")
        text = re.sub(pattern, lambda match: match[1] * int(match[2]), text)
    if unknown := sorted(set(text) - set("EtmL|")):
        raise ValueError(f"{unknown[0]!r} stands for nothing; known are E, t, m, L, |, brackets and *N")
    return text.split("|")


def num_virtual_stages(layout: ParallelLayout) -> int | None:
    """Virtual stages per pipeline rank as megatron-core counts them: None without interleaving."""
    number = layout.num_virtual_stages_per_pipeline_rank or 1
    if layout.pipeline_model_parallel_layout:
        number = len(parse_stages(layout.pipeline_model_parallel_layout)) // layout.pipeline_model_parallel_size
    return number if number > 1 else None


def mtp_pipeline_rank(layout: ParallelLayout) -> int:
    """The pipeline rank that computes the MTP layers: the last one, unless the layout string says otherwise."""
    size = layout.pipeline_model_parallel_size
    if layout.pipeline_model_parallel_layout:
        for number, stage in enumerate(parse_stages(layout.pipeline_model_parallel_layout)):
            if "m" in stage:
                return number % size
    return size - 1


def data_parallel_size(layout: ParallelLayout, world_size: int) -> int:
    """Replicas of the model, when `process_problems` has found nothing."""
    return world_size // _product(_MODEL_SIZES, layout)


def process_problems(layout: ParallelLayout, world_size: int) -> list[tuple[str, str]]:
    """Why the processes do not divide into replicas, or into groups that share experts: (problem, hint) each."""
    problems = []
    for names in (_MODEL_SIZES, _EXPERT_SIZES):
        size = _product(names, layout)
        if world_size % size:
            flags = [f"--{name} {getattr(layout, name)}" for name in names if getattr(layout, name) > 1]
            total = f" = {size}" if len(flags) > 1 else ""
            problems.append(
                (
                    f"{' x '.join(flags)}{total} does not divide the number of processes, {world_size}",
                    f"start {size} processes, or a multiple: NPROC_PER_NODE={size} swiftlite ...",
                )
            )
    return problems


_MODEL_SIZES = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
_EXPERT_SIZES = ("expert_tensor_parallel_size", "expert_model_parallel_size", "pipeline_model_parallel_size")


def _product(names: Sequence[str], layout: ParallelLayout) -> int:
    return math.prod(getattr(layout, name) for name in names)


def length_multiple(layout: ParallelLayout) -> int:
    """What the length of a row must be a multiple of, so that every rank gets an equal part."""
    return sequence_multiple(layout) * (layout.tensor_model_parallel_size if layout.sequence_parallel else 1)


def sequence_multiple(layout: ParallelLayout) -> int:
    """What the length of a sequence in a packed row must be a multiple of: context-parallel ranks hold two chunks of
    each."""
    return 2 * layout.context_parallel_size if layout.context_parallel_size > 1 else 1


def decoder_layers_per_stage(layout: ParallelLayout, num_layers: int) -> list[int]:
    """Decoder layers of each stage, virtual stages counted, in the order in which a row passes them.

    Raises:
        ValueError: they cannot be shared so; in the user's words.
    """
    pp, vpp = layout.pipeline_model_parallel_size, num_virtual_stages(layout) or 1
    if layout.pipeline_model_parallel_layout:
        return [stage.count("t") for stage in parse_stages(layout.pipeline_model_parallel_layout)]
    first, last = layout.decoder_first_pipeline_num_layers, layout.decoder_last_pipeline_num_layers
    # Layers of each pipeline rank; ranks with a number of their own are taken out of the even share.
    own = ({} if first is None else {0: first}) | ({} if last is None else {pp - 1: last})
    rest, ranks = num_layers - sum(own.values()), pp - len(own)
    if rest < 0 or (rest % ranks if ranks else rest):
        stated = f" beside {' and '.join(map(str, own.values()))}" if own else ""
        raise ValueError(f"{rest} decoder layers{stated} do not divide over {ranks} pipeline ranks")
    per_rank = [own.get(rank, rest // max(ranks, 1)) for rank in range(pp)]
    if odd := [count for count in per_rank if count % vpp]:
        raise ValueError(f"{odd[0]} decoder layers of a pipeline rank do not divide into {vpp} virtual stages")
    return [per_rank[rank] // vpp for _ in range(vpp) for rank in range(pp)]


def layout_problems(layout: ParallelLayout, hf_config: Mapping[str, Any], mtp_num_layers: int) -> list[tuple[str, str]]:
    """Why this model cannot be laid out so: (problem, hint) each.

    Args:
        hf_config: config.json; keys that it lacks are not looked at.
    """
    return [
        *_tensor_problems(layout, hf_config),
        *_pipeline_problems(layout, hf_config, mtp_num_layers),
        *_expert_problems(layout, hf_config),
    ]


def _tensor_problems(layout: ParallelLayout, hf_config: Mapping[str, Any]) -> list[tuple[str, str]]:
    problems = []
    size = layout.tensor_model_parallel_size
    # A latent attention has one key and value for all its heads before they are made.
    groups = "q_lora_rank" if hf_config.get("kv_lora_rank") else "num_key_value_heads"
    counts = {key: hf_config.get(key) for key in ("num_attention_heads", groups, "intermediate_size", "vocab_size")}
    if isinstance(rank := hf_config.get("kv_lora_rank"), int):
        counts["kv_lora_rank + qk_rope_head_dim"] = rank + hf_config.get("qk_rope_head_dim", 0)
    for key, count in counts.items():
        if isinstance(count, int) and count % size:
            possible = [str(number) for number in range(1, size) if count % number == 0]
            problems.append(
                (
                    f"--tensor_model_parallel_size {size} does not divide the model's {key}, {count}",
                    f"use {choices(possible)}",
                )
            )
    if layout.sequence_parallel and size == 1:
        problems.append(
            (
                "--sequence_parallel true with --tensor_model_parallel_size 1 has no ranks to share a row",
                "leave it out, or raise --tensor_model_parallel_size",
            )
        )
    needs = [
        name
        for name, key in (("experts", num_experts(hf_config)), ("latent attention", "kv_lora_rank"))
        if (key if isinstance(key, int) else hf_config.get(key))
    ]
    if size > 1 and needs and not layout.sequence_parallel:
        problems.append(
            (
                f"--tensor_model_parallel_size {size} of a model with {needs[0]} needs sequence parallelism",
                "add --sequence_parallel true",
            )
        )
    return problems


def num_experts(hf_config: Mapping[str, Any]) -> int:
    """Routed experts of a layer; 0 in a dense model. Qwen3's config.json has one key on the hub, another from
    transformers 5."""
    keys = ("num_experts", "num_local_experts", "n_routed_experts")
    return next((n for key in keys if isinstance(n := hf_config.get(key), int)), 0)


def _pipeline_problems(
    layout: ParallelLayout, hf_config: Mapping[str, Any], mtp_num_layers: int
) -> list[tuple[str, str]]:
    pp, text = layout.pipeline_model_parallel_size, layout.pipeline_model_parallel_layout
    num_layers = hf_config.get("num_hidden_layers")
    own = [name for name in ("first", "last") if getattr(layout, f"decoder_{name}_pipeline_num_layers") is not None]
    if text is None:
        if pp == 1 and (own or (layout.num_virtual_stages_per_pipeline_rank or 1) > 1):
            flag = f"--decoder_{own[0]}_pipeline_num_layers" if own else "--num_virtual_stages_per_pipeline_rank"
            return [(f"{flag} has no pipeline to cut", "add --pipeline_model_parallel_size 2 or more, or leave it out")]
        if isinstance(num_layers, int):
            try:
                decoder_layers_per_stage(layout, num_layers)
            except ValueError as error:
                hint = "change --pipeline_model_parallel_size, or say who holds what: --pipeline_model_parallel_layout"
                return [(str(error), hint)]
        return []

    flag = f"--pipeline_model_parallel_layout {text}"
    if own or layout.num_virtual_stages_per_pipeline_rank:
        other = f"decoder_{own[0]}_pipeline_num_layers" if own else "num_virtual_stages_per_pipeline_rank"
        return [(f"{flag} says all about the stages, --{other} too", f"leave --{other} out")]
    example = "for example Et*2|t*2mL for 4 layers and one head on 2 ranks"
    try:
        stages = parse_stages(text)
    except ValueError as error:
        return [(f"{flag}: {error}", example)]
    problems = []
    if pp == 1 and len(stages) > 1:
        return [
            (
                f"{flag} has {len(stages)} stages, but --pipeline_model_parallel_size is 1",
                f"add --pipeline_model_parallel_size {len(stages)}",
            )
        ]
    if len(stages) % pp:
        problems.append(
            (
                f"{flag} has {len(stages)} stages, no multiple of --pipeline_model_parallel_size {pp}",
                "write one stage per pipeline rank, or two, or three",
            )
        )
        return problems
    whole = "".join(stages)
    counts = {letter: whole.count(letter) for letter in "EtmL"}
    wanted = {"E": 1, "t": num_layers if isinstance(num_layers, int) else counts["t"], "m": mtp_num_layers, "L": 1}
    names = {"E": "embedding", "t": "decoder layer", "m": "MTP layer", "L": "loss"}
    for letter, count in counts.items():
        if count != wanted[letter]:
            problems.append(
                (f"{flag} has {count} of {letter} ({names[letter]}), the run has {wanted[letter]}", example)
            )
    if not problems and not re.fullmatch("Et*m*L", whole):
        problems.append((f"{flag}: the order is E, then every t, then every m, then L", example))
    with_mtp = [number for number, stage in enumerate(stages) if "m" in stage]
    if len(with_mtp) > 1:
        problems.append((f"{flag} spreads the MTP layers over {len(with_mtp)} stages", "put all m on one stage"))
    elif with_mtp and with_mtp[0] < len(stages) - pp:
        problems.append(
            (
                f"{flag}: megatron-core computes MTP layers only on the last virtual stage of a rank",
                "put m on one of the last stages",
            )
        )
    elif with_mtp and pp > 1 and with_mtp[0] % pp == 0:
        problems.append(
            (
                f"{flag}: the MTP layers stand on the first pipeline rank, which would then hold two embeddings that "
                "nothing keeps equal",
                "put m on another rank's stage",
            )
        )
    return problems


def _expert_problems(layout: ParallelLayout, hf_config: Mapping[str, Any]) -> list[tuple[str, str]]:
    ep, etp, experts = layout.expert_model_parallel_size, layout.expert_tensor_parallel_size, num_experts(hf_config)
    if ep * etp == 1 or not hf_config:
        return []
    if not experts:
        flag = "expert_model_parallel_size" if ep > 1 else "expert_tensor_parallel_size"
        return [(f"--{flag} {max(ep, etp)}, but the model has no experts", "leave it out")]
    problems = []
    if experts % ep:
        possible = [str(number) for number in range(1, ep) if experts % number == 0]
        problems.append(
            (
                f"--expert_model_parallel_size {ep} does not divide the model's {experts} experts",
                f"use {choices(possible)}",
            )
        )
    size = hf_config.get("moe_intermediate_size")
    if isinstance(size, int) and size % etp:
        problems.append((f"--expert_tensor_parallel_size {etp} does not divide moe_intermediate_size, {size}", ""))
    return problems


def choices(words: list[str]) -> str:
    """`a, b or c`."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"
