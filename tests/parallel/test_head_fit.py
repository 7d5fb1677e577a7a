"""Test `fit_last_layer` for every kind of layout against a fit with numpy to transformers' states."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from swiftlite.args.commands import SftArgs
from swiftlite.args.fields import MoeArgs
from swiftlite.data.batch import collate, collate_packed
from swiftlite.data.sample import make_sample
from swiftlite.families.resolved import resolve
from swiftlite.heads import Heads
from swiftlite.model.open import open_model
from swiftlite.plan.layout import layout_of
from swiftlite.runtime.distributed import session
from swiftlite.train.head_fit import RIDGE, fit_heads, samples_to_fit
from tests.parallel.launch import launch, open_store, prepare_session
from tests.parallel.parity import CASES, SIZES, TP2_SP
from tests.tiny import make_tiny_hf

pytestmark = pytest.mark.gloo

NAMES = ("PP2", "PP2xVPP2", "CP2", "DP2")
LAYOUTS: dict[str, dict[str, Any]] = {"one": {}, "TP2+SP": TP2_SP} | {name: CASES[name].options for name in NAMES}
PACKED = ("TP2+SP", "CP2")
DEPTH = 2
VOCABULARY = 128


def make_rows() -> list[np.ndarray]:
    """Return rows of several lengths. They have more tokens in total than a projection has inputs."""
    generator = np.random.default_rng(0)
    return [generator.integers(0, VOCABULARY, length) for length in (24, 40, 16, 32) * 6]


@dataclass(frozen=True)
class Job:
    """A fit with a layout. The first rank that has the heads writes their projections to `path`."""

    hf_dir: Path
    path: Path
    options: dict[str, Any]
    is_packed: bool


def fit_all(jobs: list[Job], ports: list[int]) -> None:
    for job, port in zip(jobs, ports, strict=True):
        prepare_session(port)
        fit(job)


def fit(job: Job) -> None:
    samples = [make_sample(row, np.ones(len(row))) for row in make_rows()]
    with session(layout_of(SftArgs(model=str(job.hf_dir), **job.options)), timeout_minutes=2) as mesh:
        chunks, _ = open_model(
            resolve(job.hf_dir), mesh, dtype=torch.float32, heads=Heads(DEPTH), mtp_init="fit_last_layer"
        )
        mine = samples[mesh.dp.rank() :: mesh.dp.size()]
        pairs = [mine[start : start + 2] for start in range(0, len(mine), 2)]
        if job.is_packed:
            packed: dict[str, Any] = {"num_drafts": DEPTH, "pad_each_to_multiple_of": 4, "pad_to_multiple_of": 4}
            batches = [collate_packed(pair, 0, **packed) for pair in pairs]
        else:
            batches = [collate(pair, 0, num_drafts=DEPTH, pad_to_multiple_of=4) for pair in pairs]
        fit_heads(chunks, mesh, batches)
        for chunk in chunks:
            if chunk.mtp_process and mesh.dp_cp.rank() == 0:
                for depth in range(DEPTH):
                    weight = chunk.get_parameter(f"mtp.layers.{depth}.eh_proj.weight")
                    torch.save(weight.detach(), f"{job.path}-{depth}-{mesh.tp.rank()}")


def read_projection(path: Path, depth: int) -> torch.Tensor:
    """Return the whole projection from the parts that ranks have written."""
    return torch.cat([torch.load(part) for part in sorted(path.parent.glob(f"{path.name}-{depth}-*"))])


@pytest.fixture(scope="module")
def fitted(tmp_path_factory) -> tuple[Path, Path]:
    """Return the model's directory and the directory of the projections."""
    root = tmp_path_factory.mktemp("fit")
    hf_dir = make_tiny_hf(root / "hf", "llama", depth=0, **SIZES)
    jobs = [Job(hf_dir, root / name, options, False) for name, options in LAYOUTS.items() if name != "one"]
    jobs += [Job(hf_dir, root / f"{name} packed", LAYOUTS[name], True) for name in PACKED]
    stores = [open_store() for _ in jobs]
    launch(2, fit_all, jobs, [store.port for store in stores])
    alone = Job(hf_dir, root / "one", {}, False)
    store = open_store()
    launch(1, fit_all, [alone], [store.port])
    return hf_dir, root


