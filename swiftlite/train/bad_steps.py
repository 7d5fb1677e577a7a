"""Find steps that must not be applied (`--skip_bad_steps`).

A step is bad if its loss or the norm of its gradients is not finite, or lies more than SIGMA standard deviations above
the mean of the last applied steps. OLMo-core's SkipStepOptimizer has this rule, but also skips steps far below it,
and compares with skipped steps as well. Here a row of bad steps does not become the norm.
"""

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from swiftlite.runtime.mesh import Mesh
from swiftlite.train.checkpoint.state import BadStepsState

FLAG = "--skip_bad_steps"
SUGGESTED_SIGMA = 6
"""The default of OLMo-core."""
WINDOW = 128
"""Number of applied steps whose values are compared."""
NEEDED = 64
"""Number of applied steps before values are compared with them; until then only non-finite values are bad."""
MAX_IN_A_ROW = 10
"""Number of consecutive steps that are skipped. The run ends at the next bad step, because its data or its weights
are probably broken."""


@dataclass
class BadSteps:
    """Decides on all ranks whether steps are applied.

    Attributes:
        mesh: the ranks of the run.
        sigma: value of `--skip_bad_steps`; 0: all steps are applied.
        recent: values of the last applied steps by name, such as `loss` and `grad_norm`.
        in_a_row: number of steps that were skipped since the last applied one.
        num_skipped: number of all steps that were skipped.
        problem: why the last step was bad; "" if it was applied.
        limits: the highest values that the last step could have, by name; without statistics there are none.
    """

    mesh: Mesh
    sigma: float = 0.0
    recent: dict[str, deque[float]] = field(default_factory=dict)
    in_a_row: int = 0
    num_skipped: int = 0
    problem: str = ""
    limits: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, mesh: Mesh, sigma: float, state: BadStepsState | None) -> "BadSteps":
        """Return the object of a run.

        Args:
            state: the state in the checkpoint that the run resumes from, if it has one.
        """
        if state is None:
            return cls(mesh, sigma)
        recent = {name: deque(values, WINDOW) for name, values in state["recent"].items()}
        return cls(mesh, sigma, recent, state["in_a_row"], state["num_skipped"])

    def state(self) -> dict[str, Any]:
        """Return the field of `CheckpointState`; empty if the option was never used."""
        if not self.sigma and not self.num_skipped:
            return {}
        recent = {}
        if self.sigma:  # without the option the values would be those of long ago
            recent = {name: list(values) for name, values in self.recent.items()}
        return {"bad_steps": {"recent": recent, "in_a_row": self.in_a_row, "num_skipped": self.num_skipped}}

    def is_good(self, values: Mapping[str, float]) -> bool:
        """Return whether a step with these values is applied, and count it. Collective, with one result on all ranks.

        Args:
            values: the values to compare, by name.
        """
        if not self.sigma:
            return True
        values = self._over_all_ranks(values)
        self.limits = {name: self._limit(recent) for name, recent in self.recent.items() if len(recent) >= NEEDED}
        self.problem = self._problem_of(values)
        if self.problem:
            self.in_a_row += 1
            self.num_skipped += 1
            return False
        self.in_a_row = 0
        for name, value in values.items():
            self.recent.setdefault(name, deque(maxlen=WINDOW)).append(value)
        return True

    @property
    def must_end(self) -> bool:
        """Whether too many steps in a row were bad."""
        return self.in_a_row > MAX_IN_A_ROW

    def _over_all_ranks(self, values: Mapping[str, float]) -> dict[str, float]:
        """Return the largest values of all ranks, infinite ones for values that are not finite.

        Ranks have equal values, unless one of them computes wrongly: all must still decide alike.
        """
        finite = [value if math.isfinite(value) else math.inf for value in values.values()]
        largest = torch.tensor(finite, dtype=torch.float64, device=self.mesh.device.torch_device)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        return dict(zip(values, largest.tolist(), strict=True))

    def _limit(self, recent: Sequence[float]) -> float:
        # Exact sums: ranks with other processors must not round differently.
        mean = math.fsum(recent) / len(recent)
        variance = math.fsum((value - mean) ** 2 for value in recent) / (len(recent) - 1)
        return mean + self.sigma * math.sqrt(variance)

    def _problem_of(self, values: Mapping[str, float]) -> str:
        problems = []
        for name, value in values.items():
            if not math.isfinite(value):
                problems.append(f"{name} is not finite")
            elif value > self.limits.get(name, math.inf):
                problems.append(f"{name} {value:.4g} is above {self.limits[name]:.4g}")
        return ", ".join(problems)


@contextmanager
def restoring_router_biases(model: Iterable[torch.nn.Module], bad_steps: BadSteps) -> Iterator[None]:
    """Restore the biases of routers if the step in this context is bad.

    megatron-core updates them with the gradients, before the norm is known (finalize_model_grads.py:293 of 0.16.1).
    """
    kept = []
    if bad_steps.sigma:
        modules = (module for chunk in model for module in chunk.modules())
        biases = (getattr(module, "expert_bias", None) for module in modules)
        kept = [(bias, bias.clone()) for bias in biases if bias is not None]
    yield
    if bad_steps.problem:
        for bias, before in kept:
            bias.copy_(before)
