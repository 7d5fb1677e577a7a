"""Compute which rank holds which part of a model, and check a parallel layout. This module does not import torch.

The kinds of layers define which of their dimensions ranks split (`families/layer.py`).
"""

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

from swiftlite.args.config import Problem
from swiftlite.args.fields import ParallelLayout
from swiftlite.families.architecture import Architecture

Group = TypeVar("Group")


def layout_of(args: Any) -> ParallelLayout:
    """Return the options of a command for the parallel layout."""
    return group_of(args, ParallelLayout)


def group_of(args: Any, group: type[Group]) -> Group:
    """Return one option group of a command."""
    return group(**{field.name: getattr(args, field.name) for field in dataclasses.fields(group)})  # type: ignore[arg-type]


def parse_stages(pipeline_model_parallel_layout: str) -> list[str]:
    """Return the stages of a layout string with repetitions expanded: "Et*2|(t|)*2mL" is ["Ett", "t", "t", "mL"].

    Raises:
        ValueError: unknown character, or a repetition count that is too large.
    """
    text = re.sub(r"[\s,]", "", pipeline_model_parallel_layout)
    for pattern in (r"\(([^()]*)\)\*(\d+)", r"([A-Za-z|])\*(\d+)"):
        if many := re.search(r"\*(\d{5,})", text):
            raise ValueError(f"{many[1]} repetitions exceed the layers of any model")
        text = re.sub(pattern, lambda match: match[1] * int(match[2]), text)
    if unknown := sorted(set(text) - set("EtmL|")):
        raise ValueError(f"unknown character {unknown[0]!r}; known are E, t, m, L, |, brackets and *N")
    return text.split("|")


def num_virtual_stages(layout: ParallelLayout) -> int | None:
    """Return the number of virtual stages per pipeline rank as megatron-core requires it: None without interleaving."""
    number = layout.num_virtual_stages_per_pipeline_rank or 1
    if layout.pipeline_model_parallel_layout:
        number = len(parse_stages(layout.pipeline_model_parallel_layout)) // layout.pipeline_model_parallel_size
    if number == 1:
        return None
    return number


def mtp_pipeline_rank(layout: ParallelLayout) -> int:
    """Return the pipeline rank of the MTP layers.

    This is the last rank, unless the layout string assigns them elsewhere.
    """
    size = layout.pipeline_model_parallel_size
    if layout.pipeline_model_parallel_layout:
        for number, stage in enumerate(parse_stages(layout.pipeline_model_parallel_layout)):
            if "m" in stage:
                return number % size
    return size - 1


def mtp_is_with_last_layer(layout: ParallelLayout) -> bool:
    """Return whether the stage of the MTP layers also has decoder layers."""
    return _mtp_is_with("t", layout)


def mtp_is_with_losses(layout: ParallelLayout) -> bool:
    """Return whether the stage of the MTP layers computes the losses."""
    return _mtp_is_with("L", layout)


def _mtp_is_with(part: str, layout: ParallelLayout) -> bool:
    """Return whether the stage of the MTP layers also has this part of a layout string, such as "L" for the losses.

    Only a layout string can separate them. True for an invalid string, which `layout_problems` reports.
    """
    try:
        stages = parse_stages(layout.pipeline_model_parallel_layout or "")
    except ValueError:
        return True
    return all(part in stage for stage in stages if "m" in stage)


def data_parallel_size(layout: ParallelLayout, world_size: int) -> int:
    """Return the number of replicas of the model. `process_problems` must have returned no problem."""
    return world_size // _product(_MODEL_SIZES, layout)


def ranks_with_same_parameters(layout: ParallelLayout, world_size: int) -> tuple[int, int]:
    """Return the number of ranks that hold the same parameters, and the number that hold the same experts.

    `process_problems` must have returned no problem.
    """
    dense = data_parallel_size(layout, world_size) * layout.context_parallel_size
    return dense, world_size // _product(_EXPERT_SIZES, layout)


def instances_problems(layout: ParallelLayout, world_size: int, num_instances: int) -> list[Problem]:
    """Return a problem if the distributed optimizer cannot have this number of instances.

    Each instance shards the optimizer state over an equal part of the ranks that hold the same parameters.
    `process_problems` must have returned no problem.
    """
    dense, experts = ranks_with_same_parameters(layout, world_size)
    both = math.gcd(dense, experts)
    if both % num_instances == 0:
        return []
    divided = f"the number of ranks with the same parameters, {dense}"
    if dense % num_instances == 0:
        divided = f"the number of ranks with the same experts, {experts}"
    problem = f"--num_distributed_optimizer_instances {num_instances} does not divide {divided}"
    return [(problem, _divisors_to_use(both, both + 1))]