def expected_projection(hf_dir: Path) -> np.ndarray:
    """Compute the projection of depth 1 with numpy.

    The projection maps the normalized embedding and state to the last layer's input one token later.
    """
    model = AutoModelForCausalLM.from_pretrained(hf_dir, dtype=torch.float32).eval()
    inputs, targets = [], []

    def normed(states: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(states, states.shape[-1:], eps=model.config.rms_norm_eps)

    for row in make_rows():
        token_ids = torch.from_numpy(row)[None]
        with torch.no_grad():
            states = model.model(token_ids, output_hidden_states=True).hidden_states
            embeddings = model.get_input_embeddings()(token_ids)
        inputs.append(torch.cat([normed(embeddings[0, 1:]), normed(states[-1][0, :-1])], dim=-1).numpy())
        targets.append(states[-2][0, 1:].numpy())
    input_NH, target_NH = np.concatenate(inputs).astype(np.float64), np.concatenate(targets).astype(np.float64)
    # The ridge as rows of their own: the plain least-squares problem of numpy then has it.
    ridge = np.sqrt(RIDGE * len(input_NH)) * np.eye(input_NH.shape[1])
    nothing = np.zeros((len(ridge), target_NH.shape[1]))
    solution, *_ = np.linalg.lstsq(np.concatenate([input_NH, ridge]), np.concatenate([target_NH, nothing]), rcond=None)
    return solution.T


def test_projection_is_the_least_squares_fit(fitted):
    hf_dir, root = fitted
    # Two float32 forward passes; the weights are about 0.1.
    np.testing.assert_allclose(read_projection(root / "one", 0), expected_projection(hf_dir), atol=1e-5)


@pytest.mark.parametrize("name", [*list(LAYOUTS)[1:], *(f"{name} packed" for name in PACKED)])
@pytest.mark.parametrize("depth", range(DEPTH))
def test_every_layout_fits_the_same(fitted, name, depth):
    _, root = fitted
    projection = read_projection(root / name, depth)
    np.testing.assert_allclose(projection, read_projection(root / "one", depth), atol=1e-5)  # sums in another order


def test_samples_are_spread_over_all_files():
    samples = [make_sample(np.full(100, number), np.ones(100)) for number in range(1000)]
    chosen = samples_to_fit(samples, hidden_size=32)  # 3,200 tokens of 100,000
    numbers = [int(sample.input_ids[0]) for sample in chosen]
    assert numbers == list(range(0, 1000, 31))
    assert len(samples_to_fit(samples[:3], hidden_size=32)) == 3


def test_fit_changes_nothing_else(tmp_path, mesh):
    hf_dir = make_tiny_hf(tmp_path / "hf", "glm4_moe", depth=0)
    samples = [make_sample(row, np.ones(len(row))) for row in make_rows()[:4]]
    chunks, _ = open_model(
        resolve(hf_dir),
        mesh,
        dtype=torch.float32,
        heads=Heads(1),
        mtp_init="fit_last_layer",
        moe=MoeArgs(moe_router_bias_update_rate=0.1),
    )
    (model,) = chunks
    before = {name: tensor.clone() for name, tensor in model.state_dict().items() if tensor is not None}
    before |= {name: tensor.clone() for name, tensor in model.named_buffers()}
    fit_heads(chunks, mesh, [collate(samples, 0, num_drafts=1)])
    after = {name: tensor for name, tensor in model.state_dict().items() if tensor is not None}
    after |= dict(model.named_buffers())
    changed = [name for name in before if not torch.equal(before[name], after[name])]
    assert changed == ["mtp.layers.0.eh_proj.weight"]
    assert model.training
