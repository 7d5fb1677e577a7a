"""Test adding an image tower: a model whose rows contain pictures is trained, exported and read again.

Glade is a Qwen3 with pictures. A picture has four patches of six numbers. The tower, one linear layer, computes an
embedding of each patch, which replaces the embedding of one placeholder token. Tokens have positions along three axes:
time, row, column.

Four parts are added, each in one place: the sizes of the tower ("The tower", a file in `swiftlite/families/`), its
module (a file in `swiftlite/model/`, a line in `model/specs.py`), a family that uses it, and a training method whose
samples contain pictures ("The rows"). Loading, training, splitting and conversion need no change.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig
from safetensors.torch import load_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, Qwen3Config, Qwen3ForCausalLM
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLTextConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRotaryEmbedding

from swiftlite import families
from swiftlite.args.commands import SftArgs
from swiftlite.base.errors import UserError
from swiftlite.bridge.rows import Row
from swiftlite.data.batch import AXES, ITEM, Batch, Extra, collate
from swiftlite.data.encoder import ConversationEncoder, Encoded, Encoder
from swiftlite.data.rows.conversation import Conversation, parse_row
from swiftlite.data.sample import Sample
from swiftlite.data.template import ChatTemplate
from swiftlite.families.family import HfConfig
from swiftlite.families.models.qwen3 import QWEN3
from swiftlite.families.rank import ParameterCount, Rank
from swiftlite.families.resolved import HfModel, resolve
from swiftlite.families.tower import TowerActivations, TowerMacs, TrainedParts
from swiftlite.methods.index import METHODS
from swiftlite.methods.sft import SFT
from swiftlite.model import specs
from swiftlite.model.context_parallel import describe_packed
from swiftlite.model.gpt import GPTModel, Logits
from swiftlite.model.inputs import ModelInputs
from swiftlite.model.open import open_model
from swiftlite.model.tower import TowerInputs
from swiftlite.plan.cost.memory import estimate
from swiftlite.plan.cost.setup import Setup
from swiftlite.train import run as training
from swiftlite.train.methods.next_token import next_token_objective
from swiftlite.train.methods.training import Training
from tests.engines.reference import Reference
from tests.growth import unheard
from tests.growth.unheard import export_hf, hf_config, is_trained, make_model, run, there_and_back
from tests.messages import mentions
from tests.parallel.launch import launch

pytestmark = pytest.mark.gloo

# The tower


@dataclass(frozen=True)
class Patches:
    """A tower that applies one linear layer to each patch of a picture."""

    width: int
    hidden: int
    num_deepstack: int = 0

    def rows(self) -> list[Row]:
        return [Row("tower.linear.weight", {"visual.proj.weight": (self.hidden, self.width)})]

    def parameters(self, rank: Rank) -> ParameterCount:
        return ParameterCount(self.hidden * self.width)

    def trained_parameters(self, trained: TrainedParts) -> ParameterCount:
        return self.parameters(Rank()) if trained.vit else ParameterCount()

    def macs(self, trained: TrainedParts) -> TowerMacs:
        return TowerMacs((1 + trained.vit) * self.hidden * self.width)

    def activation_bytes(
        self, num_items: int, itemsize: int, trained: TrainedParts, *, recomputes: bool
    ) -> TowerActivations:
        return TowerActivations(num_items * self.width * itemsize * trained.vit, 0)


class PatchTower(nn.Module):
    def __init__(self, patches: Patches, config: TransformerConfig):
        super().__init__()
        self.linear = nn.Linear(patches.width, patches.hidden, bias=False, dtype=config.params_dtype)

    def forward(self, items: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return self.linear(items["patches"].to(self.linear.weight))


# The family


def patches(hf_config: HfConfig) -> Patches:
    return Patches(hf_config["patch_width"], hf_config["hidden_size"])


GLADE = replace(QWEN3, name="glade", tower=patches)

# The rows

WIDTH = 6
PLACEHOLDER = "@"
PICTURE_AXES = np.array([[0, 0, 0], [0, 0, 1], [0, 1, 0], [0, 1, 1]])
"""Time, row and column of the four patches of a picture, relative to the picture's position."""
EXTRAS = (
    Extra("patches", per="item", shape=(WIDTH,)),
    Extra(ITEM, torch.int64, per="token", default=-1, counts="patches"),
    Extra(AXES, torch.int64, per="token", shape=(3,)),
)


