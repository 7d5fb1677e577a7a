"""Estimate the memory of `megatron grpo` on the GPU of the first rank, which the engine shares with the trainer
(`doctor --plan --max_completion_length`), and the FLOPs of drawing. This module does not import torch.

The engine holds the whole model and a KV cache, also while the model is trained, unless it sleeps then. The activations
of the engine, its CUDA graphs and the fixed-size states of linear attention are not counted.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from swiftlite.args.commands import GrpoArgs
from swiftlite.args.fields import ParallelLayout
from swiftlite.families.family import HfConfig
from swiftlite.families.index import architecture_of
from swiftlite.families.rank import Rank
from swiftlite.plan.cost.flops import training_flops
from swiftlite.plan.cost.memory import StageMemory, estimate
from swiftlite.plan.cost.setup import Setup


@dataclass(frozen=True)
class RolloutMemory:
    """The memory of the GPU of the first rank, in bytes.

    Attributes:
        trainer: peak of the trainer in a step, on the first pipeline stage.
        state: the part of `trainer` that stays between steps.
        reference, teacher, reward: weights of these models; 0 without them, and if the trained model without adapters
            is the reference.
        engine: weights of trunk and heads in the engine.
        cache: keys and values of `--max_batch_size` sequences of `--max_length` tokens.
        sleeps: whether the engine frees its memory while the trainer trains.
    """

    trainer: int
    state: int
    reference: int
    teacher: int
    reward: int
    engine: int
    cache: int
    sleeps: bool = False

    @property
    def phases(self) -> dict[str, tuple[int, ...]]:
        """The bytes of trainer, reference, teacher, reward, engine, KV cache and their sum, by phase of the run."""
        phases = {"both": (self.trainer, self.engine, self.cache)}
        if self.sleeps:
            phases = {"training": (self.trainer, 0, 0), "drawing": (self.state, self.engine, self.cache)}
        found = {}
        for name, (trainer, *of_engine) in phases.items():
            sizes = (trainer, self.reference, self.teacher, self.reward, *of_engine)
            found[name] = (*sizes, sum(sizes))
        return found

    @property
    def total(self) -> int:
        return max(sizes[-1] for sizes in self.phases.values())


def estimate_rollouts(
    args: GrpoArgs,
    setup: Setup,
    stages: list[StageMemory],
    hf_config: HfConfig,
    frozen: Mapping[str, int],
    *,
    sleeps: bool = False,
) -> RolloutMemory:
    """Return the memory of the GPU that trainer and engine share.

    Args:
        setup, stages: setup and stages of the trained model.
        frozen: weights of "reference", "teacher" and "reward" models on the first rank, if there are such models.
        sleeps: whether the engine sleeps while the trainer trains.
    """
    reference, teacher, reward = (frozen.get(name, 0) for name in ("reference", "teacher", "reward"))
    whole = dataclasses.replace(setup, layout=ParallelLayout(), num_gpus=1, lora=None, low_precision=None)
    engine = estimate(hf_config, whole)[0].weights
    cache = _cache_bytes(args, setup, hf_config)
    return RolloutMemory(stages[0].total, stages[0].state, reference, teacher, reward, engine, cache, sleeps)


def _cache_bytes(args: GrpoArgs, setup: Setup, hf_config: HfConfig) -> int:
    architecture = architecture_of(hf_config)
    rank = Rank(itemsize=setup.parameter_bytes, rows=args.max_batch_size, length=setup.max_length)
    heads = [architecture.mtp_block.attention] * setup.heads.layers
    attentions = [*(layer.attention for layer in architecture.layers), *heads]
    return sum(attention.gathered(rank) for attention in attentions if not attention.is_recurrent)


def rollout_flops(hf_config: HfConfig, setup: Setup, num_completion_tokens: int) -> tuple[float, float]:
    """Return the FLOPs to draw a completion without drafts, and to train on it. Prompt and completion together have the
    maximum length.
    """
    length, labels = setup.max_length, num_completion_tokens
    drawing = training_flops(hf_config)
    training = training_flops(hf_config, setup.heads, lora=setup.lora)
    drawn, trained = (
        flops.step(length, length**2, [labels] * len(flops.targets), outside_windows=flops.outside_windows(length))
        for flops in (drawing, training)
    )
    return drawn / 3, trained  # drawing is a forward pass
