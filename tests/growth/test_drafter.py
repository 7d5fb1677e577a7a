"""Test adding a kind of drafter that is not an MTP head: it is trained on a frozen trunk, exported and counted.

Each draft comes from a small network of its own over the trunk's state h, and all share the trunk's output layer:

    draft k = argmax output(h + up_k silu(down_k h))

No network reads a token or the state of another one. Two parts are added, each in one place: the names of its
parameters ("The drafter", a file in `swiftlite/families/` and a line in its index) and its module ("The module", in
`swiftlite/model/`, and a line in `model/specs.py`). config.json names the drafter. Losses, checkpoints, export, audit
and acceptance need no change.
"""

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import RowParallelLinear
from megatron.core.transformer.spec_utils import ModuleSpec
from safetensors.torch import load_file, save_file
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer

from swiftlite import rules
from swiftlite.acceptance.counts import DraftCounts
from swiftlite.acceptance.held_out import HeldOut, Prompt
from swiftlite.acceptance.report import read_acceptance
from swiftlite.args.commands import ExportArgs, SftArgs
from swiftlite.base.errors import OptionError, UserError
from swiftlite.base.heads import REMOVE, Heads
from swiftlite.bridge.audit import audit_hf
from swiftlite.bridge.rows import HfConfig, Row
from swiftlite.engines.served_model import require_heads
from swiftlite.export import run as export
from swiftlite.families import drafters
from swiftlite.families.drafter import Drafter
from swiftlite.families.family import Family
from swiftlite.families.resolved import resolve
from swiftlite.model import specs
from swiftlite.model.drafter import DrafterLayer, DrafterParts, DraftInputs
from swiftlite.model.layers.tensor_parallel import ColumnParallelLinear
from swiftlite.model.open import open_model
from swiftlite.train import run as training
from tests.growth import unheard
from tests.growth.unheard import export_hf, hf_config, run, there_and_back
from tests.messages import naming
from tests.parallel.launch import launch
from tests.tiny import make_tiny_hf

pytestmark = pytest.mark.gloo

DRAFTS, WIDTH = 3, 24
DECLARED = {"kind": "networks", "layers": DRAFTS, "width": WIDTH}

# The drafter


def rows_of(family: Family, hf_config: HfConfig, layer: int) -> list[Row]:
    hidden, width = hf_config["hidden_size"], hf_config["drafter"]["width"]
    shapes = {"down": (width, hidden), "up": (hidden, width)}
    return [
        Row(f"mtp.layers.{layer}.{name}.weight", {f"networks.{layer}.{name}.weight": shape})
        for name, shape in shapes.items()
    ]


def layer_of(family: Family, hf_config: HfConfig, hf_key: str) -> int | None:
    first, _, rest = hf_key.partition(".")
    number = rest.partition(".")[0]
    return int(number) if first == "networks" and number.isdecimal() else None


NETWORKS = Drafter(rows=rows_of, layer_of=layer_of)

# The module


class Network(DrafterLayer):
    """Maps the trunk's states [S, B, H] to the states of one draft."""

    def __init__(self, config: Any, layer_number: int, width: int, **_: Any):
        super().__init__(config, layer_number)
        shared = {"config": config, "init_method": config.init_method, "bias": False}
        self.down = ColumnParallelLinear(config.hidden_size, width, gather_output=False, **shared)
        self.up = RowParallelLinear(width, config.hidden_size, input_is_parallel=True, skip_bias_add=True, **shared)

    @classmethod
    def draft(cls, layers: Sequence[Any], inputs: DraftInputs) -> list[torch.Tensor]:
        return [layer(inputs.hidden_SBH) for layer in layers]

    def forward(self, hidden_SBH: torch.Tensor) -> torch.Tensor:
        return hidden_SBH + self.up(F.silu(self.down(hidden_SBH)[0]))[0]


def network(parts: DrafterParts) -> ModuleSpec:
    return ModuleSpec(module=Network, params={"width": parts.hf_config["drafter"]["width"]})


def make_known() -> None:
    drafters.DRAFTERS["networks"] = NETWORKS
    specs.DRAFTERS["networks"] = network


@pytest.fixture(autouse=True)
def known(monkeypatch):
    monkeypatch.setitem(drafters.DRAFTERS, "networks", NETWORKS)
    monkeypatch.setitem(specs.DRAFTERS, "networks", network)


# The same in plain torch


def drafts_of(tensors: Mapping[str, torch.Tensor], hidden: torch.Tensor) -> list[torch.Tensor]:
    """Return the states of all drafts."""
    pairs = [(tensors[f"networks.{k}.down.weight"], tensors[f"networks.{k}.up.weight"]) for k in range(DRAFTS)]
    return [hidden + F.silu(hidden @ down.T) @ up.T for down, up in pairs]


def load_trunk(directory: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)