def parse_seen(row: Any, *, system: str | None, source: str) -> Conversation:
    """Parse a row that may have a `picture` into a conversation, with one placeholder per patch."""
    rest = {name: value for name, value in row.items() if name != "picture"}
    seen = tuple(np.array(patch, np.float32) for patch in row.get("picture", ()))
    return replace(parse_row(rest, system=system, source=source), extras={"patches": seen})


@dataclass(frozen=True)
class SeeingEncoder(ConversationEncoder):
    placeholder: int = -1

    def __call__(self, row: Conversation) -> Encoded:
        encoded = super().__call__(row)
        return replace(encoded, samples=tuple(self._placed(sample) for sample in encoded.samples))

    def _placed(self, sample: Sample) -> Sample:
        is_patch = sample.input_ids == self.placeholder
        assert is_patch.sum() == len(sample.extras["patches"])
        item = np.where(is_patch, is_patch.cumsum() - 1, -1)
        return sample.with_extras(**{ITEM: item, AXES: axes_of(is_patch)})


def axes_of(is_patch: np.ndarray) -> np.ndarray:
    """Return positions [S, 3]. A picture uses two positions, whatever its number of patches."""
    axes: list[Any] = []
    position = 0
    while len(axes) < len(is_patch):
        if is_patch[len(axes)]:
            axes += (position + PICTURE_AXES).tolist()
            position += 2
        else:
            axes.append([position] * 3)
            position += 1
    return np.array(axes)


def make_encoder(args: Any, tokenizer: Any, hf_model: HfModel) -> Encoder:
    template = ChatTemplate(tokenizer, vocab_size=hf_model.config["vocab_size"])
    placeholder = tokenizer.convert_tokens_to_ids(PLACEHOLDER)
    return SeeingEncoder(template, args.max_length, args.truncation_strategy, parse_seen, placeholder=placeholder)


TRAINING = Training(make_encoder=make_encoder, make_objective=next_token_objective, extras=EXTRAS)


def make_known() -> None:
    families.FAMILIES["glade"] = GLADE
    specs.TOWERS[Patches] = PatchTower
    METHODS["sft"] = replace(SFT, training=f"{__name__}:TRAINING")


@pytest.fixture(autouse=True)
def known(monkeypatch):
    monkeypatch.setitem(families.FAMILIES, "glade", GLADE)
    monkeypatch.setitem(specs.TOWERS, Patches, PatchTower)
    monkeypatch.setitem(METHODS, "sft", replace(SFT, training=f"{__name__}:TRAINING"))


# Its model, as transformers would have it


class GladeConfig(Qwen3Config):
    model_type = "glade"


class GladeForCausalLM(Qwen3ForCausalLM):
    config_class = GladeConfig

    def __init__(self, config: Any):
        super().__init__(config)
        self.visual = nn.ModuleDict({"proj": nn.Linear(WIDTH, config.hidden_size, bias=False)})


AutoConfig.register("glade", GladeConfig, exist_ok=True)
AutoModelForCausalLM.register(GladeConfig, GladeForCausalLM, exist_ok=True)

ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [6, 5, 5], "mrope_interleaved": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("glade")
    sizes = {"intermediate_size": 96, "num_hidden_layers": 2, "tie_word_embeddings": True}
    return make_model(directory, GladeConfig, GladeForCausalLM, **sizes, patch_width=WIDTH, rope_parameters=ROPE)


def make_rows() -> list[dict[str, Any]]:
    """Return six rows with a picture, among them two pairs with the same text, and two rows without a picture."""
    random = np.random.RandomState(0)
    rows = []
    for number in range(8):
        row = {"query": f"What is {number % 5}?", "response": f"It is {number % 5}."}
        if number % 4 != 3:
            seen = f"See {PLACEHOLDER * 4}."
            is_late = number % 5 % 2
            row["query"] = f"{row['query']} Look at this one for long. {seen}" if is_late else f"{seen} {row['query']}"
            row["picture"] = random.randn(4, WIDTH).round(3).tolist()
        rows.append(row)
    return rows


