"""Test `--mtp_unroll`, one head that continues from its own state, against the reference to which
engines are compared.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy

from swiftlite.args.fields import MtpLoss, RecomputeArgs
from swiftlite.base.heads import Heads
from swiftlite.bridge.saving import save_hf
from swiftlite.bridge.transfer import load_hf
from swiftlite.data.batch import collate, collate_packed, shift_left
from swiftlite.data.sample import Sample, make_sample
from swiftlite.families import index
from swiftlite.model.attention import draft_attention
from swiftlite.model.build import build_model
from swiftlite.model.context_parallel import describe_packed
from swiftlite.model.gpt import GPTModel, Logits
from swiftlite.model.inputs import ModelInputs, Target
from swiftlite.plan.trainable import HEADS_ONLY
from swiftlite.runtime.mesh import Mesh
from swiftlite.train.methods.mtp_loss import head_coefficients
from swiftlite.train.methods.next_token import NextTokenObjective, total_loss
from tests.engines.reference import Reference, convention, follow
from tests.model.test_logits import load_megatron
from tests.tiers import some_of
from tests.tiny import logits_of, make_tiny_hf

STEPS, BETA, SCALE = 3, 0.6, 0.3
MOST_STEPS = 400
"""Maximum number of training steps. Training usually takes 40 to 100 steps."""
FAMILIES = ("qwen3", "mimo", "glm4_moe", "deepseek_v3")


def make_samples() -> list[Sample]:
    """Return rows whose first third is a prompt. Some labels have the weights 0.5 and 2."""
    random = np.random.RandomState(0)
    samples = []
    for length in (9, 5, 12):
        weights = random.choice([0.5, 1.0, 2.0], length).astype(np.float32)
        weights[: length // 3] = 0
        samples.append(make_sample(random.randint(0, 128, length), weights))
    return samples


def load(directory: Path, family: str, mesh, **options) -> tuple[GPTModel, Reference]:
    reference = Reference.load(directory, family, depth=1)
    follow(reference, convention("vllm", family).drafting)
    drafting = index.FAMILIES[family].mtp.drafting
    return load_megatron(directory, mesh, torch.float32, drafting=drafting, heads=Heads(1, STEPS), **options), reference


def drafted_logits(reference: Reference, ids: list[int]) -> list[list[torch.Tensor]]:
    """Return logits[j][s] of step j + 1 from position s, which `Reference.draft` computes for the tokens of the row."""
    logits: list[list[torch.Tensor]] = [[] for _ in range(STEPS)]
    whole, _ = reference.trunk_states(torch.tensor([ids]))
    for start in range(len(ids)):
        fed = whole[:, : start + 1]
        for step in range(min(STEPS, len(ids) - start - 1)):
            read = torch.tensor([ids[1 : start + step + 2]])
            states, after = reference.head_states(0, fed, read)
            logits[step].append(logits_of(reference.trunk, after[0, -1]))
            fed = torch.cat((fed, states[:, -1:]), dim=1)
    return logits


@pytest.mark.parametrize("family", some_of(FAMILIES, "mimo", "deepseek_v3"))
def test_logits_are_those_of_an_engine(family, tmp_path, mesh):
    directory = make_tiny_hf(tmp_path, family, depth=1)
    model, reference = load(directory, family, mesh)
    ids = make_samples()[2].input_ids.tolist()
    with torch.no_grad():
        expected = drafted_logits(reference, ids)
        ours = model(ModelInputs(torch.tensor([ids]), torch.arange(len(ids))[None]))
    assert isinstance(ours, Logits)
    assert len(ours.mtp) == STEPS
    for step, logits in enumerate(ours.mtp):
        wanted = torch.stack(expected[step])
        # Float32 sums in another order, on logits of some tens.
        torch.testing.assert_close(logits[0, : len(wanted)], wanted, rtol=0, atol=2e-5 * float(wanted.abs().max()))


def naive_loss(reference: Reference, samples: list[Sample]) -> torch.Tensor:
    """Compute the loss by its definition, one target at a time."""
    heads = STEPS + 1
    sums, counts = [torch.zeros(())] * heads, [0] * heads
    for sample in samples:
        ids = sample.input_ids.tolist()
        _, after = reference.trunk_states(torch.tensor([ids]))
        rows = [list(logits_of(reference.trunk, after[0])), *drafted_logits(reference, ids)]
        for head, row in enumerate(rows):
            for position, logits in enumerate(row[: max(len(ids) - head - 1, 0)]):
                target = position + head + 1
                if sample.labels[target] != -100:
                    loss = cross_entropy(logits, torch.tensor(ids[target]))
                    sums[head] = sums[head] + float(sample.loss_scale[target]) * loss
                    counts[head] += 1
    powers = [BETA**step for step in range(STEPS)]
    mtp = sum(p * s / c for p, s, c in zip(powers, sums[1:], counts[1:], strict=True)) / sum(powers)
    return sums[0] / counts[0] + SCALE * mtp


def our_gradients(model: GPTModel, batch, directory: Path, out_dir: Path) -> tuple[float, dict[str, torch.Tensor]]:
    """Return the loss, and the gradients by HF name. `save_hf` writes the gradients as if they were weights."""
    objective = NextTokenObjective(Heads(1, STEPS, BETA), SCALE)
    counts = objective.count_targets([batch])
    model.train()
    losses: Any = model(
        ModelInputs(batch.tokens_KBS[0], batch.position_ids_BS, packed_seq_params=describe_packed(batch.cu_seqlens)),
        Target(batch.labels_KBS[0]),
    )
    targets, *of_heads = counts[0].tolist()
    coefficients = head_coefficients(objective.heads, objective.mtp_loss_scaling_factor, of_heads, targets)
    loss = total_loss(losses, batch.loss_scale_KBS, coefficients) / int(counts[0, 0])
    loss.backward()
    for parameter in model.parameters():
        parameter.data = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    hf_config = json.loads((directory / "config.json").read_text())
    save_hf([model], out_dir, index.get(hf_config), hf_config)
    return float(loss.detach()), load_file(out_dir / "model.safetensors")


@pytest.mark.parametrize(
    ("family", "packed"),
    some_of(
        [("qwen3", False), ("mimo", True), ("glm4_moe", False), ("deepseek_v3", True)],
        ("glm4_moe", False),
        ("deepseek_v3", True),
    ),
)
def test_loss_and_gradients_equal_the_reference(family, packed, tmp_path, mesh):
    directory = make_tiny_hf(tmp_path / "model", family, depth=1)
    model, reference = load(directory, family, mesh)
    samples = make_samples()
    expected_loss = naive_loss(reference, samples)
    expected_loss.backward()
    batch = (collate_packed if packed else collate)(samples, 0, num_drafts=STEPS)
    loss, ours = our_gradients(model, batch, directory, tmp_path / "gradients")
    assert loss == pytest.approx(float(expected_loss.detach()), rel=1e-5)
    for parameter in reference.parameters():
        parameter.data = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    theirs = {name: tensor for name, tensor in reference.mtp_tensors().items() if name in ours}
    copies = ("embed_tokens", "shared_head.head")
    theirs = {name: tensor for name, tensor in theirs.items() if not any(copy in name for copy in copies)}
    theirs["model.embed_tokens.weight"] = reference.trunk.model.embed_tokens.weight
    theirs["lm_head.weight"] = reference.trunk.lm_head.weight
    theirs["model.norm.weight"] = reference.trunk.model.norm.weight
    assert len(theirs) > 12
    for name, gradient in theirs.items():
        if name.endswith("e_score_correction_bias"):
            continue  # not learned by gradient
        assert float(gradient.abs().max()) > 0 or ".experts." in name
        # Float32 sums in another order, through steps that feed each other.
        bound = 2e-5 * float(gradient.abs().max()) + 1e-8
        torch.testing.assert_close(ours[name], gradient, rtol=0, atol=bound, msg=lambda text, name=name: name + text)


def test_recomputation_and_the_size_of_calls(tmp_path, mesh, monkeypatch):
    """With recomputation, results are bitwise identical.

    With few queries per call, they are equal up to the order of sums.
    """
    family = "deepseek_v3"
    directory = make_tiny_hf(tmp_path / "model", family, depth=1)
    batch = collate_packed(make_samples(), 0, num_drafts=STEPS)
    selective = ["core_attn", "mlp", "mla_up_proj"]
    results = []
    for name, recompute in {
        "none": RecomputeArgs(),
        "full": RecomputeArgs(recompute_granularity="full"),
        "selective": RecomputeArgs(recompute_granularity="selective", recompute_modules=selective),
        "cut": RecomputeArgs(),
    }.items():
        if name == "cut":
            monkeypatch.setattr(draft_attention, "MAX_QUERIES", 4)
        model, _ = load(directory, family, mesh, recompute=recompute)
        results.append(our_gradients(model, batch, directory, tmp_path / name))
    (loss, gradients), *recomputed, (loss_of_cuts, gradients_of_cuts) = results
    for other_loss, other in recomputed:
        assert other_loss == loss
        assert [name for name in gradients if not torch.equal(other[name], gradients[name])] == []
    assert loss_of_cuts == pytest.approx(loss, rel=1e-6)
    for name, gradient in gradients.items():
        bound = 1e-5 * float(gradient.abs().max()) + 1e-8
        torch.testing.assert_close(gradients_of_cuts[name], gradient, rtol=0, atol=bound)


def share_right(prediction_BS: torch.Tensor, target_BS: torch.Tensor) -> float:
    """Return the share of positions with a prediction whose prediction equals the target."""
    right_BS = (prediction_BS == target_BS)[prediction_BS != -1]
    return float(right_BS.float().mean())


def train_head(
    directory: Path, out_dir: Path, rows_BS: torch.Tensor, mesh: Mesh, *, unroll: int, mtp_loss: MtpLoss = "ce"
) -> None:
    """Write a checkpoint with the trunk of `directory` and a new head that was trained on the rows.

    The head is trained until nine of ten drafts are correct at each step. Comparisons of two heads therefore do not
    depend on how far a number of steps gets on this processor.
    """
    hf_config = json.loads((directory / "config.json").read_text())
    family = index.get(hf_config)
    (model,) = build_model(
        family.architecture(hf_config),
        hf_config,
        mesh=mesh,
        dtype=torch.float32,
        heads=Heads(1, unroll, BETA),
        freeze_trunk=True,
        mtp_loss=mtp_loss,
        drafting=family.mtp.drafting,
    )
    HEADS_ONLY.apply([model])
    load_hf([model], directory, family, hf_config, mtp_init="random")
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=5e-3)
    weights = torch.tensor(model.heads.weights)
    positions_BS = torch.arange(rows_BS.size(1)).expand_as(rows_BS)
    targets = [rows_BS.roll(-depth - 1, dims=1) for depth in range(1, unroll + 1)]
    for _ in range(MOST_STEPS):
        losses = model(ModelInputs(rows_BS, positions_BS), Target(shift_left(rows_BS, fill=-100)))
        pairs = zip(losses.mtp, targets, strict=True)
        if all(share_right(head.prediction_BS, target) > 0.9 for head, target in pairs):
            break
        loss = (weights * torch.stack([head.loss_BS.mean() for head in losses.mtp])).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    else:
        raise AssertionError(f"not learned in {MOST_STEPS} steps")
    save_hf([model], out_dir, family, hf_config)
    (out_dir / "config.json").write_text(json.dumps(hf_config))


@pytest.mark.parametrize("family", some_of(["qwen3", "glm4_moe"], "qwen3"))
def test_later_drafts_are_accepted_more_often(family, trained, tmp_path, mesh):
    """Both heads start from the same new head and learn the trunk's own text.

    Drafts are counted as for an engine that drafts 3.
    """
    directory, prompts = trained(family, 1, "vllm")
    teacher = Reference.load(directory, family, depth=1)
    rows_BS = torch.tensor([prompt[:1] + teacher.greedy(prompt[:1], 31) for prompt in prompts])
    accepted = {}
    for unroll in (1, STEPS):
        train_head(directory, tmp_path / str(unroll), rows_BS, mesh, unroll=unroll)
        served = follow(Reference.load(tmp_path / str(unroll), family, depth=1), convention("vllm", family).drafting)
        counts = served.simulate([row[:4].tolist() for row in rows_BS], 24, STEPS)[1]
        accepted[unroll] = [count / counts.drafts for count in counts.accepted_per_position]
    assert accepted[STEPS][1] > accepted[1][1] + 0.1
    assert accepted[STEPS][2] > accepted[1][2] + 0.1
