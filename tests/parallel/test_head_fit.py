"""Test `fit_last_layer` for every kind of layout against fits with numpy to transformers' states."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from swiftlite.args.commands import SftArgs
from swiftlite.args.fields import MoeArgs
from swiftlite.base.heads import Heads
from swiftlite.bridge.placement import global_name
from swiftlite.data.batch import collate, collate_packed
from swiftlite.data.sample import make_sample
from swiftlite.families.drafters import DrafterOptions, with_drafter
from swiftlite.families.layer import Layer
from swiftlite.families.resolved import HfModel, resolve
from swiftlite.model import trunk
from swiftlite.model.open import open_model
from swiftlite.plan.layout import layout_of
from swiftlite.runtime.distributed import session
from swiftlite.train.head_fit import RIDGE, fit_heads, samples_to_fit
from tests.model_tensors import tensor_of
from tests.parallel.launch import launch, open_store, prepare_session
from tests.parallel.parity import CASES, SIZES, TP2_SP
from tests.tiers import all_but, selected
from tests.tiny import make_tiny_hf

pytestmark = pytest.mark.gloo

NAMES = ("PP2xVPP2", "CP2", "DP2")
LAYOUTS: dict[str, dict[str, Any]] = {"one": {}, "TP2+SP": TP2_SP} | {name: CASES[name].options for name in NAMES}
PACKED = ("CP2",)
DEPTH = 2
FITTED = {"eh_proj": 0, "transformer_layer.mlp.linear_fc2": 1}
"""The fitted matrices of a head, and the axis along which tensor-parallel ranks split each."""
FEATURES = (1, 2)
PROJECTIONS = dict.fromkeys(("eh_proj.embedding", "eh_proj.first", "eh_proj.later"), 0)
"""The same for the projection of a head that reads FEATURES."""
ROUNDING = {"eh_proj": 1e-5, "transformer_layer.mlp.linear_fc2": 5e-5}
"""Differences due to the order of float32 sums. The second fit amplifies those of the first."""
VOCABULARY = 128


def make_rows() -> list[np.ndarray]:
    """Return rows of several lengths. They have more tokens in total than a projection has inputs."""
    generator = np.random.default_rng(0)
    return [generator.integers(0, VOCABULARY, length) for length in (24, 40, 16, 32) * 6]


@dataclass(frozen=True)
class Job:
    """A fit with a layout. The first rank that has the heads writes their fitted matrices to `path`.

    Attributes:
        features: numbers of the layers whose inputs a single head reads as well.
    """

    hf_dir: Path
    path: Path
    options: dict[str, Any]
    is_packed: bool
    features: tuple[int, ...] = ()


def fit_all(jobs: list[Job], ports: list[int]) -> None:
    for job, port in zip(jobs, ports, strict=True):
        prepare_session(port)
        fit(job)


def fit(job: Job) -> None:
    samples = [make_sample(row, np.ones(len(row))) for row in make_rows()]
    hf_model = resolve(job.hf_dir)
    hf_model = replace(hf_model, config=with_drafter(hf_model.config, DrafterOptions(mtp_features=job.features)))
    heads, names = replace(hf_model.heads, layers=DEPTH), FITTED
    if job.features:
        heads, names = replace(heads, layers=1, unroll=DEPTH), PROJECTIONS | FITTED
        names.pop("eh_proj")
    with session(layout_of(SftArgs(model=str(job.hf_dir), **job.options)), timeout_minutes=2) as mesh:
        chunks, _ = open_model(hf_model, mesh, dtype=torch.float32, heads=heads, mtp_init="fit_last_layer")
        mine = samples[mesh.dp.rank() :: mesh.dp.size()]
        pairs = [mine[start : start + 2] for start in range(0, len(mine), 2)]
        if job.is_packed:
            packed: dict[str, Any] = {"num_drafts": DEPTH, "pad_each_to_multiple_of": 4, "pad_to_multiple_of": 4}
            batches = [collate_packed(pair, 0, **packed) for pair in pairs]
        else:
            batches = [collate(pair, 0, num_drafts=DEPTH, pad_to_multiple_of=4) for pair in pairs]
        fit_heads(chunks, mesh, batches, block_of(hf_model))
        for chunk in chunks:
            if chunk.mtp_process and mesh.dp_cp.rank() == 0:
                for depth in range(heads.layers):
                    for name in names:
                        weight = tensor_of(chunk, f"mtp.layers.{depth}.{name}.weight")
                        torch.save(weight.detach(), f"{job.path}-{name}-{depth}-{mesh.tp.rank()}")


def block_of(hf_model: HfModel) -> Layer:
    """Return the decoder layer of the model's heads."""
    return hf_model.family.architecture(hf_model.config).mtp_block


