"""Fix bugs of megatron-core that subclasses and specs cannot fix, on any device.

Importing this module has no effect. `install()` is called once per process, and `lay_out` is a context for a single
call. Paths are relative to megatron/core of the 0.16.1 wheel unless stated otherwise. If a fix is removed,
tests/runtime/test_megatron_fixes.py fails; for `lay_out`, tests/growth/test_meshes.py fails.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.optimizer import clip_grads, optimizer
from megatron.core.transformer import multi_latent_attention, transformer_block
from megatron.core.transformer.moe import moe_utils
from megatron.core.utils import local_multi_tensor_l2_norm

STOCK_COPY = optimizer._multi_tensor_copy_this_to_that


def define_te_general_gemm() -> None:
    """Define `te_general_gemm` as None where it is undefined.

    transformer/moe/moe_utils.py:1192 and 1225 compare this name with None. Without Transformer Engine, line 24 leaves
    the name undefined, so every router raises a NameError.
    """
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None  # type: ignore[attr-defined]


def ignore_mocked_te() -> None:
    """Set HAVE_TE to false for latent attention without Transformer Engine.

    Without Transformer Engine, transformer/multi_latent_attention.py:54 imports mocks, but sets HAVE_TE to true. Line
    183 passes a mock to isinstance, so every latent attention raises a TypeError.
    """
    if find_spec("transformer_engine") is None:
        multi_latent_attention.HAVE_TE = False


def enable_block_recompute() -> None:
    """Make a transformer block call its method `_checkpointed_forward`, as megatron-core up to 0.17 does.

    transformer/transformer_block.py:625 of 0.19 calls a function instead of this method, which
    model/layers/recompute.py overrides. Blocks without the method still use the function.
    """
    stock = getattr(transformer_block, "checkpointed_forward", None)
    if stock is None or stock is _checkpointed_forward:
        return
    transformer_block.checkpointed_forward = _checkpointed_forward  # type: ignore[attr-defined]


def _checkpointed_forward(block: torch.nn.Module, **inputs: Any) -> Any:
    own = getattr(block, "_checkpointed_forward", None)
    if own is None:
        from megatron.core.recompute import checkpointed_forward  # pyright: ignore[reportMissingImports]

        return checkpointed_forward(block, **inputs)
    return own(**inputs)


def skip_results_server() -> None:
    """Prevent megatron-core from starting its server process for the results of checkpoint writers.

    dist_checkpointing/strategies/filesystem_async.py:49 starts this server before the first save. A signal to the
    process group would end the server and make the save fail. train/checkpoint/files.py uses a file in memory instead.
    This function sets the server's queue, because megatron-core starts the server only if the queue is not set.
    """
    filesystem_async._results_queue = filesystem_async._results_queue or object()


def compute_norm_together() -> None:
    """Compute the gradient norm with one kernel launch for many tensors.

    Without Transformer Engine and Apex, `l2_norm_impl` of optimizer/clip_grads.py is a function at utils.py:1205, which
    waits for the GPU once per parameter (12,000 times per step with 48 layers of 128 experts).
    """
    if clip_grads.l2_norm_impl is local_multi_tensor_l2_norm:
        clip_grads.l2_norm_impl = _l2_norm


def _l2_norm(
    chunk_size: int, noop_flag: torch.Tensor, tensor_lists: list[list[torch.Tensor]], per_tensor: bool
) -> tuple[torch.Tensor, None]:
    """Return the norm of all tensors together, float32 [1] on their device."""
    (tensors,) = tensor_lists
    return torch.nn.utils.get_total_norm(tensors, foreach=True).reshape(1), None


def copy_weights_together() -> None:
    """Copy master weights to the model's weights in one kernel launch for many tensors.

    optimizer/optimizer.py:93 launches a kernel per parameter, because Apex has no kernel for bfloat16.
    """
    optimizer._multi_tensor_copy_this_to_that = _copy  # type: ignore[assignment]


def _copy(this: list[torch.Tensor], that: list[torch.Tensor], overflow_buf: torch.Tensor | None = None) -> None:
    """Copy the tensors of the first list to those of the second list.

    Args:
        overflow_buf: unused.
    """
    foreach: Any = torch  # torch's functions for lists of tensors have no types
    if this:
        foreach._foreach_copy_(that, this)


@contextmanager
def lay_out(ranks: range) -> Iterator[None]:
    """Make initialize_model_parallel create groups only of these ranks, in this context.

    parallel_state.py:736 uses all processes of the job, and lines 775 and 798 number them from 0, although
    RankGenerator supports an offset. All processes must call initialize_model_parallel, because torch requires this for
    new groups. Each process stores the groups that it belongs to.
    """
    stock_generator, stock_size = parallel_state.RankGenerator, torch.distributed.get_world_size

    def generator(*, rank_offset: int, **options: Any) -> parallel_state.RankGenerator:
        return stock_generator(rank_offset=rank_offset + ranks.start, **options)

    def world_size(group: Any = None) -> int:
        if group is None:
            return len(ranks)
        return stock_size(group)

    parallel_state.RankGenerator = generator  # type: ignore[assignment,misc]
    torch.distributed.get_world_size = world_size
    try:
        yield
    finally:
        parallel_state.RankGenerator, torch.distributed.get_world_size = stock_generator, stock_size  # type: ignore[misc]


def install() -> None:
    """Apply the fixes that the installed packages need. Repeated calls have no effect."""
    define_te_general_gemm()
    ignore_mocked_te()
    enable_block_recompute()
    skip_results_server()
    compute_norm_together()
    copy_weights_together()
