"""Test adding a kind of attention: a model whose layers alternate between Qwen3's attention and a new kind.

In the new kind, which is linear in the length of a sequence, each token gets the mean of all values up to it. Three
parts are added, each in one place: its sizes ("The kind", a file in `swiftlite/families/`), its module and spec ("The
module", in `swiftlite/model/`), and a family that uses it. Planning, training and conversion need no change.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from megatron.core.tensor_parallel.layers import RowParallelLinear
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from safetensors.torch import load_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from swiftlite import families, rules
from swiftlite.acceptance import greedy
from swiftlite.args.commands import SftArgs
from swiftlite.args.fields import ParallelLayout
from swiftlite.base.errors import OptionError, UserError
from swiftlite.base.heads import Heads
from swiftlite.bridge.rows import Row
from swiftlite.families import dense
from swiftlite.families.family import HfConfig
from swiftlite.families.layer import Layer
from swiftlite.families.models.qwen3 import QWEN3
from swiftlite.families.rank import ParameterCount, Rank
from swiftlite.families.resolved import resolve
from swiftlite.model import specs
from swiftlite.model.layers.kernels import Modules
from swiftlite.model.layers.tensor_parallel import ColumnParallelLinear
from swiftlite.model.open import open_model
from swiftlite.plan.cost.flops import training_flops
from swiftlite.plan.cost.memory import estimate
from swiftlite.plan.cost.setup import Setup
from swiftlite.runtime.distributed import session
from swiftlite.train import run as training
from tests.growth.unheard import (
    TOKENS,
    args_of,
    export_hf,
    hf_config,
    is_trained,
    logits,
    make_model,
    run,
    there_and_back,
)
from tests.messages import mentions, naming
from tests.parallel.launch import launch
from tests.parallel.test_memory import measure

pytestmark = pytest.mark.gloo

# The kind


@dataclass(frozen=True)
class RunningMean:
    """Attention with the output out(mean of value(x) over all tokens so far)."""

    recompute_modules: ClassVar[tuple[str, ...]] = ()
    needs_sequence_parallel: ClassVar[str] = ""
    layer_arguments: ClassVar[tuple[str, ...]] = ()
    takes_packed_rows: ClassVar[bool] = False
    takes_parts_of_rows: ClassVar[bool] = False
    is_recurrent: ClassVar[bool] = False

    hidden: int

    @property
    def indexer(self) -> None:
        return None

    @property
    def window(self) -> None:
        return None

    @property
    def rotary(self) -> int:
        return 0

    @property
    def tensor_split(self) -> dict[str, int]:
        return {"hidden_size": self.hidden}

    def mcore_config(self) -> dict[str, Any]:
        return {}

    def rows(self) -> list[Row]:
        matrix = (self.hidden, self.hidden)
        return [
            Row("self_attention.linear_value.weight", {"self_attn.value.weight": matrix}),
            Row("self_attention.linear_proj.weight", {"self_attn.out.weight": matrix}),
        ]

    def parameters(self, rank: Rank) -> ParameterCount:
        return ParameterCount(2 * self.hidden * (self.hidden // rank.tp))

    def macs_per_token(self) -> int:
        return 2 * self.hidden**2

    def macs_per_pair(self) -> int:
        return 0

    def gathered(self, rank: Rank) -> int:
        return 0  # it takes no parts of rows

    def input_activation_bytes(self, rank: Rank) -> int:
        return rank.hidden_state_bytes(self.hidden)

    def activation_bytes(self, rank: Rank) -> int:
        return rank.tokens * (self.hidden // rank.tp) * rank.itemsize  # what the last projection takes


# The module


class RunningMeanAttention(MegatronModule):
    """Maps hidden states [S, B, H] of megatron-core's layer to outputs of the same shape, and no bias."""

    def __init__(self, config: Any, **_: Any):
        super().__init__(config)
        size, shared = config.hidden_size, {"config": config, "init_method": config.init_method, "bias": False}
        self.linear_value = ColumnParallelLinear(size, size, gather_output=False, **shared)
        self.linear_proj = RowParallelLinear(size, size, input_is_parallel=True, skip_bias_add=True, **shared)

    def forward(self, hidden_states: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
        values_SBH, _ = self.linear_value(hidden_states)
        return self.linear_proj(mean_so_far(values_SBH, dim=0))


def mean_so_far(values: torch.Tensor, dim: int) -> torch.Tensor:
    shape = [1] * values.dim()
    shape[dim] = -1
    return values.cumsum(dim) / torch.arange(1, values.size(dim) + 1, dtype=values.dtype).view(shape)


def running_mean(attention: RunningMean, modules: Modules) -> ModuleSpec:
    return ModuleSpec(module=RunningMeanAttention)


# The family


def layer(hf_config: HfConfig, number: int) -> Layer:
    is_mean = number % 2 == 0
    attention = RunningMean(hf_config["hidden_size"]) if is_mean else dense.attention(hf_config, qk_norm=True)
    return Layer(attention, dense.mlp(hf_config))


LAKE = replace(QWEN3, name="lake", layer=layer)


def make_known() -> None:
    families.FAMILIES["lake"] = LAKE
    specs.ATTENTION_SPECS[RunningMean] = running_mean


@pytest.fixture(autouse=True)
def known(monkeypatch):
    monkeypatch.setitem(families.FAMILIES, "lake", LAKE)
    monkeypatch.setitem(specs.ATTENTION_SPECS, RunningMean, running_mean)


# Its model, as transformers would have it


class LakeConfig(Qwen3Config):
    model_type = "lake"


class LakeMean(nn.Module):
    def __init__(self, config: LakeConfig):
        super().__init__()
        self.value = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.out = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(self, hidden_states: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
        return self.out(mean_so_far(self.value(hidden_states), dim=1)), None


class LakeForCausalLM(Qwen3ForCausalLM):
    config_class = LakeConfig

    def __init__(self, config: LakeConfig):
        super().__init__(config)
        for decoder_layer in self.model.layers[::2]:
            decoder_layer.self_attn = LakeMean(config)


AutoConfig.register("lake", LakeConfig, exist_ok=True)
AutoModelForCausalLM.register(LakeConfig, LakeForCausalLM, exist_ok=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """Write a model with four layers. The decoder layer of the head is like the last layer, with Qwen3's attention."""
    directory = tmp_path_factory.mktemp("lake")
    return make_model(directory, LakeConfig, LakeForCausalLM, intermediate_size=96, num_hidden_layers=4)


# What swiftlite does with it


def measured(config: dict[str, Any], setup: Setup) -> dict[str, int]:
    """Return the measured memory in bytes (scripts/bench/memory.py)."""
    make_known()
    return vars(measure(config, setup))


def test_its_memory_is_what_live_objects_hold(model):
    config, setup = hf_config(model), Setup(micro_batch_size=2, max_length=64, heads=Heads(1))
    (estimated,) = estimate(config, setup)
    (held,) = launch(1, measured, config, setup)
    for name in ("parameters", "gradients", "optimizer"):
        assert held[name] == getattr(estimated, name)
    assert estimated.activations == pytest.approx(held["activations"], rel=0.01)
    stages = estimate(config, Setup(ParallelLayout(pipeline_model_parallel_size=4), num_gpus=4))
    assert [stage.holds for stage in stages] == ["E t", "t", "t", "t L"]
    assert stages[2].parameters < stages[1].parameters  # two matrices against four


def test_only_every_second_layer_works_on_pairs_of_tokens(model):
    config = hf_config(model)
    assert training_flops(config).square * 2 == training_flops(config | {"model_type": "qwen3"}).square


def test_it_computes_what_transformers_does(model):
    ours = torch.tensor(launch(1, logits, make_known, model)[0])
    with torch.no_grad():
        theirs = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)(TOKENS, use_cache=False).logits
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"packing": True}, "--packing"),
        ({"padding_free": True}, "--padding_free"),
        ({"context_parallel_size": 2}, "--context_parallel_size 2"),
    ],
)
def test_rows_that_it_does_not_take_are_refused(model, rows, options, problem):
    args = SftArgs(model=str(model), dataset=[str(rows)], **options)
    with pytest.raises(OptionError, match=naming(problem)):
        rules.check(args, world_size=2)


