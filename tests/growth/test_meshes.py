"""Test several models in one job, each with its own layout.

Frameworks around training have several models in the same processes: a policy and its reference, a student and its
teacher. Each model has a mesh. A model's results must not depend on other meshes, and must be bitwise identical
whatever they computed in between.
"""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

from swiftlite import families
from swiftlite.args.fields import ParallelLayout
from swiftlite.base.heads import Heads
from swiftlite.bridge.hf_config import read_config
from swiftlite.bridge.transfer import load_hf
from swiftlite.data.batch import ahead
from swiftlite.model.build import build_model
from swiftlite.model.context_parallel import shard_sequence, unshard_sequence
from swiftlite.model.gpt import GPTModel, Logits
from swiftlite.model.inputs import ModelInputs
from swiftlite.model.ranks import broadcast_from_last_stage, broadcast_from_mesh
from swiftlite.runtime.distributed import session
from swiftlite.runtime.mesh import Mesh
from tests.messages import naming
from tests.model.test_logits import load_transformers
from tests.parallel import parity
from tests.parallel.launch import launch

pytestmark = pytest.mark.gloo

LAYOUTS = {
    "TP2": ParallelLayout(tensor_model_parallel_size=2),
    "PP2": ParallelLayout(pipeline_model_parallel_size=2),
    "CP2": ParallelLayout(context_parallel_size=2),
}
PLACES = {"TP2": range(1, 3), "PP2": range(2), "CP2": range(1, 3)}
"""Ranks (of three) that hold the model, by layout, if the layout does not use all ranks."""
TURNS = ("TP2", "PP2", "CP2", "TP2", "CP2", "PP2")
TOKENS_BS = torch.arange(3, 27).view(2, 12)
POSITIONS_BS = torch.arange(12).expand(2, 12)


def take_turns(hf_dir: Path) -> list[torch.Tensor]:
    """Load one checkpoint into a model for each layout in this process; return the logits of each turn."""
    with session(LAYOUTS["TP2"]) as mesh:
        meshes = {"TP2": mesh}
        for name in ("PP2", "CP2"):
            meshes[name] = Mesh.create(mesh.device, LAYOUTS[name])
        models = {name: load(hf_dir, meshes[name]) for name in LAYOUTS}
        logits = []
        for name in TURNS:
            with meshes[name].active():
                logits.append(compute_logits(models[name], meshes[name]))
        return logits


def load(hf_dir: Path, mesh: Mesh) -> GPTModel:
    hf_config = read_config(hf_dir)
    family = families.get(hf_config)
    [model] = build_model(family.architecture(hf_config), hf_config, mesh=mesh, dtype=torch.float32, heads=Heads(1))
    load_hf([model], hf_dir, family, hf_config)
    return model.eval()


@torch.no_grad()
def compute_logits(model: GPTModel, mesh: Mesh) -> torch.Tensor:
    """Return the logits [2, B, S, V] of trunk and head for all tokens and the whole vocabulary, on every rank."""

    def own_part(tensor: torch.Tensor) -> torch.Tensor:
        return shard_sequence(tensor, -1, mesh.cp.rank(), mesh.cp.size())

    tokens_BS, next_tokens_BS = own_part(ahead(TOKENS_BS, 1, fill=0))

    def forward_step(_, model: torch.nn.Module):
        output = model(ModelInputs(tokens_BS, own_part(POSITIONS_BS), mtp_input_ids=[next_tokens_BS]))
        if isinstance(output, Logits):  # the last pipeline stage
            logits = torch.stack([output.main, *output.mtp])
            logits = torch.cat(gather(logits, mesh.tp), dim=-1)
            output = unshard_sequence(gather(logits, mesh.cp), dim=2)
        return output, lambda output, non_loss_data: output

    run = get_forward_backward_func(mesh.pp.size())
    found = run(
        forward_step_func=forward_step,
        data_iterator=iter(()),
        model=[model],
        num_microbatches=1,
        seq_length=tokens_BS.size(1),
        micro_batch_size=len(tokens_BS),
        forward_only=True,
        collect_non_loss_data=True,
        p2p_communicator=P2PCommunicator(mesh.pp, model.config),
        pg_collection=mesh.groups,
    )
    return broadcast_from_last_stage(found[0] if found else torch.empty(2, *TOKENS_BS.shape, model.vocab_size), mesh)


