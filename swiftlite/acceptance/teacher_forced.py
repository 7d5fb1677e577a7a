"""How often each head agrees with its trunk on given rows, by channel: no engine, one pass over each row."""

from collections.abc import Sequence
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any

import torch

from swiftlite.acceptance.counts import DraftCounts, replay
from swiftlite.acceptance.statistics import sum_up
from swiftlite.data.batch import collate_packed, shift_left
from swiftlite.data.packing import pack
from swiftlite.data.sample import Sample
from swiftlite.model.forward import forward
from swiftlite.model.open import open_model, read_hf_model
from swiftlite.runtime.mesh import Mesh

ALL = "all"
"""Names the sum over all channels."""


@torch.no_grad()
def teacher_forced(
    hf_dir: Path,
    samples: Sequence[Sample],
    *,
    torch_dtype: str,
    mesh: Mesh,
    row_length: int = 4096,
    num_drafts: int | None = None,
) -> dict[str, dict[str, Any]]:
    """The rows of one model, by channel, and `all` of them together.

    Args:
        hf_dir: a Hugging Face model.
        mesh: not split: this rank holds the whole model.
        row_length: most tokens of a forward pass, or the longest sample if that has more.
        num_drafts: tokens drafted in each step of the walk; unset: as many as the heads were trained for.

    Returns:
        For each channel `samples`, `loss`, and per MTP depth `targets`, `loss` and `acceptance`: the share of its
        predictions that are the trunk's own for the same token; empty lists of a model without heads. Beside them
        `replayed`: `DraftCounts.to_json` of an engine's walk over the same rows, which skips what it has accepted.
    """
    hf_model = read_hf_model(hf_dir)
    heads = hf_model.heads
    (model,), _ = open_model(hf_model, mesh, dtype=getattr(torch, torch_dtype))
    model.eval()
    by_channel: dict[str, list[Sample]] = {}
    for sample in samples:
        by_channel.setdefault(sample.channel or "", []).append(sample)
    sums: dict[str, torch.Tensor] = {}
    walks: dict[str, DraftCounts] = {}
    for channel, chosen in sorted(by_channel.items()):
        rows = pack([len(sample) for sample in chosen], max(row_length, *map(len, chosen)))
        parts = [_measure(model, [chosen[i] for i in row.tolist()], heads.drafts, num_drafts, mesh) for row in rows]
        sums[channel] = torch.stack([rows for rows, _ in parts]).sum(dim=0)
        walks[channel] = reduce(add, (walk for _, walk in parts))
    counts = {channel: len(chosen) for channel, chosen in by_channel.items()}
    named = {channel: _describe(sums[channel], walks[channel], counts[channel]) for channel in sums if channel}
    total = torch.stack(list(sums.values())).sum(dim=0)
    return {ALL: _describe(total, reduce(add, walks.values()), len(samples)), **named}


def _measure(
    model: torch.nn.Module, samples: Sequence[Sample], depth: int, num_drafts: int | None, mesh: Mesh
) -> tuple[torch.Tensor, DraftCounts]:
    """One packed row: its statistics, and the walk of an engine that drafts `num_drafts` of the `depth` tokens."""
    batch = collate_packed(samples, 0, num_drafts=depth).map(lambda tensor: tensor.to(mesh.device.torch_device))
    losses = forward(model, batch)
    rows = sum_up(losses, batch.loss_scale_KBS, mesh, batch.cu_seqlens).cpu()
    if not depth:
        return rows, DraftCounts(0, 0, ())
    trunk_BS = losses.main.prediction_BS
    agrees = []
    for head in losses.mtp:
        trunk_BS = shift_left(trunk_BS, fill=-1, cu_seqlens=batch.cu_seqlens)
        agrees.append(head.prediction_BS[0] == trunk_BS[0])
    counted_KS = torch.stack([head.prediction_BS[0] != -1 for head in losses.mtp])
    return rows, replay(torch.stack(agrees)[:num_drafts].cpu(), counted_KS[:num_drafts].cpu())


def _describe(rows: torch.Tensor, walk: DraftCounts, num_samples: int) -> dict[str, Any]:
    (loss, targets, _), *heads = rows.tolist()
    return {
        "samples": num_samples,
        "loss": loss / max(targets, 1),
        "heads": [
            {"targets": int(count), "loss": loss / max(count, 1), "acceptance": hits / max(count, 1)}
            for loss, count, hits in heads
        ],
        "replayed": walk.to_json(),
    }
