"""Greedy decoding with a cache: run the stages of `GPTModel` over the new tokens of rows, one pass at a time.

A pass of the trunk appends tokens to the rows, and the pipeline stage of the heads stores the trunk's states in its
cache. A pass of the heads follows, over tokens that the trunk has processed. Stages therefore send other states than in
training:

    pass            to the stage of the heads       from there to the last stage
    of the trunk    as `StageStates` says           the trunk's state after the norm      [T, 1, H]
    of the heads    a placeholder [1, 1, H]         the state of each depth               [D * T, 1, H]

The outputs of a tower are broadcast to all stages before the first pass.

Shapes: T new tokens of all rows, concatenated, with padding at the end; N tokens with a prediction; H hidden size; D
MTP depth; I items of all rows, which are the inputs of a tower.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from megatron.core.tensor_parallel import scatter_to_sequence_parallel_region
from megatron.core.transformer.identity_op import IdentityOp

from swiftlite.base.errors import UserError
from swiftlite.model.attention.cache import Cache
from swiftlite.model.attention.sparse import in_place_of_mask
from swiftlite.model.gpt import GPTModel
from swiftlite.model.loss.losses import sharing
from swiftlite.model.ranks import broadcast_from_first_stage
from swiftlite.model.tower import Placed, num_items_of
from swiftlite.runtime.mesh import Mesh

HEAD_INPUT = "head_input"
"""Name under which the cache stores the trunk's states that the heads read."""


@dataclass(frozen=True)
class CachedPass:
    """One pass over the new tokens of all rows, concatenated without padding between rows.

    Attributes:
        input_ids: [1, T].
        position_ids: [1, T].
        mtp_input_ids: None for a pass of the trunk; for a pass of the heads, for each depth k the tokens k positions
            later, [1, T].
        cache: cache of the rows; its spans are these tokens.
        lengths: for each span of the cache the length of its row, on which some rotary embeddings depend.
        predicted: int64 [N], indices of the tokens of the pass whose next token is predicted.
        axes_3BT: int64 [3, 1, T], positions along three axes (`data.batch.AXES`); None: `position_ids`.
        item_KBT: int64; indices of the tower's outputs that replace the embeddings of `input_ids`, [1, 1, T], or of
            `mtp_input_ids`, [D, 1, T]; -1 for tokens that use their embedding. None if no row has items.
        tower_output: result of `tower_output`; None if no row has items.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    mtp_input_ids: Sequence[torch.Tensor] | None
    cache: Cache
    lengths: Sequence[int]
    predicted: torch.Tensor
    axes_3BT: torch.Tensor | None = None
    item_KBT: torch.Tensor | None = None
    tower_output: torch.Tensor | None = None


@torch.no_grad()
def tower_output(model: GPTModel, mesh: Mesh, items: Sequence[Mapping[str, torch.Tensor]]) -> torch.Tensor:
    """Run the tower over each row's items, so that the memory for activations does not depend on the number of rows.

    Collective over pipeline stages: the first stage has the tower.

    Args:
        model: the first chunk of this rank.
        items: inputs of the tower by name, for each row.

    Returns:
        The outputs of all rows on each stage, [I, H], or with deepstack [I, (1 + number of layers) * H].
    """
    if model.tower is None:
        num_items = sum(map(num_items_of, items))
        width = model.sent_outputs.per_item * model.config.hidden_size
        outputs = torch.empty(num_items, width, dtype=model.config.params_dtype, device=mesh.device.torch_device)
    else:
        outputs = torch.cat([model.tower(of_row) for of_row in items])
    return broadcast_from_first_stage(outputs, mesh)


@torch.no_grad()
def forward_cached(model: GPTModel, new: CachedPass) -> torch.Tensor:
    """Run the stages that this rank holds over a pass.

    Returns:
        On the last pipeline stage, the most likely next token after each token in `predicted`: according to the trunk,
            int64 [1, N], or to each MTP depth, [D, N]. On other stages, the states for the next stage.

    Raises:
        UserError: a layer does not support the cache.
    """
    if new.mtp_input_ids is None:
        states = [_forward_trunk(model, new)]
    else:
        states = _forward_heads(model, new, new.mtp_input_ids)
    if not model.post_process:
        return torch.cat(states)
    if new.mtp_input_ids is None:
        outputs = [model.output_layers.of_trunk()]
    else:
        outputs = [model.output_layers.of_head(depth) for depth in range(model.heads.drafts)]
    group = sharing(model.pg_collection.tp)
    tokens = []
    for hidden_T1H, output in zip(states, outputs, strict=True):
        tokens.append(output.most_likely(model.whole_sequence(hidden_T1H)[new.predicted, 0], group))
    return torch.stack(tokens)


def _forward_trunk(model: GPTModel, new: CachedPass) -> torch.Tensor:
    """Run the embedding and the decoder layers of this stage, and store the states that the heads will read."""
    received: Any = model.decoder.input_tensor
    if model.follows_heads:
        return received
    placed = None
    if by_depth := _placed(model, new):
        (placed,) = by_depth
    embeddings_T1H = model.forward_preprocess(new.input_ids, new.position_ids, placed)
    with model.features.collected(model.decoder) as features_T1H:
        mask = in_place_of_mask(model.decoder.layers, new.cache, tokens=None)
        hidden_T1H = model.forward_decoder(
            embeddings_T1H, _rotary_emb(model, new), mask=mask, placed=placed, input_ids=new.input_ids
        )
    if any(span.start == 0 for span in new.cache.spans):
        _check_use(model, new.cache)
    states = replace(model.split_decoder_output(hidden_T1H), features_SBH=features_T1H)
    if not model.mtp_process:
        return states.to_wire()
    new.cache.keep(HEAD_INPUT, model.whole_sequence(states.head_input(model.heads.reads_state)))
    return states.trunk_SBH


def _forward_heads(model: GPTModel, new: CachedPass, mtp_input_ids: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Run the heads, if they are on this stage, over the states that passes of the trunk have stored."""
    received: Any = model.decoder.input_tensor
    if model.follows_heads:
        return list(received.chunk(model.heads.drafts))
    if not model.mtp_process and model.pre_process:
        return [_placeholder(model, new.cache)]
    if not model.mtp_process:
        return [received]
    head_input_T1H = new.cache.kept(HEAD_INPUT, new.input_ids.size(1))
    if model.config.sequence_parallel:
        head_input_T1H = scatter_to_sequence_parallel_region(head_input_T1H, group=model.pg_collection.tp)
    return model.forward_mtp(
        head_input_T1H,
        mtp_input_ids,
        new.position_ids,
        partial(_rotary_emb, model, new),
        cache=new.cache,
        placed=_placed(model, new),
    )


