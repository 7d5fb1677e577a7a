"""Test which trunk the options select, and that a checkpoint describes it."""

import json
from dataclasses import replace

import pytest

from swiftlite.args.commands import SftArgs
from swiftlite.base.heads import Heads
from swiftlite.plan.run import make_plan
from swiftlite.plan.trunk import Trunk
from swiftlite.train.checkpoint.state import STATE_FILE, CheckpointState

HEADS_ONLY = SftArgs(mtp_mode="heads_only")
STREAMED = replace(HEADS_ONLY, stream_trunk=True, cache_trunk_states="states", stream_trunk_gb=2)


@pytest.mark.parametrize(
    ("args", "trunk"),
    [
        (SftArgs(), Trunk()),
        (HEADS_ONLY, Trunk(keeps_files=True)),
        (replace(HEADS_ONLY, tuner_type="lora"), Trunk()),  # adapters belong to decoded weights
        (replace(HEADS_ONLY, cache_trunk_states="states"), Trunk(keeps_files=True, cache="states")),
        (STREAMED, Trunk(holds_layers=False, keeps_files=True, cache="states", waiting_gb=2)),
    ],
)
def test_trunk_of_a_quantized_model(args, trunk):
    plan = make_plan(args, 1, Heads(1), is_quantized=True)
    assert plan.trunk == trunk
    assert plan.trunk.is_in_base == (args.mtp_mode == "heads_only" and args.tuner_type == "full")
    assert not make_plan(args, 1, Heads(1)).trunk.keeps_files


@pytest.mark.parametrize("trunk", [Trunk(), Trunk(keeps_files=True), Trunk(holds_layers=False)])
def test_a_checkpoint_describes_the_trunk(tmp_path, trunk):
    written = CheckpointState(step=1, mtp_num_layers=1, torch_dtype="float32", **trunk.to_state())
    (tmp_path / STATE_FILE).write_text(written.to_json())
    assert CheckpointState.read(tmp_path).trunk == trunk
    keys = {"streams_trunk": not trunk.holds_layers, "quantized_trunk": trunk.keeps_files}  # as in earlier releases
    assert keys.items() <= json.loads(written.to_json()).items()
