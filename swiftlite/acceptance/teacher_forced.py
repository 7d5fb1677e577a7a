"""Measure heads and trunk on given rows, by channel, without an engine.

For heads, the share of predictions that equal the trunk's is measured; for a trunk, its loss, and the share of
predictions that equal those of another trunk.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import Any

import torch

from swiftlite.acceptance import by_position
from swiftlite.acceptance.counts import DraftCounts, replay
from swiftlite.acceptance.statistics import depth_sums
from swiftlite.base.errors import UserError
from swiftlite.data.batch import Batch, Extra, collate_packed, shift_left
from swiftlite.data.image_inputs import PATCHES, image_extras
from swiftlite.data.packing.packing import pack
from swiftlite.data.sample import Sample
from swiftlite.families.index import image_sizes
from swiftlite.families.resolved import HfModel
from swiftlite.model.forward import forward
from swiftlite.model.open import open_model
from swiftlite.runtime.mesh import Mesh

ALL = "all"
"""Key of the results over all channels, next to one key per channel."""


@dataclass(frozen=True)
class Measured:
    """Measurements of some rows; the measurements of several groups of rows can be added.

    Attributes:
        num_samples: number of samples in the rows.
        sums: sum of `statistics.depth_sums` over the rows.
        walk: counts of simulated speculative decoding.
        table: sum of `by_position.tally` over the rows.
        predictions: the trunk's most likely tokens at the labels, int32, a tensor for each packed row.
    """

    num_samples: int
    sums: torch.Tensor
    walk: DraftCounts
    table: torch.Tensor
    predictions: tuple[torch.Tensor, ...]

    def __add__(self, other: "Measured") -> "Measured":
        return Measured(
            self.num_samples + other.num_samples,
            self.sums + other.sums,
            self.walk + other.walk,
            self.table + other.table,
            self.predictions + other.predictions,
        )

    def to_json(self) -> dict[str, Any]:
        """Return the measurements in the format of evaluation.json.

        Returns:
            `samples` and `loss`, and for each MTP depth `targets`, `loss` and `acceptance`. The acceptance of a depth
                is the share of its predictions that equal the trunk's prediction of the same token. Without heads, the
                lists are empty. `replayed` contains the counts of simulated speculative decoding over the rows
                (`DraftCounts.to_json`), which skips accepted tokens. There is also the acceptance by context length and
                by position (`by_position.describe`).
        """
        (loss, targets, _), *depths = self.sums.tolist()
        heads = []
        for loss_of_depth, count, hits in depths:
            shares = {"loss": loss_of_depth / max(count, 1), "acceptance": hits / max(count, 1)}
            heads.append({"targets": int(count), **shares})
        return {
            "samples": self.num_samples,
            "loss": loss / max(targets, 1),
            "heads": heads,
            **by_position.describe(self.table),
            "replayed": self.walk.to_json(),
        }

    def trunk_to_json(self, baseline: "Measured | None" = None) -> dict[str, Any]:
        """Return the quality of the trunk in the format of evaluation.json and acceptance.json.

        Args:
            baseline: measurements of another model on the same rows.

        Returns:
            `tokens` is the number of labels, and `loss` the mean cross-entropy in nats per label. With a baseline,
                `top1_agreement` is the share of labels at which both trunks have the same most likely token.
        """
        loss, tokens, _ = self.sums[0].tolist()
        found = {"tokens": int(tokens), "loss": loss / max(tokens, 1)}
        if baseline is not None:
            pairs = zip(self.predictions, baseline.predictions, strict=True)
            agreed = sum(int((mine == its).sum()) for mine, its in pairs)
            found["top1_agreement"] = agreed / max(tokens, 1)
        return found


def teacher_forced(
    hf_model: HfModel,
    samples: Sequence[Sample],
    *,
    torch_dtype: str,
    mesh: Mesh,
    row_length: int = 4096,
    num_drafts: int | None = None,
) -> dict[str, dict[str, Any]]:
    """Return the results of `measure_rows` as JSON, by channel and over all channels (key "all")."""
    measured = measure_rows(
        hf_model, samples, torch_dtype=torch_dtype, mesh=mesh, row_length=row_length, num_drafts=num_drafts
    )
    return {channel: found.to_json() for channel, found in measured.items()}


@torch.no_grad()
def measure_rows(
    hf_model: HfModel,
    samples: Sequence[Sample],
    *,
    torch_dtype: str,
    mesh: Mesh,
    row_length: int = 4096,
    num_drafts: int | None = None,
) -> dict[str, Measured]:
    """Measure rows, by channel and over all channels (key "all").

    Weights of a quantized model are decoded from its codes; activations are not quantized.

    Args:
        mesh: a mesh on which this rank holds the whole model.
        row_length: maximum number of tokens in a forward pass; a longer sample is processed alone.
        num_drafts: draft tokens per step of the simulated decoding; default: the number that the heads were trained
            for.

    Raises:
        UserError: a sample is longer than swiftlite supports for this family.
    """
    heads = hf_model.heads
    _check_lengths(hf_model, samples)
    extras: Sequence[Extra] = ()
    sizes = image_sizes(hf_model.config)
    if sizes and any(PATCHES in sample.extras for sample in samples):
        hf_model = hf_model.with_images()
        extras = image_extras(sizes)
    (model,), _ = open_model(hf_model, mesh, dtype=getattr(torch, torch_dtype))
    model.eval()
    by_channel: dict[str, list[Sample]] = {}
    for sample in samples:
        by_channel.setdefault(sample.channel or "", []).append(sample)
    found: dict[str, Measured] = {}
    for channel, chosen in sorted(by_channel.items()):
        rows = pack([len(sample) for sample in chosen], max(row_length, *map(len, chosen)))
        parts = []
        for row in rows:
            batch = collate_packed([chosen[i] for i in row.tolist()], 0, num_drafts=heads.drafts, extras=extras)
            parts.append(_measure(model, batch, heads.drafts, num_drafts, mesh))
        found[channel] = reduce(add, parts)
    named = {channel: measured for channel, measured in found.items() if channel}
    return {ALL: reduce(add, found.values()), **named}


def _check_lengths(hf_model: HfModel, samples: Sequence[Sample]) -> None:
    if hf_model.heads.unroll == 1:
        return
    limit = hf_model.family.architecture(hf_model.config).index_topk
    longest = max(map(len, samples), default=0)
    if limit is not None and longest > limit:
        raise UserError(
            f"{hf_model.name}: a row has {longest} tokens; heads with mtp_unroll {hf_model.heads.unroll} in "
            f"config.json are supported up to {limit} tokens (index_topk)",
            "shorten or remove rows",
        )


def _measure(model: torch.nn.Module, batch: Batch, depth: int, num_drafts: int | None, mesh: Mesh) -> Measured:
    """Measure one packed row, including simulated decoding that drafts `num_drafts` of the heads' `depth` tokens."""
    device = mesh.device.torch_device
    batch = batch.map(lambda tensor: tensor.to(device)).map_per_sequence(lambda tensor: tensor.to(device))
    losses = forward(model, batch)
    sums = depth_sums(losses, batch.loss_scale_KBS, mesh, batch.cu_seqlens).cpu()
    trunk_BS = losses.main.prediction_BS
    learned_S = trunk_BS[0] != -1
    predictions = trunk_BS[0, learned_S].int().cpu()
    agrees_KS = torch.zeros(depth, len(learned_S), dtype=torch.bool, device=learned_S.device)
    counted_KS = agrees_KS.clone()
    for number, head in enumerate(losses.mtp):
        trunk_BS = shift_left(trunk_BS, fill=-1, cu_seqlens=batch.cu_seqlens)
        agrees_KS[number] = head.prediction_BS[0] == trunk_BS[0]
        counted_KS[number] = head.prediction_BS[0] != -1
    table = by_position.tally(counted_KS, agrees_KS, learned_S, batch.position_ids_BS[0], batch.cu_seqlens)
    walk = DraftCounts(0, 0, ())
    if depth:
        walk = replay(agrees_KS[:num_drafts].cpu(), counted_KS[:num_drafts].cpu())
    return Measured(batch.num_sequences, sums, walk, table, (predictions,))