def _rotary_emb(model: GPTModel, new: CachedPass, offset: int = 0) -> torch.Tensor:
    """Return cosines and sines [2, T, 1, 1, R] at the positions of a pass; each row starts at `offset`."""
    if new.axes_3BT is not None:
        return model.rotary_pos_emb.at(new.axes_3BT + offset)
    if not model.rotary_pos_emb.depends_on_length:
        return model.rotary_pos_emb([new.cache.capacity], offset)[:, new.position_ids[0]]
    spans = zip(new.cache.spans, new.lengths, strict=True)
    parts = [model.rotary_pos_emb([len(span)], offset + span.start, [length]) for span, length in spans]
    padding = model.rotary_pos_emb([new.input_ids.size(1) - new.cache.num_tokens])
    return torch.cat([*parts, padding], dim=1)


def _placed(model: GPTModel, new: CachedPass) -> list[Placed] | None:
    """Return the tower's outputs with the tokens of the pass that they replace; None if no row has items."""
    if new.item_KBT is None or new.tower_output is None:
        return None
    return Placed.of_depths(new.tower_output, new.item_KBT, model.config.hidden_size)


def _placeholder(model: GPTModel, cache: Cache) -> torch.Tensor:
    """Return a tensor for a stage without output to send, because the next stage waits for a message."""
    return torch.zeros(1, 1, model.config.hidden_size, dtype=model.config.pipeline_dtype, device=cache.device)


def _check_use(model: GPTModel, cache: Cache) -> None:
    """Raise UserError if a layer with attention has not stored anything in the cache.

    In such a layer, tokens of later passes would not see tokens of earlier passes. A layer that has only an MLP
    computes each token by itself.
    """
    for layer in model.decoder.layers:
        has_attention = not isinstance(layer.self_attention, IdentityOp)
        if has_attention and not cache.is_used_by(layer):
            problem = f"measuring acceptance is not supported: layer {layer.layer_number} has no cache"
            raise UserError(problem, "use --acceptance_samples 0")
