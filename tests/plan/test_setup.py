"""Test that the plan of `doctor --plan` has the heads and adapters of the run."""

from typing import Any

import pytest

from swiftlite.args.commands import DoctorArgs, SftArgs
from swiftlite.base.heads import Heads
from swiftlite.plan.cost.setup import planned_setup
from swiftlite.plan.heads import heads_of, lora_of

CONFIG = {"model_type": "mimo", "vocab_size": 100, "hidden_size": 64, "num_hidden_layers": 2}


@pytest.mark.parametrize("with_draft_vocab", [False, True])
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize(
    "options",
    [
        {"mtp_num_layers": 1},
        {"mtp_num_layers": 1, "draft_vocab": 16},
        {"mtp_mode": "heads_only"},
        {"mtp_mode": "heads_only", "mtp_num_layers": 1},
        {"mtp_tuner": "full", "mtp_num_layers": 1},
        {"mtp_tuner": "lora", "mtp_num_layers": 1},
    ],
)
def test_heads_and_adapters_are_those_of_the_run(options, depth, with_draft_vocab):
    config: dict[str, Any] = CONFIG | {"num_nextn_predict_layers": depth}
    if with_draft_vocab and depth:
        declared = Heads(depth, draft_vocab=tuple(range(0, 64, 2)))
        config |= declared.config_change(config)
    checkpoint = Heads.from_config(config)
    more: dict[str, Any] = {"tuner_type": "lora", **options}
    training = dict(more)
    if not depth and "mtp_mode" not in options:
        training["mtp_init"] = "copy_last_layer"  # a run requires it for new heads
    run = SftArgs(**training)
    planned = planned_setup(DoctorArgs(**more), config)
    heads, lora = heads_of(run, checkpoint), lora_of(run, checkpoint)
    assert planned.heads.layers == heads.layers
    if "draft_vocab" in options:
        assert len(planned.heads.draft_vocab) == options["draft_vocab"]
    else:
        assert planned.heads.draft_vocab == heads.draft_vocab
    assert planned.lora is not None
    assert lora is not None
    assert (planned.lora.heads, planned.lora.on_trunk) == (lora.heads, lora.on_trunk)
