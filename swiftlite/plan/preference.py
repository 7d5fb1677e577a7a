"""Plan preference losses and the layout of the reference model for `megatron dpo`. This module does not import
torch."""

from dataclasses import dataclass

from swiftlite.args.commands import DpoArgs, SftArgs
from swiftlite.args.fields import ParallelLayout, PreferenceLoss
from swiftlite.methods.dpo import WITHOUT_REFERENCE
from swiftlite.plan.layout import layout_beside

SMOOTHED = ("sigmoid", "robust", "simpo")
"""Losses that support --label_smoothing."""


@dataclass(frozen=True)
class Preference:
    """A loss over pairs of answers. Its settings have TRL's names."""

    loss_type: PreferenceLoss = "sigmoid"
    beta: float = 0.1
    label_smoothing: float = 0.0
    simpo_gamma: float = 0.5
    cpo_alpha: float = 1.0
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0

    @property
    def needs_reference(self) -> bool:
        return self.loss_type not in WITHOUT_REFERENCE

    @property
    def is_per_token(self) -> bool:
        """Whether answers are scored by the mean over their tokens, not by the sum."""
        return not self.needs_reference

    @property
    def imitation(self) -> float:
        """Weight of the next-token loss on the preferred answers."""
        return {"simpo": self.cpo_alpha, "orpo": 1.0}.get(self.loss_type, 0.0)


def preference_of(args: SftArgs) -> Preference:
    """Return the loss that the options of `megatron dpo` select."""
    assert isinstance(args, DpoArgs)
    return Preference(
        loss_type=args.loss_type,
        beta=args.beta,
        label_smoothing=args.label_smoothing,
        simpo_gamma=args.simpo_gamma,
        cpo_alpha=args.cpo_alpha,
        desirable_weight=args.desirable_weight,
        undesirable_weight=args.undesirable_weight,
    )


def reference_layout(args: DpoArgs) -> ParallelLayout:
    """Return the layout of the reference model of `megatron dpo`."""
    return layout_beside(args, args.ref_tensor_model_parallel_size, args.ref_pipeline_model_parallel_size)