def smallest_world_size(layout: ParallelLayout) -> int:
    """Return the minimum number of processes of a layout, of which every other number is a multiple."""
    return math.lcm(_product(_MODEL_SIZES, layout), _product(_EXPERT_SIZES, layout))


def layout_beside(
    trained: ParallelLayout, tensor: int | None, pipeline: int | None, architecture: Architecture | None = None
) -> ParallelLayout:
    """Return the layout of another model in the job: that of the trained model with other sizes and equal stages.

    If only the other model uses tensor parallelism, it also uses sequence parallelism, which experts require.

    Args:
        tensor, pipeline: tensor- and pipeline-parallel size; None for that of the trained model.
        architecture: that of the other model, if known. Without experts it has no expert parallelism.
    """
    tp = tensor or trained.tensor_model_parallel_size
    has_experts = architecture is None or architecture.has_experts
    return ParallelLayout(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pipeline or trained.pipeline_model_parallel_size,
        context_parallel_size=trained.context_parallel_size,
        expert_model_parallel_size=trained.expert_model_parallel_size if has_experts else 1,
        expert_tensor_parallel_size=trained.expert_tensor_parallel_size if has_experts else 1,
        sequence_parallel=tp > 1 and (trained.sequence_parallel or trained.tensor_model_parallel_size == 1),
    )


def ranks_of(layout: ParallelLayout, world_size: int) -> range:
    """Return the ranks of a job that a layout can use: for a tensor-parallel size of 2, ranks 0 and 1 of 3.

    If the layout requires more ranks, which `process_problems` reports, all ranks are returned.
    """
    return range(world_size - world_size % smallest_world_size(layout) or world_size)


def process_problems(layout: ParallelLayout, world_size: int) -> list[Problem]:
    """Return problems (problem, hint) if the number of processes does not match replicas or expert-parallel groups."""
    problems = []
    for names in (_MODEL_SIZES, _EXPERT_SIZES):
        size = _product(names, layout)
        if world_size % size:
            flags = [f"--{name} {getattr(layout, name)}" for name in names if getattr(layout, name) > 1]
            product = " x ".join(flags)
            if len(flags) > 1:
                product += f" = {size}"
            problem = f"{product} does not divide the number of processes, {world_size}"
            problems.append((problem, f"start {size} processes, or a multiple: NPROC_PER_NODE={size} swiftlite ..."))
    return list(dict.fromkeys(problems))  # without tensor and expert parallelism, both products are the same


_MODEL_SIZES = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
_EXPERT_SIZES = ("expert_tensor_parallel_size", "expert_model_parallel_size", "pipeline_model_parallel_size")


def _product(names: Sequence[str], layout: ParallelLayout) -> int:
    return math.prod(getattr(layout, name) for name in names)


def length_multiple(layout: ParallelLayout) -> int:
    """Return the number by which the length of a row must be divisible, so that all ranks have equal parts."""
    return sequence_multiple(layout) * sequence_parallel_size(layout)


def sequence_parallel_size(layout: ParallelLayout) -> int:
    """Return the number of ranks that split rows by sequence parallelism; 1 without it."""
    if not layout.sequence_parallel:
        return 1
    return layout.tensor_model_parallel_size


def sequence_multiple(layout: ParallelLayout) -> int:
    """Return the number by which the length of a sequence in a packed row must be divisible.

    Each context-parallel rank holds two chunks of each sequence.
    """
    if layout.context_parallel_size == 1:
        return 1
    return 2 * layout.context_parallel_size


