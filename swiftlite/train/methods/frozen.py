"""Open a further model that is not trained, on ranks of the trained model: a teacher, a reference model or a reward
model."""

from dataclasses import replace
from typing import Any

import torch

from swiftlite.base.errors import UserError
from swiftlite.base.heads import Heads
from swiftlite.bridge.tensors import describe
from swiftlite.families.index import image_sizes
from swiftlite.families.resolved import HfModel
from swiftlite.model.gpt import GPTModel
from swiftlite.model.open import open_model
from swiftlite.plan.layout import ParallelLayout, data_parallel_size, ranks_of
from swiftlite.plan.run import row_multiple_of
from swiftlite.runtime import agreement
from swiftlite.runtime.mesh import Mesh
from swiftlite.train.batches.micro_batches import Batches
from swiftlite.train.methods.conversations import image_extras_of
from swiftlite.train.phases import Run


def open_frozen(
    run: Run, model: HfModel, layout: ParallelLayout, flag: str, **options: Any
) -> tuple[list[GPTModel], Mesh]:
    """Load a model without its heads; return its stages on this rank, in evaluation mode, and its mesh. Collective.

    Ranks that the layout leaves out have no stages.

    Args:
        layout: layout of the model.
        flag: the option that names the model, for errors.
        options: further arguments of `build_model`.

    If the rows of the run have images, the model computes them with its own tower, except reward models.

    Raises:
        UserError: the model cannot be opened, is not the same on all ranks, or divides images into other inputs.
    """
    if run.hf_model.computes_images and not model.family.is_reward_model:
        model = with_same_images(model, run.hf_model, flag)
    tensors = agreement.digest(describe(model.directory))
    # Before the ranks that the layout leaves out return, because it is collective over all ranks.
    agreement.check_agreement({f"tensors of {flag}": tensors, f"commit of {flag}": model.identity})
    mesh = mesh_of(run, model, layout)
    if not mesh.is_here:
        return [], mesh
    with mesh.active():
        chunks, _ = open_model(
            model,
            mesh,
            dtype=getattr(torch, run.args.torch_dtype),
            heads=Heads(),
            temperature=run.plan.temperature,
            kernels=run.plan.kernels,
            **options,
        )
    for chunk in chunks:
        chunk.eval()
    return chunks, mesh


def with_same_images(model: HfModel, trained: HfModel, flag: str) -> HfModel:
    """Return a frozen model with its image tower.

    Args:
        trained: the trained model.
        flag: the option that names the frozen model, for errors.

    Raises:
        UserError: the model does not divide images as the trained model does.
    """
    if image_sizes(model.config) != image_sizes(trained.config):
        problem = f"{flag} {model.name} does not divide images into the same inputs as --model"
        raise UserError(problem, "use a model with the same vision tower and tokenizer")
    return model.with_images()


def mesh_of(run: Run, model: HfModel, layout: ParallelLayout) -> Mesh:
    """Return the mesh of a model, which can leave out the last ranks. Collective.

    The last stage of a tied model uses its embedding, so ties are part of a mesh.
    """
    if layout == run.mesh.layout and model.is_tied == run.hf_model.is_tied:
        return run.mesh
    ranks, minutes = ranks_of(layout, run.plan.world_size), run.args.distributed_timeout_minutes
    return Mesh.create(run.mesh.device, layout, ranks=ranks, tied_embeddings=model.is_tied, timeout_minutes=minutes)


def batches_of(run: Run, mesh: Mesh) -> Batches:
    """Return what divides rows over the ranks of a frozen model."""
    # Samples are scored one by one, so there are no rows to pack in advance.
    packing = "none" if run.plan.packing == "none" else "micro_batch"
    plan = replace(
        run.plan,
        layout=mesh.layout,
        data_parallel_size=data_parallel_size(mesh.layout, len(mesh.ranks)),
        packing=packing,
        row_multiple=row_multiple_of(mesh.layout, packing, mesh.device.is_cuda, run.plan.kernels.low_precision),
        heads=Heads(),
    )
    extras = image_extras_of(run.hf_model, mesh) if run.hf_model.computes_images else ()
    rank = mesh.dp.rank() if mesh.is_here else 0
    return Batches(plan, rank, run.batches.pad_token_id, run.batches.flops, extras)