@torch.no_grad()
def mean_divergences(directory: Path, samples: Sequence[Any]) -> list[float]:
    """Return KL(trunk || draft) of each draft, over the labels of all samples."""
    trunk, tensors = load_trunk(directory), load_file(directory / "model.safetensors")
    sums, counts = [0.0] * DRAFTS, [0] * DRAFTS
    for sample in samples:
        hidden = trunk.model(torch.from_numpy(sample.input_ids).long()[None]).last_hidden_state[0]
        targets = trunk.lm_head(hidden).log_softmax(-1)
        for k, states in enumerate(drafts_of(tensors, hidden), start=1):
            drafted = trunk.lm_head(states).log_softmax(-1)
            for place in range(len(hidden) - k - 1):
                if sample.labels[place + k + 1] != -100:  # the trunk predicts this token at place + k
                    sums[k - 1] += F.kl_div(drafted[place], targets[place + k], log_target=True, reduction="sum").item()
                    counts[k - 1] += 1
    return [total / count for total, count in zip(sums, counts, strict=True)]


@torch.no_grad()
def naive_counts(directory: Path, prompts: Sequence[Sequence[int]], new_tokens: int) -> DraftCounts:
    """Walk the greedy answers and compare draft by draft, one whole forward pass at a time."""
    trunk, tensors = load_trunk(directory), load_file(directory / "model.safetensors")
    steps, accepted = 0, [0] * DRAFTS
    for prompt in prompts:
        tokens = list(prompt)
        for _ in range(new_tokens):
            tokens.append(int(trunk(torch.tensor([tokens])).logits[0, -1].argmax()))
        newest = len(prompt)
        while newest + 1 < len(tokens):
            # The state is that of the token before the newest one, as when an engine has just sampled the newest.
            state = trunk.model(torch.tensor([tokens[:newest]])).last_hidden_state[0, -1]
            drafts = [int(trunk.lm_head(each).argmax()) for each in drafts_of(tensors, state)]
            hits = 0
            while hits < DRAFTS and newest + 1 + hits < len(tokens) and drafts[hits] == tokens[newest + 1 + hits]:
                accepted[hits] += 1
                hits += 1
            steps += 1
            newest += hits + 1
    return DraftCounts(steps, steps * DRAFTS, tuple(accepted))


# What swiftlite does with it


def declare(directory: Path) -> dict[str, Any]:
    """Add the drafter to config.json, and return its content."""
    config = {**hf_config(directory), "drafter": DECLARED}
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return config


def tokens_of(directory: Path, rows: Path, *, with_answers: bool) -> list[list[int]]:
    """Return the tokens of all rows, in the format of the chat template."""
    tokenizer: Any = AutoTokenizer.from_pretrained(directory)
    found = []
    for row in map(json.loads, rows.read_text().splitlines()):
        turns = [{"role": "user", "content": row["query"]}, {"role": "assistant", "content": row["response"]}]
        turns = turns if with_answers else turns[:1]
        options = {"add_generation_prompt": not with_answers, "return_dict": False}
        found.append(tokenizer.apply_chat_template(turns, **options))
    return found


