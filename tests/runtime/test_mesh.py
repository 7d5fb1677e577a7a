"""Test which mesh megatron-core's globals belong to. tests/growth/test_meshes.py tests models of several meshes."""

import pytest
import torch.distributed as dist
from megatron.core import parallel_state

from swiftlite.args.fields import ParallelLayout
from swiftlite.base.errors import OptionError
from swiftlite.runtime.distributed import session
from swiftlite.runtime.mesh import Mesh
from tests.messages import naming
from tests.parallel.launch import launch


def tensor_parallel_group() -> object:
    """Return the group that megatron-core uses if none is passed."""
    return parallel_state.get_tensor_model_parallel_group()


def test_the_mesh_of_the_session_is_active(mesh):
    assert tensor_parallel_group() is mesh.tp


def test_a_new_mesh_has_its_own_groups_and_is_not_active(mesh):
    other = Mesh.create(mesh.device, ParallelLayout())
    names = ("tp", "pp", "cp", "tp_cp", "dp", "dp_cp", "ep")
    assert not [name for name in names if getattr(other, name) is getattr(mesh, name)]
    assert tensor_parallel_group() is mesh.tp


def test_active_meshes_nest(mesh):
    other = Mesh.create(mesh.device, ParallelLayout())
    with other.active():
        assert tensor_parallel_group() is other.tp
        with mesh.active():
            assert tensor_parallel_group() is mesh.tp
        assert tensor_parallel_group() is other.tp
    assert tensor_parallel_group() is mesh.tp


def test_an_error_leaves_the_mesh_before_active(mesh):
    other = Mesh.create(mesh.device, ParallelLayout())
    with pytest.raises(KeyError), other.active():
        raise KeyError
    assert tensor_parallel_group() is mesh.tp


def test_a_layout_that_the_processes_do_not_divide_into(mesh):
    with pytest.raises(OptionError, match=naming("--tensor_model_parallel_size 2 1")):
        Mesh.create(mesh.device, ParallelLayout(tensor_model_parallel_size=2))
    assert tensor_parallel_group() is mesh.tp


def virtual_stages() -> list[int | None]:
    """Return megatron-core's number of virtual stages in a mesh with such stages, in a mesh without, and after the
    session.
    """
    found = []
    virtual = ParallelLayout(pipeline_model_parallel_size=2, num_virtual_stages_per_pipeline_rank=2)
    with session(virtual) as mesh:
        plain = Mesh.create(mesh.device, ParallelLayout())
        found.append(parallel_state.get_virtual_pipeline_model_parallel_world_size())
        with plain.active():
            found.append(parallel_state.get_virtual_pipeline_model_parallel_world_size())
    assert not dist.is_initialized()
    assert not parallel_state.is_initialized()
    found.append(parallel_state.get_virtual_pipeline_model_parallel_world_size())
    return found


@pytest.mark.gloo
def test_nothing_of_one_mesh_shows_in_another_or_after_the_session():
    """The number of virtual stages is not a group, so replacing groups does not reset it."""
    assert launch(2, virtual_stages) == [[2, None, None], [2, None, None]]