def gather(tensor: torch.Tensor, group: dist.ProcessGroup) -> list[torch.Tensor]:
    parts = [torch.empty_like(tensor) for _ in range(group.size())]
    dist.all_gather(parts, tensor.contiguous(), group=group)
    return parts


@pytest.fixture(scope="module")
def turns(tmp_path_factory) -> tuple[Path, list[list[torch.Tensor]]]:
    """Return a checkpoint, and the logits that each process computed from it."""
    hf_dir = parity.make_model(tmp_path_factory.mktemp("model"), "qwen3")
    return hf_dir, launch(2, take_turns, hf_dir)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_mesh_computes_the_same_model(turns, mesh, layout):
    hf_dir, ranks = turns
    alone = compute_logits(load(hf_dir, mesh), mesh)
    with torch.no_grad():
        theirs = load_transformers(hf_dir, "qwen3", torch.float32)(TOKENS_BS).logits
    assert torch.equal(alone[0], theirs)
    for logits in ranks:
        ours = logits[TURNS.index(layout)]
        # As in tests/parallel/test_bridge.py: sums over two halves, float32 rounding on logits of about 10; a misplaced
        # part differs by about 1.
        torch.testing.assert_close(ours, alone, rtol=1e-5, atol=1e-4)
        assert torch.equal(ours.argmax(-1), alone.argmax(-1))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_meshes_do_not_disturb_each_other(turns, layout):
    """Between the two turns of each layout, all other layouts had a turn."""
    _, ranks = turns
    first, second = (turn for turn, name in enumerate(TURNS) if name == layout)
    for logits in ranks:
        assert torch.equal(logits[first], logits[second])


def test_ranks_agree(turns):
    _, (one, other) = turns
    assert all(map(torch.equal, one, other))


def share_ranks(hf_dir: Path) -> list[torch.Tensor]:
    """In each of three processes, use a model on each pair of neighbors and a model on all ranks.

    Return the logits of each turn, and those of the model on all ranks.
    """
    with session() as mesh:
        whole = load(hf_dir, mesh)
        meshes = {name: Mesh.create(mesh.device, LAYOUTS[name], ranks=ranks) for name, ranks in PLACES.items()}
        models = {name: load(hf_dir, part) for name, part in meshes.items() if part.is_here}
        logits = []
        for name in TURNS:
            result = torch.zeros(2, *TOKENS_BS.shape, whole.vocab_size)
            if name in models:
                with meshes[name].active():
                    result = compute_logits(models[name], meshes[name])
            logits.append(broadcast_from_mesh(result, meshes[name]))
        return [*logits, compute_logits(whole, mesh)]


def test_meshes_over_parts_of_the_ranks(tmp_path, mesh):
    """The middle one of three ranks holds a part of every model. Results are sent to ranks outside of a mesh."""
    hf_dir = parity.make_model(tmp_path, "qwen3")
    alone = compute_logits(load(hf_dir, mesh), mesh)
    ranks = launch(3, share_ranks, hf_dir)
    for logits in ranks:
        assert torch.equal(logits[-1], alone)
        for turn, name in enumerate(TURNS):
            # As above: sums over two halves.
            torch.testing.assert_close(logits[turn], alone, rtol=1e-5, atol=1e-4)
            assert torch.equal(logits[turn], logits[TURNS.index(name)])
            assert torch.equal(logits[turn], ranks[0][turn])


def test_ranks_that_are_no_part_of_the_job(mesh):
    for ranks in (range(1, 2), range(0), range(-1, 1)):
        with pytest.raises(ValueError, match=naming(str(ranks))):
            Mesh.create(mesh.device, ParallelLayout(), ranks=ranks)