ROWS = make_rows()


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("rows") / "pictures.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def samples_of(model: Path, rows: Sequence[dict[str, Any]]) -> list[Sample]:
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    encoder = make_encoder(SftArgs(max_length=128), tokenizer, resolve(model))
    encoded = [encoder(parse_seen(row, system=None, source="")) for row in rows]
    return [sample for each in encoded for sample in each.samples]


class Turns(nn.Module):
    """transformers' cosines and sines at the positions of one sample. Arguments are ignored."""

    def __init__(self, config: Any, axes: np.ndarray):
        super().__init__()
        sizes = {"hidden_size": config.hidden_size, "num_attention_heads": config.num_attention_heads}
        self.turns = Qwen3VLTextRotaryEmbedding(
            Qwen3VLTextConfig(**sizes, head_dim=config.head_dim, rope_parameters=dict(ROPE))
        )
        self.axes_31S = torch.from_numpy(axes).T[:, None]

    def forward(self, hidden: torch.Tensor, position_ids: torch.Tensor) -> Any:
        return self.turns(hidden, self.axes_31S[..., : hidden.size(1)])


class Seeing:
    """transformers' layers for one sample. The outputs of the tower replace the embeddings of placeholders."""

    def __init__(self, directory: Path, sample: Sample):
        self.reference = Reference.load(directory, "qwen3", 1)
        trunk = self.reference.trunk
        trunk.model.rotary_emb = Turns(trunk.config, sample.extras[AXES])
        patches_IW = torch.from_numpy(np.array(sample.extras["patches"], np.float32)).view(-1, WIDTH)
        features_IH = F.linear(patches_IW, load_file(directory / "model.safetensors")["visual.proj.weight"])
        self.ids_BS = torch.from_numpy(sample.input_ids).long()[None]
        placeholder = AutoTokenizer.from_pretrained(directory).convert_tokens_to_ids(PLACEHOLDER)

        def exchange(_: Any, ids: tuple[torch.Tensor], embeddings_BSH: torch.Tensor) -> torch.Tensor:
            return embeddings_BSH.masked_scatter((ids[0] == placeholder)[..., None], features_IH)

        trunk.model.embed_tokens.register_forward_hook(exchange)

    @torch.no_grad()
    def logits(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logits of the trunk [1, S, V] and of the head [1, S - 1, V]."""
        states, _ = self.reference.trunk_states(self.ids_BS)
        _, of_head = self.reference.head_states(0, states, self.ids_BS.roll(-1, dims=1))
        output_layer = self.reference.trunk.lm_head
        return output_layer(states), output_layer(of_head)[:, :-1]  # behind the last token there is none


@torch.no_grad()
def logits_of(built: GPTModel, batch: Batch, axes_3BS: torch.Tensor | None) -> Logits:
    result = built.eval()(
        ModelInputs(
            batch.tokens_KBS[0],
            batch.position_ids_BS,
            mtp_input_ids=batch.tokens_KBS[1:],
            packed_seq_params=describe_packed(batch.cu_seqlens),
            tower_inputs=TowerInputs.of(batch),
            axes_3BS=axes_3BS,
        )
    )
    assert isinstance(result, Logits)
    return result


def open_glade(directory: Path, mesh: Any) -> GPTModel:
    (built,), report = open_model(resolve(directory), mesh, dtype=torch.float32)
    assert "tower.linear.weight" in report.loaded
    assert not report.carried
    return built


# What swiftlite does with it


def test_it_is_planned(model):
    (whole,) = estimate(hf_config(model), Setup(max_length=64))
    hf = AutoModelForCausalLM.from_pretrained(model)
    assert whole.parameters == sum(parameter.numel() for parameter in hf.parameters())


def test_samples_bring_pictures_into_batches(model):
    """A batch has the patches of all sequences, and the index of the patch for each token of trunk and head."""
    samples = samples_of(model, ROWS[:2])
    batch = collate(samples, 0, num_drafts=1, extras=EXTRAS)
    assert torch.equal(batch.items["patches"], torch.tensor(ROWS[0]["picture"] + ROWS[1]["picture"]))
    placeholder = int(samples[0].input_ids[samples[0].extras[ITEM] == 0][0])
    item_KBS = batch.extras[ITEM]
    assert torch.equal(item_KBS >= 0, batch.tokens_KBS == placeholder)
    for item_BS in item_KBS:
        assert item_BS[item_BS >= 0].tolist() == list(range(8))
    assert torch.equal(item_KBS[1, :, :-1], item_KBS[0, :, 1:])
    axes_3BS = batch.axes_3BS
    assert axes_3BS is not None
    assert axes_3BS[:, 0, : len(samples[0])].T.tolist() == samples[0].extras[AXES].tolist()


@pytest.mark.parametrize("row", [0, 3], ids=["picture", "text"])
def test_trunk_and_head_compute_what_transformers_does(model, mesh, row):
    (sample,) = samples_of(model, ROWS[row : row + 1])
    batch = collate([sample], 0, num_drafts=1, extras=EXTRAS)
    ours = logits_of(open_glade(model, mesh), batch, batch.axes_3BS)
    trunk, head = Seeing(model, sample).logits()
    assert torch.equal(ours.main, trunk)
    assert torch.equal(ours.mtp[0][:, :-1], head)


def args_of(model: Path, rows: Path, output_dir: Path, **options: Any) -> SftArgs:
    usual: dict[str, Any] = {"max_length": 128, "global_batch_size": 8, "split_dataset_ratio": 0.0}
    usual |= {"micro_batch_size": 2, "train_iters": 4, "freeze_vit": False}
    return unheard.args_of(model, rows, output_dir, **usual | options)


def metrics(run_dir: Path) -> list[dict[str, float]]:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "loss" in line]


def losses(run_dir: Path) -> list[list[float]]:
    return [[line["loss"], line["mtp_1_loss"]] for line in metrics(run_dir)]


@pytest.fixture(scope="module")
def trained(model, rows, tmp_path_factory) -> Path:
    output_dir = tmp_path_factory.mktemp("glade_run") / "run"
    launch(1, run, make_known, training.run, args_of(model, rows, output_dir, save_steps=4))
    return output_dir


def test_it_learns_what_transformers_would(model, trained):
    """The first losses of trunk and head are means over the labels of all rows."""
    sums, counts = np.zeros(2), np.zeros(2)
    for sample in samples_of(model, ROWS):
        labels = torch.from_numpy(sample.labels).long()
        for depth, logits in enumerate(Seeing(model, sample).logits()):
            targets = labels[1 + depth :]
            predicted = logits[0, : len(targets)]
            sums[depth] += F.cross_entropy(predicted, targets, ignore_index=-100, reduction="sum").item()
            counts[depth] += (targets != -100).sum().item()
    first, *_, last = losses(trained)
    assert first == pytest.approx((sums / counts).tolist(), rel=2e-5)  # float32 sums in another order
    assert last[0] < first[0]


def test_it_is_exported_and_read_again(model, trained, mesh, tmp_path):
    exported = export_hf(make_known, trained, tmp_path / "hf")
    assert is_trained(load_file(model / "model.safetensors"), exported)
    test_trunk_and_head_compute_what_transformers_does(tmp_path / "hf", mesh, 0)


def test_there_and_back_it_is_the_same_to_the_bit(model, tmp_path):
    before, after = load_file(model / "model.safetensors"), there_and_back(make_known, model, tmp_path)
    assert "visual.proj.weight" in before
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)


# What is not there yet


def test_streams_which_carry_no_pictures_are_refused(model, rows, mesh, tmp_path):
    with pytest.raises(UserError) as raised:
        training.prepare(args_of(model, rows, tmp_path / "run", streaming=True), mesh, {"model": resolve(model)})
    assert mentions(raised.value.problem, "--streaming")


def test_rows_of_a_method_without_pictures_are_refused(model, mesh):
    (sample,) = samples_of(model, ROWS[3:4])
    with pytest.raises(UserError) as raised:
        logits_of(open_glade(model, mesh), collate([sample], 0, num_drafts=1), None)
    assert mentions(raised.value.problem, "tower")