def continue_a_prompt(model: Path) -> str:
    """Return the message of the error that continuing a prompt raises."""
    make_known()
    with session() as mesh, torch.no_grad():
        (chunk,), _ = open_model(resolve(model), mesh, dtype=torch.float32)
        row = greedy.GreedyRow.of([1, 2, 3], max_new_tokens=4, max_length=16)
        rows = greedy.GreedyRows([chunk.eval()], mesh, [row], ())
        with pytest.raises(UserError) as raised:
            rows.step()
    return raised.value.problem


def test_it_is_not_asked_to_continue_prompts(model):
    """The new kind stores nothing in a `Cache`, so counts would be silently wrong."""
    (problem,) = launch(1, continue_a_prompt, model)
    assert mentions(problem, "1")


def test_it_trains_on_a_pipeline_and_is_exported(model, rows, tmp_path):
    """Layers of different kinds are on different ranks and in one checkpoint, which a single process reads."""
    stages = {"pipeline_model_parallel_size": 2, "decoder_first_pipeline_num_layers": 1}
    args = args_of(model, rows, tmp_path / "run", **stages)
    launch(2, run, make_known, training.run, args, 2)
    first, *_, last = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert last["eval_loss"] < 0.8 * first["loss"]

    exported = export_hf(make_known, tmp_path / "run", tmp_path / "hf")
    assert is_trained(load_file(model / "model.safetensors"), exported)


def test_there_and_back_it_is_the_same_to_the_bit(model, tmp_path):
    before, after = load_file(model / "model.safetensors"), there_and_back(make_known, model, tmp_path)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
