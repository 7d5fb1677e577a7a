"""Test which parameters are trained, as the options specify, and the effect on a model."""

import pytest
import torch

from swiftlite.args.commands import SftArgs
from swiftlite.heads import Heads
from swiftlite.plan.trainable import HEADS_ONLY, JOINT, WHOLE_MODEL, Trainable, trainable_of


@pytest.mark.parametrize(
    ("mode", "heads", "expected"),
    [
        ("joint", Heads(2), JOINT),
        ("joint", Heads(), WHOLE_MODEL),
        ("heads_only", Heads(1), HEADS_ONLY),
    ],
)
def test_what_the_options_say(mode, heads, expected):
    assert trainable_of(SftArgs(mtp_mode=mode), heads) is expected


@pytest.mark.parametrize(
    ("trainable", "expected"),
    [
        (WHOLE_MODEL, {"decoder.weight", "mtp.weight", "mtp.bias"}),
        (JOINT, {"decoder.weight", "mtp.weight", "mtp.bias"}),
        (HEADS_ONLY, {"mtp.weight", "mtp.bias"}),
        (Trainable(lambda name: name.endswith("bias"), "biases"), {"mtp.bias"}),
    ],
)
def test_all_others_get_no_gradient(trainable, expected):
    chunk = torch.nn.ModuleDict({"decoder": torch.nn.Linear(2, 2, bias=False), "mtp": torch.nn.Linear(2, 2)})
    trainable.apply([chunk])
    chunk["mtp"](chunk["decoder"](torch.ones(1, 2))).sum().backward()
    assert {name for name, parameter in chunk.named_parameters() if parameter.grad is not None} == expected
