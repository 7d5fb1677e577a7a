"""Search the parallel layouts of a model on some GPUs, fastest first by `speed.py` (`doctor --plan --gpu_type`).

A candidate consists of the user's options with values for unset ones, so that it can be used as a command line.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import Any

from swiftlite.args.commands import DoctorArgs
from swiftlite.args.fields import OptimArgs
from swiftlite.estimate.gpus import Gpu
from swiftlite.estimate.memory import largest, usable_bytes
from swiftlite.estimate.setup import is_possible, planned_setup
from swiftlite.estimate.speed import Step
from swiftlite.families.architecture import Architecture
from swiftlite.families.family import HfConfig
from swiftlite.families.index import architecture_of
from swiftlite.plan.layout import (
    data_parallel_size,
    layout_of,
    num_virtual_stages,
    process_problems,
)

_ROWS = [1, 2, 4, 8]
"""Rows of a micro-batch; more make no product faster."""
_VIRTUAL_STAGES = [2, 3, 4, 6, 8]
DOUBLINGS = 7
"""How often the number of GPUs is doubled where nothing fits."""
_DEFAULTS = DoctorArgs()


@dataclasses.dataclass(frozen=True)
class Candidate:
    """Options of a plan with all of the layout settled, and the step they make."""

    args: DoctorArgs
    step: Step

    @property
    def bytes(self) -> int:
        """Memory that the fullest rank needs."""
        return largest(self.step.memory).total


def global_batch_size(args: DoctorArgs) -> int:
    """Return the options as for megatron sft."""
    return args.global_batch_size or OptimArgs().global_batch_size


def ranked(args: DoctorArgs, hf_config: HfConfig, gpu: Gpu, gpu_memory_gb: float) -> list[Candidate]:
    """Layouts that the model and the global batch allow and that fit into memory, the fastest first."""
    found = list(_fitting(args, hf_config, gpu, gpu_memory_gb))
    return sorted(found, key=lambda candidate: -candidate.step.tokens_per_second)


def larger(args: DoctorArgs, hf_config: HfConfig, gpu: Gpu, gpu_memory_gb: float) -> DoctorArgs | None:
    """Search with twice, four times ... as many GPUs and rows until a layout fits; None if none does."""
    assert args.num_gpus is not None
    for doublings in range(1, DOUBLINGS + 1):
        batch = global_batch_size(args) << doublings
        more = dataclasses.replace(args, num_gpus=args.num_gpus << doublings, global_batch_size=batch)
        if any(True for _ in _fitting(more, hf_config, gpu, gpu_memory_gb)):
            return more
    return None


def _fitting(args: DoctorArgs, hf_config: HfConfig, gpu: Gpu, gpu_memory_gb: float) -> Iterator[Candidate]:
    """Layouts that fit, each with as little recomputation as it can do with."""
    architecture, usable = architecture_of(hf_config), usable_bytes(gpu_memory_gb)
    for settled in _layouts(args, hf_config, gpu):
        for with_recompute in _recomputing(settled, architecture):
            setup = planned_setup(with_recompute, hf_config)
            candidate = Candidate(with_recompute, Step(architecture, setup, gpu, global_batch_size(args)))
            if candidate.bytes <= usable:
                yield candidate
                break


def has_layout(args: DoctorArgs, hf_config: HfConfig, gpu: Gpu) -> bool:
    """Whether the model and the global batch allow one, which may need more memory than there is."""
    return any(True for _ in _layouts(args, hf_config, gpu))


def _layouts(args: DoctorArgs, hf_config: HfConfig, gpu: Gpu) -> Iterator[DoctorArgs]:
    """Layouts that the model and the global batch allow, whether they fit or not; what the user gave stays."""
    architecture, setup = architecture_of(hf_config), planned_setup(args, hf_config)
    assert args.num_gpus is not None  # a rule says so
    powers = [1 << exponent for exponent in range(args.num_gpus.bit_length())]
    takes_parts = all(attention.takes_parts_of_rows for attention in architecture.attentions)
    choices: dict[str, list[Any]] = {
        # Beyond the link tensor parallelism is never the faster one.
        "tensor_model_parallel_size": [size for size in powers if size <= gpu.linked],
        "pipeline_model_parallel_size": [size for size in range(1, args.num_gpus + 1) if args.num_gpus % size == 0],
        "num_virtual_stages_per_pipeline_rank": [None, *_VIRTUAL_STAGES],
        "context_parallel_size": powers if takes_parts else [1],
        "expert_model_parallel_size": powers if architecture.has_experts else [1],
        "micro_batch_size": _ROWS,
    }
    for name in choices:
        given = getattr(args, name)
        if given != getattr(_DEFAULTS, name):
            choices[name] = [given]
    for values in itertools.product(*choices.values()):
        settled = _settled(args, architecture.outside.num_layers, dict(zip(choices, values, strict=True)))
        # Ranks that share a row have the tokens of several rows on one.
        shares_and_stacks = settled.context_parallel_size > 1 and settled.micro_batch_size > args.micro_batch_size
        if shares_and_stacks or not _divides(settled):
            continue
        if is_possible(layout_of(settled), architecture, setup):
            yield settled


def _settled(args: DoctorArgs, num_layers: int, values: dict[str, Any]) -> DoctorArgs:
    """The options with these values and what goes with them."""
    pp = values["pipeline_model_parallel_size"]
    values = dict(values, sequence_parallel=values["tensor_model_parallel_size"] > 1)
    stated = (args.pipeline_model_parallel_layout, args.decoder_first_pipeline_num_layers)
    is_free = not any(stated) and args.decoder_last_pipeline_num_layers is None
    if is_free and num_layers % pp:  # the last stage, which has the vocabulary too, gets the fewer layers
        values["decoder_last_pipeline_num_layers"] = num_layers - math.ceil(num_layers / pp) * (pp - 1)
    return dataclasses.replace(args, **values)


def _divides(args: DoctorArgs) -> bool:
    """Whether GPUs and batch divide evenly, and every stage has a layer."""
    assert args.num_gpus is not None
    layout = layout_of(args)
    last, is_whole = layout.decoder_last_pipeline_num_layers, layout.pipeline_model_parallel_size == 1
    if (last is not None and last < 1) or (is_whole and layout.num_virtual_stages_per_pipeline_rank):
        return False
    if process_problems(layout, args.num_gpus):
        return False
    per_micro_batch = args.micro_batch_size * data_parallel_size(layout, args.num_gpus)
    number, rest = divmod(global_batch_size(args), per_micro_batch)
    is_interleaved = num_virtual_stages(layout) is not None
    return rest == 0 and not (is_interleaved and number % layout.pipeline_model_parallel_size)


def _recomputing(args: DoctorArgs, architecture: Architecture) -> list[DoctorArgs]:
    """The options with nothing recomputed, with MLPs, with all; as given where they say."""
    if args.recompute_granularity != "none":
        return [args]
    # Attention is fused and keeps little; MLPs keep most.
    modules = sorted({layer.mlp.recompute_modules[0] for layer in architecture.layers})
    selective = dataclasses.replace(args, recompute_granularity="selective", recompute_modules=modules)
    return [args, selective, dataclasses.replace(args, recompute_granularity="full")]
