"""Test that the estimate of each kind of drafter has the parameters and products of the built model."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from swiftlite.base.heads import Heads
from swiftlite.families.drafters import NEW, DrafterOptions, with_drafter
from swiftlite.families.index import architecture_of
from swiftlite.families.rank import Rank
from swiftlite.families.resolved import resolve
from swiftlite.model.inputs import ModelInputs
from swiftlite.model.open import open_model
from swiftlite.plan.cost.flops import training_flops
from swiftlite.plan.cost.gpus import GPUS
from swiftlite.plan.cost.memory import estimate
from swiftlite.plan.cost.products import Product
from swiftlite.plan.cost.setup import Setup
from swiftlite.plan.cost.speed import Step
from swiftlite.plan.trainable import is_head_parameter
from tests.plan.test_memory import CONFIGS
from tests.tiny import make_tiny_hf

DRAFTS, LENGTH = 3, 16


@pytest.mark.parametrize("name", NEW)
def test_the_estimate_is_that_of_the_built_model(name, tmp_path, mesh):
    family = "gemma4_text" if name == "gemma4_assistant" else "qwen3"
    model = resolve(make_tiny_hf(tmp_path, family, num_hidden_layers=4))
    model = replace(model, config=with_drafter(model.config, DrafterOptions(name, decoder_layers(name))))
    heads = replace(model.heads, layers=1, unroll=DRAFTS)
    (chunk,), _ = open_model(model, mesh, dtype=torch.float32, heads=heads, mtp_init="random", freeze_trunk=True)
    sizes = architecture_of(model.config).drafter_of(heads)
    assert sizes is not None
    held = [value.numel() for key, value in chunk.state_dict().items() if is_head_parameter(key) and value is not None]
    assert sizes.parameters(Rank()).total == sum(held)
    assert products_of(chunk) == 2 * LENGTH * (sizes.macs() + sizes.read_macs)
    setup = Setup(heads=heads, mtp_mode="heads_only", parameter_bytes=4)
    (stage,) = estimate(model.config, setup)
    assert stage.weights == sum(p.nbytes for p in weights_of(chunk))
    assert stage.gradients == 4 * stage.trained.total
    # Two tensor-parallel ranks split the products of decoder layers.
    of_half = sizes.parameters(Rank(tp=2)).total
    assert sum(held) / 2 < of_half < sum(held)
    # FLOPs of a step without a trunk, without the terms of attention and of the labels.
    flops = training_flops(model.config, heads, heads_only=True, trunk_is_read=True)
    assert flops.linear - flops.square == 2 * (3 * sizes.macs() + sizes.read_macs)


@pytest.mark.parametrize("kind", ["dflash", "mtp_features"])
def test_the_time_of_features_is_counted(kind):
    """Twice as many features add the time of their products, in the only draft that reads them."""
    times = []
    for features in ((1, 2), (1, 2, 3, 4)):
        declared = {"kind": kind, "layers": 1, "feature_layers": [*features], "decoder_layers": 1, "mask_token_id": 5}
        config = CONFIGS["qwen3"] | {"drafter": declared}
        setup = Setup(heads=replace(Heads.from_config(config), unroll=2), mtp_mode="heads_only")
        layers = Step(architecture_of(config), setup, GPUS["H100"], 1).layers
        times.append(layers.drafts())
    hidden = CONFIGS["qwen3"]["hidden_size"]
    added = [Product(2048, hidden, number * hidden, software=layers.software) for number in (2, 4)]
    if kind == "mtp_features":
        added = [replace(each, size_in=each.size_in + 2 * hidden) for each in added]
    one, two = (each.forward(GPUS["H100"]) + each.backward(GPUS["H100"]) for each in added)
    assert times[1].products - times[0].products == pytest.approx(two - one, rel=1e-6, abs=1e-12)
    assert times[1].total > times[0].total


def decoder_layers(name: str) -> int | None:
    return 2 if name in ("dflash", "dspark") else None


def products_of(model: Any) -> int:
    """Return the FLOPs of the matrix products of all drafts in a forward pass."""
    forward, found = model.forward_mtp, []

    def counted(*args, **kwargs):
        with FlopCounterMode(display=False) as counter:
            states = forward(*args, **kwargs)
        found.append(counter.get_flop_counts()["Global"][torch.ops.aten.mm])
        return states

    model.forward_mtp = counted
    ids = torch.arange(LENGTH)[None]
    model(ModelInputs(ids, ids))
    return found[0]


def weights_of(model: Any) -> list[torch.Tensor]:
    return [each for each in model.state_dict().values() if each is not None]
