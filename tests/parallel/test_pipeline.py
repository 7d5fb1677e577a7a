"""Test pipelines whose stages know the shapes of tensors against megatron-core's pipelines, which send the shapes."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.distributed import finalize_model_grads
from torch.utils._python_dispatch import TorchDispatchMode

from swiftlite import families
from swiftlite.args.fields import ParallelLayout
from swiftlite.base.heads import Heads
from swiftlite.bridge.hf_config import read_config
from swiftlite.bridge.transfer import load_hf
from swiftlite.data.batch import collate
from swiftlite.model.build import build_model
from swiftlite.plan.layout import length_multiple
from swiftlite.runtime.distributed import session
from swiftlite.train.methods.next_token import NextTokenObjective
from swiftlite.train.optim import wrap_model
from tests.kinds import Layout
from tests.parallel.launch import launch, open_store, prepare_session
from tests.parallel.packing import ROWS, forward_backward, make_rows, pack
from tests.parallel.parity import CASES, make_model
from tests.tiers import selected, some_of

pytestmark = pytest.mark.gloo

DRAFTS = 2
# By name: the layout, and between how many pairs of ranks tensors cross.
LAYOUTS: dict[str, tuple[Layout, int]] = {
    "PP2": (CASES["PP2"], 1),
    "PP2xVPP2": (CASES["PP2xVPP2"], 3),
    "PP4": (CASES["PP4"], 3),
    "PP3 MTP middle": (CASES["PP3 MTP middle"], 2),
    "PP2 MTP apart": (CASES["PP2 MTP apart"], 1),
    "PP2xTP2": (CASES["PP2xTP2"], 2),
    "PP2xCP2": (Layout(4, {"pipeline_model_parallel_size": 2, "context_parallel_size": 2}), 2),
}


class Messages(TorchDispatchMode):
    """Counts the tensors that this process sends."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.sent += str(func).startswith("c10d.send")
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class Step:
    """The result of a forward and backward pass over four rows of different lengths on one rank.

    Attributes:
        losses: losses of each micro-batch, on the last stage.
        sent: number of messages.
    """

    losses: list[torch.Tensor]
    gradients: list[torch.Tensor]
    sent: int


def compute(hf_dir: Path, layouts: Sequence[dict[str, Any]], ports: Sequence[int]) -> list[list[Step]]:
    """Run four steps with each layout: packed and padded rows, with known and with sent shapes."""
    results = []
    for layout, port in zip(layouts, ports, strict=True):
        prepare_session(port)
        results.append(steps(hf_dir, ParallelLayout(**layout)))
    return results


def steps(hf_dir: Path, layout: ParallelLayout) -> list[Step]:
    hf_config = read_config(hf_dir)
    family = families.get(hf_config)
    heads = Heads(DRAFTS)
    with session(layout, timeout_minutes=2) as mesh:
        model = build_model(
            family.architecture(hf_config),
            hf_config,
            mesh=mesh,
            dtype=torch.float32,
            heads=heads,
            drafting=family.mtp.drafting,
        )
        load_hf(model, hf_dir, family, hf_config)
        wrapped = wrap_model(model, mesh, torch.float32)
        rows = make_rows(hf_config["vocab_size"])
        multiple = length_multiple(layout)
        packed = [pack(row, layout, DRAFTS) for row in rows]
        padded = [collate(row, 0, num_drafts=DRAFTS, pad_to_multiple_of=multiple) for row in rows]
        results = []
        for batches in (packed, padded):
            assert len({batch.position_ids_BS.size(1) for batch in batches}) > 2
            for tells_shapes in (False, True):
                for chunk in wrapped:
                    chunk.zero_grad_buffer()
                    chunk.config.finalize_model_grads_func = finalize_model_grads
                with Messages() as messages:
                    objective = NextTokenObjective(heads, 0.5)
                    losses, _ = forward_backward(wrapped, mesh, objective, batches, tells_shapes=tells_shapes)
                parameters: list[Any] = [parameter for chunk in wrapped for parameter in chunk.parameters()]
                gradients = [parameter.main_grad.clone() for parameter in parameters]
                results.append(Step(losses, gradients, messages.sent))
    return results


@pytest.fixture(scope="module", params=some_of(["qwen3", "mimo"], "mimo"))
def computed(request, tmp_path_factory) -> dict[str, list[list[Step]]]:
    """Return the steps of each rank, by layout.

    The heads of mimo read the state before the norm, which is also sent.
    """
    hf_dir = make_model(tmp_path_factory.mktemp(request.param), request.param, DRAFTS)
    by_size: dict[int, dict[str, dict[str, Any]]] = {}
    for name in selected(request, "layout"):
        case, _ = LAYOUTS[name]
        options = dict(case.options)
        if stages := options.get("pipeline_model_parallel_layout"):
            options["pipeline_model_parallel_layout"] = stages.replace("MTP", "m" * DRAFTS)
        by_size.setdefault(case.num_processes, {})[name] = options
    results = {}
    for size, layouts in by_size.items():
        stores = [open_store() for _ in layouts]
        ranks = launch(size, compute, hf_dir, list(layouts.values()), [store.port for store in stores])
        results |= dict(zip(layouts, map(list, zip(*ranks, strict=True)), strict=True))
    return results


every_layout = pytest.mark.parametrize("layout", some_of(LAYOUTS, "PP2xVPP2", "PP2xCP2"))


@every_layout
def test_one_message_for_each_tensor(computed, layout):
    """There is one message per micro-batch forward and one backward; twice as many if shapes are sent."""
    expected = 2 * len(ROWS) * LAYOUTS[layout][1]
    for number, times in enumerate((1, 2, 1, 2)):  # packed and padded; known and told
        assert sum(steps[number].sent for steps in computed[layout]) == times * expected


@every_layout
def test_losses_and_gradients_are_the_same_bits(computed, layout):
    for packed, packed_told, padded, padded_told in computed[layout]:
        for known, told in ((packed, packed_told), (padded, padded_told)):
            assert len(known.gradients) > 0
            assert all(map(torch.equal, known.gradients, told.gradients))
            assert all(map(torch.equal, known.losses, told.losses))
