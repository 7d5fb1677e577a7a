"""Test `DryLoad` and `RunningLoad` against parameters of NaN that the same loader fills."""

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from swiftlite.bridge.tensors import Checkpoint
from swiftlite.engines.loading.load_tracker import DryLoad, RunningLoad
from tests.tiny import make_tiny_hf


class Model(nn.Module):
    """Parameters as engines fuse them: q, k, v in one parameter, stacked experts, different precisions, padded
    vocabularies.
    """

    def __init__(self):
        super().__init__()
        self.joined = nn.Parameter(torch.full((128, 64), torch.nan))
        self.stacked = nn.Parameter(torch.full((2, 96, 64), torch.nan))
        self.small = nn.Parameter(torch.full((64,), torch.nan, dtype=torch.bfloat16))
        self.turned = nn.Parameter(torch.full((96, 64), torch.nan))
        self.embedding = nn.Parameter(torch.full((192, 64), torch.nan))
        self.output = nn.Parameter(torch.full((192, 64), torch.nan))
        self.untouched = nn.Parameter(torch.full((3,), torch.nan))

    def load_weights(self, weights, left_out: str):
        layer = "model.layers.0."
        for name, tensor in weights:
            if left_out and left_out in name:
                continue
            # Both engines: param[: len(weight)].data.copy_(weight); param[len(weight) :].data.fill_(0)
            if name == "model.embed_tokens.weight":
                self.embedding[: len(tensor)].data.copy_(tensor)
                self.embedding[len(tensor) :].data.fill_(0)
            elif name == "lm_head.weight":
                self.output[: len(tensor)].data.copy_(tensor)
                self.output[len(tensor) :].data.zero_()
            if not name.startswith(layer):
                continue
            if name.endswith("q_proj.weight"):
                self.joined.data.narrow(0, 0, 64).copy_(tensor)
            elif name.endswith("k_proj.weight"):
                self.joined.data[64:96].copy_(tensor)
            elif name.endswith("v_proj.weight"):
                self.joined.data[96:] = tensor
            elif name.endswith("gate_proj.weight"):
                self.stacked.data[0].copy_(tensor)
                self.stacked.data[0].copy_(tensor)
            elif name.endswith("up_proj.weight"):
                self.stacked.data[1].copy_(torch.cat(tensor.chunk(2)))
            elif name.endswith("input_layernorm.weight"):
                self.small.data.copy_(tensor.to(torch.bfloat16))
            elif name.endswith("down_proj.weight"):
                self.turned.data.copy_(tensor.t().contiguous())


VOCABULARY = 130  # tokens were added: padded to 192
LEFT_OUT = ["", "k_proj", "up_proj", "layernorm", "down_proj", "embed_tokens"]


@pytest.mark.parametrize("left_out", LEFT_OUT)
def test_it_counts_what_stays_nan(tmp_path, left_out):
    checkpoint = Checkpoint(make_tiny_hf(tmp_path, "qwen3", vocab_size=VOCABULARY))
    real = Model()
    real.load_weights(((key, checkpoint.read(key)) for key in checkpoint.entries), left_out)
    nans = {name: int(parameter.isnan().sum()) for name, parameter in real.named_parameters()}

    recorder = DryLoad(checkpoint.stored)
    with torch.device("meta"):
        model = Model()
    with recorder:
        model.load_weights(recorder.weights(), left_out)
    assert recorder.unfilled(model) == {name: count for name, count in nans.items() if count}
    parts = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "input_layernorm", "down_proj")
    parts += ("embed_tokens", "lm_head")
    expected = {part for part in parts if not left_out or left_out not in part}
    assert {part for part in parts if any(f".{part}." in f".{key}" for key in recorder.used)} == expected
    assert len(recorder.used) == len(expected)


