"""Test `estimate.flops` against the operations that torch counts for a model with MTP layers."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from swiftlite import families
from swiftlite.base.heads import Heads
from swiftlite.model.build import build_model
from swiftlite.model.inputs import ModelInputs, Target
from swiftlite.plan.cost.flops import training_flops
from swiftlite.plan.trainable import HEADS_ONLY
from tests.tiers import once
from tests.tiny import make_tiny_model

LENGTH, NOT_LEARNED = 12, 5


@pytest.mark.parametrize(
    ("family", "depth", "heads_only"), once(["llama", "glm4_moe", "deepseek_v3"], [1, 2], [False, True])
)
def test_operations_with_mtp_layers(family, depth, heads_only, mesh):
    hf_config = make_tiny_model(family).config.to_dict()
    [model] = build_model(
        families.get(hf_config).architecture(hf_config),
        hf_config,
        mesh=mesh,
        dtype=torch.float32,
        heads=Heads(depth),
        freeze_trunk=heads_only,
    )
    if heads_only:
        HEADS_ONLY.apply([model])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2)
    tokens_BS = torch.arange(LENGTH)[None]
    labels_BS = tokens_BS.clone()
    labels_BS[:, -NOT_LEARNED:] = -100
    with FlopCounterMode(display=False) as counter:
        losses = model.train()(ModelInputs(tokens_BS, tokens_BS), Target(labels_BS))
        heads = losses.mtp if heads_only else (losses.main, *losses.mtp)
        torch.stack([head.loss_BS.sum() for head in heads]).sum().backward()
    learned = [int((head.prediction_BS >= 0).sum()) for head in (losses.main, *losses.mtp)]
    assert learned == [LENGTH - NOT_LEARNED - k for k in range(depth + 1)]
    flops = training_flops(hf_config, Heads(depth), heads_only=heads_only)
    causal = flops.square * (LENGTH**2 + LENGTH)
    # torch does not count a CPU's attention kernel, which wants keys and values of one size; DeepSeek's take matrix
    # products, of all pairs.
    counted = 2 * flops.square * LENGTH**2 if family == "deepseek_v3" else 0
    assert counter.get_total_flops() == flops.step(LENGTH, LENGTH**2, learned) - causal + counted
