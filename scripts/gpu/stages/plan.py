"""Compare the memory estimate of `swiftlite doctor --plan` with the tensors that are allocated
(scripts/bench/memory.py).
"""

import runpy
from pathlib import Path

from result import Results, Settings

from swiftlite.base.heads import Heads
from swiftlite.plan.cost.memory import estimate
from swiftlite.plan.cost.setup import Setup

BENCH = Path(__file__).resolve().parents[2] / "bench" / "memory.py"
BOUND = 0.05


def run(settings: Settings, results: Results) -> None:
    bench = runpy.run_path(str(BENCH))
    sizes = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 2, "vocab_size": 512}
    if not settings.tiny:
        sizes = {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 8, "vocab_size": 151_936}
    hf_config = bench["example"](**sizes)
    length = 4096
    if settings.tiny:
        length = 64
    # torch has no fused norm for a CPU.
    setup = Setup(micro_batch_size=2, max_length=length, heads=Heads(1), is_fused=settings.device == "cuda")
    (estimated,) = estimate(hf_config, setup)
    measured = bench["measure"](hf_config, setup)
    for name in ("weights", "gradients", "optimizer", "activations"):
        ratio = getattr(measured, name) / getattr(estimated, name)
        results.add(f"{name}, measured / estimated", ratio, abs(ratio - 1) <= BOUND, f"1 to {BOUND:.0%}")
