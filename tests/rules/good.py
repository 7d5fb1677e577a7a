"""Options of each command that break no rule in the directory `here` (conftest.py), and how a test breaks them."""

import pytest

from swiftlite import rules
from swiftlite.args.commands import BenchArgs, DeployArgs, ExportArgs, InferArgs, SftArgs
from swiftlite.errors import OptionError

SFT = SftArgs(model="plain", dataset=["train.jsonl"], output_dir="out")
EXPORT = ExportArgs(model="run", output_dir="hf", to_hf=True)
INFER = InferArgs(model="mtp2", val_dataset=["val.jsonl"], speculative="mtp")
BENCH = BenchArgs(model="mtp2", val_dataset=["val.jsonl"], output_dir="out")
DEPLOY = DeployArgs(model="mtp2", infer_backend="sglang", dry_run=True)
CHAIN = {
    "sglang_speculative_num_steps": 2,
    "sglang_speculative_eagle_topk": 1,
    "sglang_speculative_num_draft_tokens": 3,
}
TREE = CHAIN | {"sglang_speculative_eagle_topk": 3, "sglang_speculative_num_draft_tokens": 13}


def problems_of(args, world_size=1):
    with pytest.raises(OptionError) as raised:
        rules.check(args, world_size)
    assert raised.value.exit_code == 2
    return raised.value.problems
