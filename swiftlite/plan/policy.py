"""Plan the policy loss of `megatron grpo`. This module does not import torch."""

from dataclasses import dataclass

from swiftlite.args.commands import GrpoArgs, SftArgs
from swiftlite.args.fields import ParallelLayout
from swiftlite.args.rl_fields import ImportanceSamplingLevel, MismatchMode, PolicyLoss
from swiftlite.base.lora import Lora
from swiftlite.families.architecture import Architecture
from swiftlite.plan.layout import layout_beside, layout_of


@dataclass(frozen=True)
class Policy:
    """A loss over sampled completions. Settings have the names of the options, which are TRL's or ms-swift's.

    Attributes:
        clip_low, clip_high: the probability ratio of policy and old policy is clipped to [clip_low, clip_high]; with
            cispo, only `clip_high` applies.
        teacher_kl_coef: weight of the teacher in the advantages; 0 without a teacher.
        corrects_kl: whether the KL divergence is multiplied by the probability ratio.
        sapo_temperatures: steepness of the gate of sapo for positive and for other advantages.
        entropy_coef: weight of the mean entropy, which is subtracted from the loss.
        delta: additional upper bound for the ratio where the advantage is negative; None: no bound.
        mismatch_mode: correction for the difference between the probabilities of trainer and engine.
        mismatch_threshold: bound C of this correction.
    """

    loss_type: PolicyLoss = "dapo"
    importance_sampling_level: ImportanceSamplingLevel = "token"
    clip_low: float = 0.8
    clip_high: float = 1.2
    sapo_temperatures: tuple[float, float] = (1.0, 1.05)
    delta: float | None = None
    entropy_coef: float = 0.0
    beta: float = 0.0
    corrects_kl: bool = True
    teacher_kl_coef: float = 0.0
    mismatch_mode: MismatchMode = "token_truncate"
    mismatch_threshold: float = 2.0
    max_completion_length: int = 256

    @property
    def divides_by_tokens(self) -> bool:
        """Whether the loss is a mean over the tokens of the global batch, not over its completions."""
        return self.loss_type in ("dapo", "cispo")

    @property
    def divides_by_lengths(self) -> bool:
        """Whether the loss of a completion is a mean over its tokens."""
        return self.loss_type in ("grpo", "sapo")


def policy_of(args: SftArgs) -> Policy:
    """Return the loss that the options of `megatron grpo` select."""
    assert isinstance(args, GrpoArgs)
    epsilon_high = args.epsilon if args.epsilon_high is None else args.epsilon_high
    return Policy(
        loss_type=args.loss_type,
        importance_sampling_level=args.importance_sampling_level,
        clip_low=1 - args.epsilon,
        # The cap of cispo is `epsilon_high` itself, as in TRL.
        clip_high=epsilon_high if args.loss_type == "cispo" else 1 + epsilon_high,
        sapo_temperatures=(args.sapo_temperature_pos, args.sapo_temperature_neg),
        delta=args.delta,
        entropy_coef=args.entropy_coef,
        beta=args.beta,
        corrects_kl=args.use_bias_correction_kl,
        teacher_kl_coef=args.teacher_kl_coef if args.teacher_model else 0.0,
        mismatch_mode=args.rollout_importance_sampling_mode,
        mismatch_threshold=args.rollout_importance_sampling_threshold,
        max_completion_length=args.max_completion_length,
    )


def reference_layout(args: GrpoArgs) -> ParallelLayout:
    """Return the layout of the reference model of `megatron grpo`: that of the trained model, unless an option sets
    another size.
    """
    sizes = args.ref_tensor_model_parallel_size, args.ref_pipeline_model_parallel_size
    return layout_beside(args, *sizes) if any(sizes) else layout_of(args)


def reward_models_on_ranks(args: GrpoArgs) -> list[str]:
    """Return the reward models that are on the ranks of the run, because an option sets their layout. Otherwise they
    are in the child process of the reward functions.
    """
    sizes = args.reward_tensor_model_parallel_size, args.reward_pipeline_model_parallel_size
    return args.reward_model if any(sizes) and not args.rollouts_from else []


def reward_layout(args: GrpoArgs, architecture: Architecture | None) -> ParallelLayout:
    """Return the layout of a reward model on the ranks of the run: that of the trained model with the sizes of the
    --reward_... options.

    Args:
        architecture: that of the reward model, if known.
    """
    sizes = args.reward_tensor_model_parallel_size, args.reward_pipeline_model_parallel_size
    return layout_beside(args, *sizes, architecture)


def is_base_of_adapters(args: GrpoArgs, lora: Lora | None) -> bool:
    """Return whether the reference is the trained model without its adapters, so that no second model is loaded."""
    return args.ref_model is None and lora is not None and not lora.saved and not args.moe_router_bias_update_rate
