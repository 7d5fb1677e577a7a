"""Test `swiftlite doctor --plan` without a model, which compares the sizes of Qwen3 on one GPU."""

import re

import pytest

from swiftlite import rules
from swiftlite.args.commands import SftArgs
from swiftlite.base.errors import OptionError
from swiftlite.cli import doctor
from swiftlite.cli.size_plan import KINDS, QWEN3, sizes
from swiftlite.plan.cost.memory import estimate, usable_bytes
from swiftlite.plan.cost.setup import Setup
from tests.messages import naming
from tests.planned import planned

PUBLISHED = {
    "0.6B": 596_049_920,
    "1.7B": 1_720_574_976,
    "4B": 4_022_468_096,
    "8B": 8_190_735_360,
    "14B": 14_768_307_200,
    "32B": 32_762_123_264,
}
"""Numbers of parameters of the published models; those with tied embeddings without the copy on the hub."""


def test_the_sizes_are_the_published_ones():
    found = {}
    for model, hf_config in QWEN3.items():
        (stage,) = estimate(hf_config, Setup())
        found[model] = stage.parameters
    assert found == PUBLISHED


def test_the_table_names_the_smallest_gpu(capsys):
    args = planned(max_length=1024)
    assert rules.check(args) == []
    assert doctor.run(args) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line.strip()}
    for model, by_kind in sizes(args.run).items():
        cells = re.findall(r"([\d.]+) \((\d+|none)\)", lines[model])
        assert len(cells) == len(KINDS)
        for (shown, gpu), num_bytes in zip(cells, by_kind.values(), strict=True):
            assert float(shown) == pytest.approx(num_bytes / 1e9, abs=0.05)
            fits = [size for size in (24, 80, 141) if num_bytes <= usable_bytes(size)]
            assert gpu == str(fits[0] if fits else "none")


def test_options_change_the_sizes():
    """The 8 bytes of two moments become 2, and a scale of 4 bytes for 256 values of each."""
    usual = sizes(SftArgs())["8B"]["full"]
    small = sizes(SftArgs(optimizer="adamw_8bit"))["8B"]["full"]
    assert usual - small == int(PUBLISHED["8B"] * (8 - 2 * (1 + 4 / 256)))


@pytest.mark.parametrize(
    ("change", "tokens"),
    [
        ({"num_gpus": 2}, "--num_gpus 2 --model"),
        ({"mtp_mode": "heads_only"}, "--mtp_mode heads_only --model"),
        ({"tensor_model_parallel_size": 2}, "--tensor_model_parallel_size 2 --model"),
    ],
)
def test_other_options_require_a_model(change, tokens):
    with pytest.raises(OptionError, match=naming(tokens)):
        rules.check(planned(**change))