def read_fitted(path: Path, name: str, depth: int) -> np.ndarray:
    """Return a whole matrix from the parts that ranks have written."""
    parts = sorted(path.parent.glob(f"{path.name}-{name}-{depth}-*"))
    return torch.cat([torch.load(part) for part in parts], dim=(FITTED | PROJECTIONS)[name]).numpy()


@pytest.fixture(scope="module")
def fitted(request, tmp_path_factory) -> tuple[Path, Path]:
    """Return the model's directory and the directory of the fitted matrices."""
    root = tmp_path_factory.mktemp("fit")
    hf_dir = make_tiny_hf(root / "hf", "llama", depth=0, **SIZES)
    jobs = []
    for name in selected(request, "name"):
        layout = name.removesuffix(" packed")
        jobs.append(Job(hf_dir, root / name, LAYOUTS[layout], layout != name))
    stores = [open_store() for _ in jobs]
    launch(2, fit_all, jobs, [store.port for store in stores])
    alone = Job(hf_dir, root / "one", {}, False)
    store = open_store()
    launch(1, fit_all, [alone], [store.port])
    return hf_dir, root


@dataclass(frozen=True)
class Problem:
    """Inputs [N, I] of a matrix and targets [N, H] of its outputs, float64."""

    input_NI: np.ndarray
    target_NH: np.ndarray

    @classmethod
    def of_rows(cls, inputs: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> "Problem":
        return cls(torch.cat(list(inputs)).numpy(), torch.cat(list(targets)).numpy())

    def penalty(self) -> float:
        """Return the factor of the squared matrix."""
        return RIDGE * np.square(self.input_NI).sum(0).mean()

    def solution(self) -> np.ndarray:
        # The ridge as rows of their own: the plain least-squares problem of numpy then has it.
        rows = np.sqrt(self.penalty()) * np.eye(self.input_NI.shape[1])
        nothing = np.zeros((len(rows), self.target_NH.shape[1]))
        inputs, targets = np.concatenate([self.input_NI, rows]), np.concatenate([self.target_NH, nothing])
        return np.linalg.lstsq(inputs, targets, rcond=None)[0].T

    def error(self, matrix_HI: np.ndarray) -> float:
        return np.square(self.input_NI @ matrix_HI.T - self.target_NH).sum(1).mean()

    def gradient(self, matrix_HI: np.ndarray) -> np.ndarray:
        """Return half of the objective's gradient, with the penalty."""
        return (self.input_NI @ matrix_HI.T - self.target_NH).T @ self.input_NI + self.penalty() * matrix_HI


class Reference:
    """The head of depth 1 in float64, computed with transformers' layers.

    Args:
        features: numbers of the layers whose inputs the projection reads after the embedding and the state, which is
            then that before the final norm.

    Attributes:
        projection, mlp: the least-squares problems of both fits.
        copied_HF: output matrix of the last layer's MLP.
    """

    @torch.no_grad()
    def __init__(self, hf_dir: Path, features: Sequence[int] = ()):
        self.features = features
        model: Any = AutoModelForCausalLM.from_pretrained(hf_dir, dtype=torch.float64).eval()
        self.copied_HF = model.model.layers[-1].mlp.down_proj.weight.numpy()
        self.eps = model.config.rms_norm_eps
        rows = [self._trunk(model, torch.from_numpy(row)[None]) for row in make_rows()]
        self.projection = Problem.of_rows([row[0] for row in rows], [row[1] for row in rows])
        projection = torch.from_numpy(self.projection.solution())
        inputs, missing = [], []
        for input_SI, _, trunk_SH in rows:
            input_SF, output_SH = self._head(model, input_SI @ projection.T)
            root_mean_square_S1 = (trunk_SH.square().mean(1, keepdim=True) + self.eps).sqrt()
            inputs.append(input_SF / root_mean_square_S1)
            missing.append((trunk_SH - output_SH) / root_mean_square_S1)
        self.mlp = Problem.of_rows(inputs, missing)

    def _trunk(self, model: Any, token_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the projection's inputs, the last layer's inputs one token later, and its outputs there."""
        last_outputs = []
        hook = model.model.norm.register_forward_pre_hook(lambda norm, args: last_outputs.append(args[0]))
        states = model.model(token_ids, output_hidden_states=True).hidden_states
        hook.remove()
        read = [states[-1], *(states[layer] for layer in self.features)]
        if self.features:
            read[0] = last_outputs[0]
        inputs = torch.cat([self._normed(states[0][0, 1:]), *(self._normed(each[0, :-1]) for each in read)], dim=-1)
        return inputs, states[-2][0, 1:], last_outputs[0][0, 1:]

    def _head(self, model: Any, hidden_SH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the inputs of the MLP's output matrix, and the state that the copied layer returns."""
        layer, inputs = model.model.layers[-1], []
        hook = layer.mlp.down_proj.register_forward_pre_hook(lambda linear, args: inputs.append(args[0]))
        rotary = model.model.rotary_emb(hidden_SH[None], torch.arange(len(hidden_SH))[None])
        output_BSH = layer(hidden_SH[None], position_embeddings=rotary, attention_mask=None)
        hook.remove()
        return inputs[0][0], output_BSH[0]

    def _normed(self, states: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(states, states.shape[-1:], eps=self.eps)


@pytest.fixture(scope="module")
def reference(fitted) -> Reference:
    hf_dir, _ = fitted
    return Reference(hf_dir)


def test_projection_is_the_least_squares_fit(fitted, reference):
    _, root = fitted
    # A float32 forward pass; the weights are about 0.1.
    expected = reference.projection.solution()
    np.testing.assert_allclose(read_fitted(root / "one", "eh_proj", 0), expected, atol=1e-5)


def test_mlp_is_the_least_squares_fit(fitted, reference):
    _, root = fitted
    change = read_fitted(root / "one", "transformer_layer.mlp.linear_fc2", 0) - reference.copied_HF
    np.testing.assert_allclose(change, reference.mlp.solution(), atol=1e-5)
    # It is the minimum of the penalized error.
    assert reference.mlp.error(change) < 0.9 * reference.mlp.error(0 * change)
    before = np.abs(reference.mlp.gradient(0 * change)).max()
    assert np.abs(reference.mlp.gradient(change)).max() < 1e-4 * before


@pytest.mark.parametrize("name", all_but([*list(LAYOUTS)[1:], *(f"{name} packed" for name in PACKED)], "CP2", "DP2"))
@pytest.mark.parametrize("depth", range(DEPTH))
@pytest.mark.parametrize("matrix", FITTED)
def test_every_layout_fits_the_same(fitted, name, depth, matrix):
    _, root = fitted
    found, expected = (read_fitted(root / layout, matrix, depth) for layout in (name, "one"))
    np.testing.assert_allclose(found, expected, atol=ROUNDING[matrix])


@pytest.mark.parametrize("name", all_but(["TP2+SP", "PP2xVPP2", "CP2"], "CP2", "PP2xVPP2"))
def test_every_layout_fits_features_the_same(tmp_path, name):
    hf_dir = make_tiny_hf(tmp_path / "hf", "llama", depth=0, **SIZES)
    for size, options in {1: {}, 2: LAYOUTS[name]}.items():
        store = open_store()
        launch(size, fit_all, [Job(hf_dir, tmp_path / str(size), options, False, FEATURES)], [store.port])
    for matrix in (*PROJECTIONS, "transformer_layer.mlp.linear_fc2"):
        found, expected = (read_fitted(tmp_path / layout, matrix, 0) for layout in ("2", "1"))
        np.testing.assert_allclose(found, expected, atol=5e-5)  # as in ROUNDING


def test_unrolled_head_with_residual_multiplier(tmp_path, mesh):
    """Only the first step of a draft is fitted. The MLP's output is scaled before it is added to the state."""
    hf_dir = make_tiny_hf(tmp_path / "hf", "granite", depth=0)
    hf_model = resolve(hf_dir)
    (model,) = chunks = open_model(
        hf_model, mesh, dtype=torch.float32, heads=Heads(1, unroll=2), mtp_init="fit_last_layer"
    )[0]
    samples = [make_sample(row, np.ones(len(row))) for row in make_rows()]
    fit_heads(chunks, mesh, [collate(samples, 0, num_drafts=2)], block_of(hf_model))
    reference = Reference(hf_dir)
    change = tensor_of(model, "mtp.layers.0.transformer_layer.mlp.linear_fc2.weight").numpy(force=True)
    change = change - reference.copied_HF
    expected = reference.mlp.solution() / hf_model.config["residual_multiplier"]
    np.testing.assert_allclose(change, expected, atol=1e-5)


def test_features_are_inputs_of_the_first_draft_alone(tmp_path, mesh):
    """The projection of later drafts has the same columns for the embedding, and is the best one with them."""
    hf_dir = make_tiny_hf(tmp_path / "hf", "llama", depth=0, num_hidden_layers=4)
    hf_model = resolve(hf_dir)
    hf_model = replace(hf_model, config=with_drafter(hf_model.config, DrafterOptions(mtp_features=FEATURES)))
    heads = replace(hf_model.heads, layers=1, unroll=2)
    (model,) = chunks = open_model(hf_model, mesh, dtype=torch.float32, heads=heads, mtp_init="fit_last_layer")[0]
    fit_heads(
        chunks,
        mesh,
        [collate([make_sample(row, np.ones(len(row))) for row in make_rows()], 0, num_drafts=2)],
        block_of(hf_model),
    )
    reference = Reference(hf_dir, FEATURES)
    embedding, first, later = (
        model.get_parameter(f"mtp.layers.0.eh_proj.{part}.weight").numpy(force=True)
        for part in ("embedding", "first", "later")
    )
    whole, size = reference.projection, len(embedding)
    np.testing.assert_allclose(np.concatenate((embedding, first), axis=1), whole.solution(), atol=1e-5)
    state = slice(size, 2 * size)
    rest = Problem(whole.input_NI[:, state], whole.target_NH - whole.input_NI[:, :size] @ embedding.T.astype(float))
    # The penalty is that of the first draft.
    gradient = (rest.input_NI @ later.T - rest.target_NH).T @ rest.input_NI + whole.penalty() * later
    assert np.abs(gradient).max() < 1e-4 * np.abs(rest.target_NH.T @ rest.input_NI).max()
    change = tensor_of(model, "mtp.layers.0.transformer_layer.mlp.linear_fc2.weight").numpy(force=True)
    np.testing.assert_allclose(change - reference.copied_HF, reference.mlp.solution(), atol=2e-5)


@pytest.mark.parametrize(
    ("family", "num_fits"),
    [("llama", 2), ("mimo", 2), ("glm4_moe", 1)],  # mimo: heads read the state before the final norm
)
def test_kept_states_change_no_bit(tmp_path, mesh, monkeypatch, family, num_fits):
    """The first fit runs the trunk; the others use its states, unless these are larger than REUSED_GB."""
    hf_model = resolve(make_tiny_hf(tmp_path / "hf", family, depth=0, vocab_size=VOCABULARY + 3))
    samples = [make_sample(row, np.ones(len(row))) for row in make_rows()]
    batches = [collate(samples[start : start + 8], 0, num_drafts=2) for start in (0, 8, 16)]
    fitted, runs = [], []
    for kept_gb in (trunk.REUSED_GB, 0.0):
        monkeypatch.setattr(trunk, "REUSED_GB", kept_gb)
        (model,) = chunks = open_model(
            hf_model, mesh, dtype=torch.float32, heads=Heads(DEPTH), mtp_init="fit_last_layer"
        )[0]
        model.decoder.layers[0].register_forward_pre_hook(lambda layer, args, kept_gb=kept_gb: runs.append(kept_gb))
        fit_heads(chunks, mesh, batches, block_of(hf_model))
        fitted.append({name: weight.detach() for name, weight in model.named_parameters()})
    kept, computed = fitted
    assert runs.count(0.0) == num_fits * DEPTH * len(batches)
    assert len(runs) - runs.count(0.0) == len(batches)
    assert all(torch.equal(kept[name], computed[name]) for name in kept)


def test_samples_are_spread_over_all_files():
    samples = [make_sample(np.full(100, number), np.ones(100)) for number in range(1000)]
    chosen = samples_to_fit(samples, num_inputs=64)  # 3,200 tokens of 100,000
    numbers = [int(sample.input_ids[0]) for sample in chosen]
    assert numbers == list(range(0, 1000, 31))
    assert len(samples_to_fit(samples[:3], num_inputs=64)) == 3


@pytest.mark.parametrize(
    ("family", "fitted"),
    [
        ("llama", ["eh_proj", "transformer_layer.mlp.linear_fc2"]),
        ("glm4_moe", ["eh_proj"]),  # experts
        ("olmo2", ["eh_proj"]),  # a norm of the MLP's output
    ],
)
def test_fit_changes_nothing_else(tmp_path, mesh, family, fitted):
    hf_model = resolve(make_tiny_hf(tmp_path / "hf", family, depth=0))
    samples = [make_sample(row, np.ones(len(row))) for row in make_rows()[:4]]
    chunks, _ = open_model(
        hf_model,
        mesh,
        dtype=torch.float32,
        heads=Heads(1),
        mtp_init="fit_last_layer",
        moe=MoeArgs(moe_router_bias_update_rate=0.1),
    )
    (model,) = chunks
    before = {name: tensor.clone() for name, tensor in model.state_dict().items() if tensor is not None}
    before |= {name: tensor.clone() for name, tensor in model.named_buffers()}
    fit_heads(chunks, mesh, [collate(samples, 0, num_drafts=1)], block_of(hf_model))
    after = {name: tensor for name, tensor in model.state_dict().items() if tensor is not None}
    after |= dict(model.named_buffers())
    changed = [global_name(name, model) for name in before if not torch.equal(before[name], after[name])]
    assert sorted(changed) == [f"mtp.layers.0.{name}.weight" for name in fitted]
    assert model.training