def learn(trunk: Any, rows: Sequence[list[int]]) -> None:
    """Train a trunk on rows, because greedy answers of a random trunk cannot be drafted."""
    padded = [torch.tensor(row) for row in rows]
    ids = pad_sequence(padded, batch_first=True)
    labels = pad_sequence(padded, batch_first=True, padding_value=-100)
    optimizer = torch.optim.AdamW(trunk.parameters(), lr=3e-3)
    for _ in range(80):
        trunk(ids, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.fixture(scope="module")
def model(rows, tmp_path_factory) -> Path:
    """Write a dense model that knows the rows, with random tensors of the drafter."""
    directory = make_tiny_hf(tmp_path_factory.mktemp("networks"), "qwen3", with_tokenizer=True)
    config, trunk = declare(directory), load_trunk(directory)
    learn(trunk, tokens_of(directory, rows, with_answers=True))
    generator, learned = torch.Generator().manual_seed(0), trunk.state_dict()
    tensors = {key: learned[key].contiguous() for key in load_file(directory / "model.safetensors")}
    for layer in range(DRAFTS):
        for shape, name in ((WIDTH, config["hidden_size"]), "down"), ((config["hidden_size"], WIDTH), "up"):
            tensors[f"networks.{layer}.{name}.weight"] = 0.1 * torch.randn(shape, generator=generator)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def args_of(model: Path, rows: Path, output_dir: Path, **options: Any) -> SftArgs:
    usual: dict[str, Any] = {"mtp_mode": "heads_only", "micro_batch_size": 8, "global_batch_size": 40, "lr": 1e-2}
    usual |= {"split_dataset_ratio": 0.0, "train_iters": 60, "save_steps": 60}
    return unheard.args_of(model, rows, output_dir, **usual | options)


@pytest.fixture(scope="module")
def trained(model, rows, tmp_path_factory) -> Path:
    output_dir = tmp_path_factory.mktemp("networks") / "run"
    launch(1, run, make_known, training.run, args_of(model, rows, output_dir))
    return output_dir


@pytest.fixture(scope="module")
def exported(trained, tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("export") / "hf"
    export_hf(make_known, trained, directory)
    return directory


def test_it_learns_what_plain_torch_would(model, rows, trained, mesh, tmp_path):
    prepared = training.prepare(args_of(model, rows, tmp_path / "run"), mesh, {"model": resolve(model)})
    expected = mean_divergences(model, prepared.data.train)
    lines = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    names = [f"mtp_{draft}_loss" for draft in range(1, DRAFTS + 1)]
    first, *_, last = [[line[name] for name in names] for line in lines if names[0] in line]
    assert first == pytest.approx(expected, rel=2e-5)  # float32 sums in another order
    assert all(late < 0.8 * early for early, late in zip(first, last, strict=True))


def test_only_the_drafter_is_trained_and_exported_with_its_settings(model, exported):
    before, after = load_file(model / "model.safetensors"), load_file(exported / "model.safetensors")
    assert after.keys() == before.keys()
    for key, tensor in after.items():
        assert torch.equal(tensor, before[key]) is not key.startswith("networks.")
    assert hf_config(exported) == hf_config(model)


def test_a_trunk_is_exported_without_it(model, trained, tmp_path):
    args = ExportArgs(to_hf=True, model=str(trained), output_dir=str(tmp_path / "hf"), mtp="strip")
    launch(1, run, make_known, export.run, args)
    whole, trunk = (load_file(directory / "model.safetensors") for directory in (model, tmp_path / "hf"))
    assert trunk.keys() == {key for key in whole if not key.startswith("networks.")}
    assert resolve(tmp_path / "hf").heads == Heads()


def test_its_tensors_are_audited(exported, tmp_path):
    family = resolve(exported).family
    assert audit_hf(exported, family) == []
    broken = shutil.copytree(exported, tmp_path / "broken")
    tensors = load_file(broken / "model.safetensors")
    del tensors["networks.1.up.weight"]
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    problems = audit_hf(broken, family)
    assert any("networks.1.up.weight" in problem for problem in problems)


def test_there_and_back_it_is_the_same_to_the_bit(exported, tmp_path):
    before, after = load_file(exported / "model.safetensors"), there_and_back(make_known, exported, tmp_path)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert (exported / "config.json").read_bytes() == (tmp_path / "hf" / "config.json").read_bytes()


NEW_TOKENS = 12


def test_its_accepted_drafts_are_counted(exported, rows, mesh, tmp_path):
    """The counts that a run writes to acceptance.json are those of a walk over the answers."""
    prompts = tokens_of(exported, rows, with_answers=False)[::5]
    (opened,), _ = open_model(resolve(exported), mesh, dtype=torch.float32)
    path, held_out = tmp_path / "acceptance.json", [Prompt(prompt) for prompt in prompts]
    HeldOut(path, mesh, DRAFTS, held_out, (), NEW_TOKENS, max_length=512).measure("after", [opened.eval()], {})
    found = read_acceptance(path)["after"]["generated"]
    expected = naive_counts(exported, prompts, NEW_TOKENS)
    assert all(0 < count < expected.drafts for count in expected.accepted_per_position)
    assert (found["drafts"], found["drafted"]) == (expected.drafts, expected.drafted)
    accepted = [rate * found["drafts"] for rate in found["acceptance_per_position"]]
    assert accepted == pytest.approx(expected.accepted_per_position)


def test_a_new_one_replaces_mtp_heads(mesh, tmp_path):
    """Files have the tensors of an MTP head, and config.json declares the drafter as well."""
    directory = make_tiny_hf(tmp_path / "model", "qwen3", depth=1)
    heads = set(load_file(directory / "model.safetensors")) - {*load_trunk(directory).state_dict()}
    declare(directory)
    hf_model = resolve(directory)
    _, report = open_model(hf_model, mesh, dtype=torch.float32, mtp_init="random")
    drawn = {f"mtp.layers.{layer}.{name}.weight" for layer in range(DRAFTS) for name in ("down", "up")}
    assert set(report.initialized) == drawn
    assert set(report.dropped) == heads
    changes = hf_model.family.config_with(hf_model.config, hf_model.heads)
    assert changes == {"num_nextn_predict_layers": 0, "drafter": DECLARED}
    stripped = hf_model.family.config_with({**hf_model.config, **changes}, Heads())
    assert stripped["drafter"] is REMOVE


# What is not there yet


@pytest.mark.parametrize(
    ("options", "flag"),
    [
        ({"mtp_init": "fit_last_layer"}, "--mtp_init fit_last_layer"),
        ({"mtp_init": "copy_last_layer"}, "--mtp_init copy_last_layer"),
        ({"draft_for": "sglang"}, "--draft_for sglang"),
    ],
)
def test_what_is_of_mtp_heads_is_refused(model, rows, tmp_path, options, flag):
    with pytest.raises(OptionError, match=naming(f"{flag} networks")):
        rules.check(args_of(model, rows, tmp_path / "run", **options), world_size=1)


def test_no_engine_drafts_with_it(exported):
    with pytest.raises(UserError, match=naming("networks")):
        require_heads(resolve(exported))