@pytest.mark.parametrize("left_out", LEFT_OUT)
def test_a_running_model_that_loads_the_same(tmp_path, left_out):
    """`RunningLoad` receives real tensors in several buckets."""
    checkpoint = Checkpoint(make_tiny_hf(tmp_path, "qwen3", vocab_size=VOCABULARY))
    tensors = {key: checkpoint.read(key) for key in checkpoint.entries}
    model, filling = Model(), RunningLoad()
    filling.expect(tensors)
    with torch.no_grad(), filling:
        model.load_weights(tensors.items(), left_out)
    holes = {name for name, parameter in model.named_parameters() if parameter.isnan().any()}
    assert set(filling.unfilled(model)) == holes
    assert not left_out or holes > {"untouched"}


def test_a_vision_tower_keeps_what_it_has():
    """No transfer contains the tower. Missing parameters of the language model are still detected."""
    model = nn.ModuleDict({"visual": nn.Linear(2, 2), "language_model": nn.Linear(2, 2)})
    filling = RunningLoad()
    with torch.no_grad(), filling:
        model.get_parameter("language_model.weight").copy_(torch.ones(2, 2))
    assert filling.unfilled(model) == {"language_model.bias": 2}


def test_a_number_that_is_read_as_a_number_counts_as_read(tmp_path):
    """SGLang's loader fills a parameter of one element in this way."""
    save_file({"scalar": torch.ones(1), "other": torch.ones(1)}, tmp_path / "model.safetensors")
    recorder = DryLoad(Checkpoint(tmp_path).stored)
    with torch.device("meta"):
        model = nn.ParameterDict({"scalar": nn.Parameter(torch.empty(1)), "other": nn.Parameter(torch.empty(1))})
    with recorder:
        model["scalar"].data.fill_(dict(recorder.weights())["scalar"].item())
    assert (recorder.used, recorder.unfilled(model)) == ({"scalar"}, {"other": 1})


def test_it_objects_to_a_shape_as_torch_does(tmp_path):
    recorder = DryLoad(Checkpoint(make_tiny_hf(tmp_path, "qwen3")).stored)
    target = torch.empty(3, 3, device="meta")
    with recorder, pytest.raises(RuntimeError):
        target.copy_(dict(recorder.weights())["model.embed_tokens.weight"])


class Quantized(nn.Module):
    """A module that was built for codes with a scale, and one that was built for numbers."""

    def __init__(self):
        super().__init__()
        self.codes = nn.Parameter(torch.zeros(64, 64, dtype=torch.int8), requires_grad=False)
        self.scale = nn.Parameter(torch.zeros(64, 1), requires_grad=False)
        self.plain = nn.Parameter(torch.zeros(64, 64, dtype=torch.bfloat16), requires_grad=False)

    def load_weights(self, weights):
        for name, tensor in weights:
            self.get_parameter(name).data.copy_(tensor)


CODES = torch.ones(64, 64, dtype=torch.int8)
NUMBERS = torch.ones(64, 64, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("name", "tensor", "is_cast"),
    [
        ("codes", CODES, False),
        ("codes", NUMBERS, True),
        ("codes", NUMBERS.float(), True),
        ("scale", torch.ones(64, 1, dtype=torch.bfloat16), False),
        ("plain", NUMBERS.float(), False),
        ("plain", CODES, True),
        ("plain", NUMBERS.to(torch.float8_e4m3fn), True),
    ],
)
def test_casts_between_numbers_and_codes(tmp_path, name, tensor, is_cast):
    tensors = {name: tensor}
    running = RunningLoad()
    running.expect(tensors)
    with running:
        Quantized().load_weights(tensors.items())
    save_file(tensors, tmp_path / "model.safetensors")
    dry = DryLoad(Checkpoint(tmp_path).stored)
    with torch.device("meta"):
        model = Quantized()
    with dry:
        model.load_weights(dry.weights())
    for tracker in (running, dry):
        assert list(tracker.casts) == [name] * is_cast
        assert [name in line for line in tracker.cast_problems()] == [True] * is_cast