def decoder_layers_per_stage(layout: ParallelLayout, num_layers: int) -> list[int]:
    """Return the number of decoder layers of each (virtual) stage, in the order of the forward pass.

    Example: 24 layers on 4 pipeline ranks with 2 virtual stages each give [3, 3, 3, 3, 3, 3, 3, 3]; the first rank
    computes stages 0 and 4. On 4 ranks without virtual stages, --decoder_first_pipeline_num_layers 3 gives
    [3, 7, 7, 7].

    Raises:
        ValueError: the layers cannot be divided evenly; the message is for users.
    """
    if layout.pipeline_model_parallel_layout:
        return [stage.count("t") for stage in parse_stages(layout.pipeline_model_parallel_layout)]
    per_rank = _decoder_layers_per_rank(layout, num_layers)
    virtual_stages = num_virtual_stages(layout) or 1
    for count in per_rank:
        if count % virtual_stages:
            raise ValueError(
                f"{count} decoder layers of a pipeline rank are not divisible by {virtual_stages} virtual stages"
            )
    return [count // virtual_stages for count in per_rank] * virtual_stages


def states_sent(
    layout: ParallelLayout,
    num_layers: int,
    num_drafts: int,
    heads_take_before_norm: bool = False,
    features: Sequence[int] = (),
) -> list[int]:
    """Count the states that each stage except the last sends to the next stage (`model.stage_states.StageStates`).

    Example: Et*2|t*2|m|L with one head that reads the state before the final norm gives [1, 2, 2].

    Args:
        num_drafts: number of drafts of the heads; 0 without heads.
        features: numbers of the decoder layers whose inputs the drafter reads (`Heads.features`).
    """
    per_stage = decoder_layers_per_stage(layout, num_layers)
    heads_stage = _heads_stage(layout, len(per_stage))
    sent = []
    for stage in range(len(per_stage) - 1):
        has_norm = not any(per_stage[stage + 1 :])
        number = 1
        if num_drafts and stage >= heads_stage:
            number += num_drafts
        elif num_drafts:
            number += heads_take_before_norm and has_norm
            number += sum(layer < sum(per_stage[: stage + 1]) for layer in features)
        sent.append(number)
    return sent


def tower_outputs_sent(layout: ParallelLayout, num_layers: int, num_drafts: int, num_deepstack: int) -> list[int]:
    """Count the outputs of a tower for one item that each stage except the last sends to the next stage.

    Heads read the first output of an item, and the decoder layers with deepstack read the others.

    Example: with Et|t*3|m|L and one head, the stages send [1, 1, 0]; with deepstack for two layers [3, 1, 0].

    Args:
        num_drafts: number of drafts of the heads; 0 without heads.
        num_deepstack: number of the first decoder layers that read outputs.
    """
    per_stage = decoder_layers_per_stage(layout, num_layers)
    heads_stage = _heads_stage(layout, len(per_stage))
    sent = []
    for stage in range(len(per_stage) - 1):
        number = 0
        if sum(per_stage[: stage + 1]) < num_deepstack:
            number = 1 + num_deepstack
        elif num_drafts and stage < heads_stage:
            number = 1
        sent.append(number)
    return sent


def _heads_stage(layout: ParallelLayout, num_stages: int) -> int:
    """Return the (virtual) stage of the heads, in the order of the forward pass."""
    return num_stages - layout.pipeline_model_parallel_size + mtp_pipeline_rank(layout)


def length_divisor(layout: ParallelLayout) -> int:
    """Return the number of parts into which ranks split the hidden states of a row between two layers."""
    return layout.context_parallel_size * sequence_parallel_size(layout)


def _decoder_layers_per_rank(layout: ParallelLayout, num_layers: int) -> list[int]:
    """Return the number of decoder layers of each pipeline rank.

    Options may set the number of layers on the first and on the last rank; the other ranks share the rest evenly.
    """
    num_ranks = layout.pipeline_model_parallel_size
    stated: dict[int, int] = {}
    if layout.decoder_first_pipeline_num_layers is not None:
        stated[0] = layout.decoder_first_pipeline_num_layers
    if layout.decoder_last_pipeline_num_layers is not None:
        stated[num_ranks - 1] = layout.decoder_last_pipeline_num_layers
    rest, sharing = num_layers - sum(stated.values()), num_ranks - len(stated)
    is_even = rest == 0
    if sharing:
        is_even = rest % sharing == 0
    if rest < 0 or not is_even:
        layers = f"{num_layers} decoder layers"
        if stated:
            layers += f" without {' and '.join(map(str, stated.values()))}, {rest},"
        raise ValueError(f"{layers} are not divisible by {sharing} pipeline ranks")
    share = rest // max(sharing, 1)
    return [stated.get(rank, share) for rank in range(num_ranks)]


def layout_problems(layout: ParallelLayout, architecture: Architecture | None, mtp_num_layers: int) -> list[Problem]:
    """Return the problems (problem, hint) of a layout for a model.

    Args:
        architecture: None for an unknown model; then only the layout itself is checked.
    """
    return [
        *_tensor_problems(layout, architecture),
        *_pipeline_problems(layout, architecture, mtp_num_layers),
        *_expert_problems(layout, architecture),
        *_context_problems(layout, architecture),
        *_shared_norm_problems(layout, architecture, mtp_num_layers),
        *_own_output_problems(layout, architecture, mtp_num_layers),
    ]


def _shared_norm_problems(
    layout: ParallelLayout, architecture: Architecture | None, mtp_num_layers: int
) -> Iterator[Problem]:
    if architecture is None or not mtp_num_layers or not architecture.outside.heads_share_final_norm:
        return
    if not mtp_is_with_last_layer(layout):
        problem = f"--pipeline_model_parallel_layout {layout.pipeline_model_parallel_layout}: the heads of this model"
        yield f"{problem} share the trunk's final norm", "put m on the stage of the last t, for example Et*2|t*2mL"


def _own_output_problems(
    layout: ParallelLayout, architecture: Architecture | None, mtp_num_layers: int
) -> Iterator[Problem]:
    if architecture is None or not mtp_num_layers or not architecture.outside.heads_have_output_layers:
        return
    if not mtp_is_with_losses(layout):
        problem = f"--pipeline_model_parallel_layout {layout.pipeline_model_parallel_layout}: each head of this model"
        yield f"{problem} has an output layer, whose loss is on the last stage", "put m on the stage of L"


def _context_problems(layout: ParallelLayout, architecture: Architecture | None) -> Iterator[Problem]:
    if layout.context_parallel_size == 1 or architecture is None:
        return
    if not all(attention.takes_parts_of_rows for attention in architecture.attentions):
        problem = f"--context_parallel_size {layout.context_parallel_size} is not supported by every attention layer"
        yield f"{problem} of this model", "use --context_parallel_size 1"


def _tensor_problems(layout: ParallelLayout, architecture: Architecture | None) -> list[Problem]:
    problems = []
    size = layout.tensor_model_parallel_size
    split: list[tuple[str, int]] = []
    if architecture:
        split = _tensor_split(architecture)
    for name, count in split:
        if count % size:
            problem = f"--tensor_model_parallel_size {size} does not divide the model's {name}, {count}"
            problems.append((problem, _divisors_to_use(count, size)))
    if layout.sequence_parallel and size == 1:
        problem = "--sequence_parallel true requires --tensor_model_parallel_size 2 or more, not 1"
        problems.append((problem, "remove it, or increase --tensor_model_parallel_size"))
    if architecture and size > 1 and not layout.sequence_parallel:
        needs = sorted({part.needs_sequence_parallel for part in architecture.sublayers} - {""})
        if needs:
            problem = f"--tensor_model_parallel_size {size} requires --sequence_parallel true for {needs[0]}"
            problems.append((problem, "add --sequence_parallel true"))
    return problems


def _tensor_split(architecture: Architecture) -> list[tuple[str, int]]:
    """Return the sizes that tensor parallelism divides, as (name in config.json, number) without duplicates."""
    split: list[tuple[str, int]] = []
    for part in architecture.sublayers:
        split += part.tensor_split.items()
    split.append(("vocab_size", architecture.outside.vocab))
    return list(dict.fromkeys(split))


def _divisors_to_use(count: int, size: int) -> str:
    """Return a hint with the numbers that divide `count`: those below `size`, and the next larger one."""
    divisors = [number for number in range(1, count + 1) if count % number == 0]
    smaller = [number for number in divisors if number < size]
    larger = divisors[len(smaller) : len(smaller) + 1]
    return f"use {choices([str(number) for number in smaller + larger])}"


def _pipeline_problems(layout: ParallelLayout, architecture: Architecture | None, mtp_num_layers: int) -> list[Problem]:
    if layout.pipeline_model_parallel_layout is None:
        return _even_pipeline_problems(layout, architecture)
    flag = f"--pipeline_model_parallel_layout {layout.pipeline_model_parallel_layout}"
    other = _other_pipeline_flag(layout)
    if other:
        return [(f"{flag} cannot be combined with --{other}", f"remove --{other}")]
    try:
        stages = parse_stages(layout.pipeline_model_parallel_layout)
    except ValueError as error:
        return [(f"{flag}: {error}", _EXAMPLE)]
    pp = layout.pipeline_model_parallel_size
    if pp == 1 and len(stages) > 1:
        problem = f"{flag} has {len(stages)} stages, but --pipeline_model_parallel_size is 1"
        return [(problem, f"add --pipeline_model_parallel_size {len(stages)}")]
    if len(stages) % pp:
        problem = f"{flag} has {len(stages)} stages, not a multiple of --pipeline_model_parallel_size {pp}"
        return [(problem, "write the same number of stages for each pipeline rank")]
    wanted = {"E": 1, "m": mtp_num_layers, "L": 1}
    if architecture:
        wanted["t"] = architecture.outside.num_layers
    return [*_letter_problems(flag, stages, wanted), *_mtp_stage_problems(flag, stages, pp)]


_EXAMPLE = "for example Et*2|t*2mL for 4 layers and one head on 2 ranks"


def _other_pipeline_flag(layout: ParallelLayout) -> str:
    """Return the first option except the layout string that distributes layers and is set; empty if none is set."""
    if layout.decoder_first_pipeline_num_layers is not None:
        return "decoder_first_pipeline_num_layers"
    if layout.decoder_last_pipeline_num_layers is not None:
        return "decoder_last_pipeline_num_layers"
    if layout.num_virtual_stages_per_pipeline_rank:
        return "num_virtual_stages_per_pipeline_rank"
    return ""


def _even_pipeline_problems(layout: ParallelLayout, architecture: Architecture | None) -> list[Problem]:
    """Return the problems of a pipeline without a layout string."""
    flag, virtual_stages = _other_pipeline_flag(layout), layout.num_virtual_stages_per_pipeline_rank
    means_nothing = flag == "num_virtual_stages_per_pipeline_rank" and virtual_stages == 1
    if layout.pipeline_model_parallel_size == 1 and flag and not means_nothing:
        hint = "add --pipeline_model_parallel_size 2 or more, or remove it"
        return [(f"--{flag} requires --pipeline_model_parallel_size 2 or more", hint)]
    if architecture is None:
        return []
    try:
        decoder_layers_per_stage(layout, architecture.outside.num_layers)
    except ValueError as error:
        problem = f"--pipeline_model_parallel_size {layout.pipeline_model_parallel_size}: {error}"
        return [(problem, "change it, or distribute the layers with --pipeline_model_parallel_layout")]
    return []


def _letter_problems(flag: str, stages: Sequence[str], wanted: Mapping[str, int]) -> list[Problem]:
    """Return a problem if a letter occurs more or less often in a layout string than `wanted`, or at the wrong
    position.
    """
    names = {"E": "embedding", "t": "decoder layer", "m": "MTP layer", "L": "loss"}
    whole = "".join(stages)
    problems = []
    for letter, name in names.items():
        count = whole.count(letter)
        if count != wanted.get(letter, count):
            problems.append((f"{flag} has {count} of {letter} ({name}), but the run has {wanted[letter]}", _EXAMPLE))
    if not problems and not re.fullmatch("Et*m*L", whole):
        problems.append((f"{flag}: the order must be E, then all t, then all m, then L", _EXAMPLE))
    return problems


def _mtp_stage_problems(flag: str, stages: Sequence[str], pp: int) -> list[Problem]:
    """Report a layout string that assigns the MTP layers to an unsupported stage."""
    with_mtp = [number for number, stage in enumerate(stages) if "m" in stage]
    if not with_mtp:
        return []
    if len(with_mtp) > 1:
        return [(f"{flag} has MTP layers on {len(with_mtp)} stages", "put all m on one stage")]
    if with_mtp[0] < len(stages) - pp:
        problem = f"{flag}: megatron-core supports MTP layers only on the last virtual stage of a rank"
        return [(problem, "put m on one of the last stages")]
    if pp > 1 and with_mtp[0] % pp == 0:
        problem = f"{flag}: MTP layers on the first pipeline rank are not supported: two embeddings could diverge"
        return [(problem, "put m on a stage of another rank")]
    return []


def _expert_problems(layout: ParallelLayout, architecture: Architecture | None) -> list[Problem]:
    ep, etp = layout.expert_model_parallel_size, layout.expert_tensor_parallel_size
    if ep * etp == 1 or architecture is None:
        return []
    if not architecture.has_experts:
        flag = f"--expert_tensor_parallel_size {etp}"
        if ep > 1:
            flag = f"--expert_model_parallel_size {ep}"
        return [(f"{flag} requires experts, which the model does not have", "remove it")]
    problems: list[Problem] = []
    for layer in architecture.layers:
        experts = layer.mlp.experts
        if experts % ep:
            problem = f"--expert_model_parallel_size {ep} does not divide the model's {experts} experts"
            problems.append((problem, _divisors_to_use(experts, ep)))
        if etp > 1 and layer.mlp.experts and not layer.mlp.splits_experts:
            problem = f"--expert_tensor_parallel_size {etp} is not supported for experts with biases"
            problems.append((problem, "use --expert_tensor_parallel_size 1"))
        for name, count in layer.mlp.expert_split.items():
            if count % etp:
                problem = f"--expert_tensor_parallel_size {etp} does not divide {name}, {count}"
                problems.append((problem, _divisors_to_use(count, etp)))
    return list(dict.fromkeys(problems))


def choices(words: list[str]) -> str:
    """Join words as in `a, b or c`."""
    *others, last = words
    if not others:
        return last
    return f"{', '.join(others)} or {last}"
