"""Test the load-balancing loss and the expert bias against short reference code in plain torch.

The reference code uses the logits of transformers' routers.
"""

import dataclasses
import json
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.distributed import finalize_model_grads
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from swiftlite.args.commands import SftArgs
from swiftlite.args.fields import MoeArgs, RecomputeArgs
from swiftlite.base.heads import Heads
from swiftlite.bridge.saving import save_hf
from swiftlite.bridge.transfer import load_hf
from swiftlite.data.batch import Batch, collate, collate_packed
from swiftlite.data.sample import Sample, make_sample
from swiftlite.families import index
from swiftlite.model.build import build_model
from swiftlite.model.forward import shard
from swiftlite.model.layers.router import TopKRouter, take_load_balancing_loss
from swiftlite.model.pipeline import run_pipeline
from swiftlite.model.ranks import broadcast_from_last_stage
from swiftlite.plan.layout import layout_of
from swiftlite.runtime.distributed import session
from swiftlite.runtime.mesh import Mesh
from swiftlite.train.methods.next_token import NextTokenObjective
from swiftlite.train.optim import wrap_model
from tests.parallel.launch import launch, open_store, prepare_session
from tests.tiers import once, selected, some_of
from tests.tiny import make_tiny_hf

COEFF, RATE, TOPK = 0.7, 0.01, 2
LENGTHS = (9, 16, 5, 12)


def make_samples(learned: float = 1.0) -> list[Sample]:
    """Return rows in which the share `learned` of the tokens, at the end, is trained."""
    random = np.random.RandomState(0)
    samples = []
    for length in LENGTHS:
        weights = np.ones(length, np.float32)
        weights[: max(1, round(length * (1 - learned)))] = 0
        samples.append(make_sample(random.randint(0, 128, length), weights))
    return samples


def packed(samples: Sequence[Sample], num_drafts: int) -> Batch:
    return collate_packed(samples, 3, num_drafts=num_drafts, pad_each_to_multiple_of=8, pad_to_multiple_of=16)


def padded(samples: Sequence[Sample], num_drafts: int) -> Batch:
    return collate(samples, 3, num_drafts=num_drafts, pad_to_multiple_of=8)


def router_scores(directory: Path, samples: Sequence[Sample]) -> tuple[Any, list[list[torch.Tensor]]]:
    """Return transformers' model and the scores of its routers, [T, E], for each layer and sample."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    scores: list[list[torch.Tensor]] = []
    for layer in model.model.layers:
        if hasattr(layer.mlp, "gate"):
            kept: list[torch.Tensor] = []
            layer.mlp.gate.register_forward_pre_hook(
                lambda gate, args, kept=kept: kept.append(args[0].flatten(0, -2) @ gate.weight.T)
            )
            scores.append(kept)
    for sample in samples:
        model(torch.from_numpy(sample.input_ids).long()[None])
    is_softmax = model.config.model_type == "qwen3_moe"
    result = []
    for kept in scores:
        each = [logits.softmax(-1) if is_softmax else logits.sigmoid() for logits in kept]
        result.append([score / score.sum(-1, keepdim=True) for score in each])
    return model, result


def balance_of(scores_TE: torch.Tensor) -> torch.Tensor:
    """Compute the load-balancing loss of the papers for these tokens."""
    num_tokens, num_experts = scores_TE.shape
    chosen = torch.zeros_like(scores_TE).scatter(1, scores_TE.topk(TOPK).indices, 1)
    share = chosen.sum(0) * num_experts / (TOPK * num_tokens)
    return (share * scores_TE.mean(0)).sum()


def naive(directory: Path, samples: Sequence[Sample], micro_batches: Sequence[Sequence[int]]) -> tuple[float, dict]:
    """Return the mean loss over layers, and the gradients of `COEFF` times the sum over layers.

    Args:
        micro_batches: sample numbers of each micro-batch, over which the loss is computed.
    """
    model, scores = router_scores(directory, samples)
    groups = micro_batches if model.config.model_type == "qwen3_moe" else [[n] for n in range(len(samples))]
    num_tokens = sum(map(len, samples))
    losses = []
    for of_layer in scores:
        together = [torch.cat([of_layer[n] for n in group]) for group in groups]
        losses.append(torch.stack([len(t) / num_tokens * balance_of(t) for t in together]).sum())
    total = torch.stack(losses)
    (COEFF * total.sum()).backward()
    return float(total.detach().mean()), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def build(directory: Path, mesh: Mesh, heads: Heads = Heads(), recompute: RecomputeArgs | None = None, **moe: Any):
    hf_config = json.loads((directory / "config.json").read_text())
    family = index.get(hf_config)
    model = build_model(
        family.architecture(hf_config),
        hf_config,
        mesh=mesh,
        dtype=torch.float32,
        heads=heads,
        drafting=family.mtp.drafting,
        recompute=recompute,
        moe=MoeArgs(**moe),
    )
    load_hf(model, directory, family, hf_config)
    return model, family, hf_config


def step(directory: Path, mesh: Mesh, batches: Sequence[Batch], heads: Heads = Heads(), **options: Any):
    """Run one step with megatron-core's schedule; return the gradients (main_grad), the logged loss and the model."""
    model, family, hf_config = build(directory, mesh, heads, **options)
    wrapped = wrap_model(model, mesh, torch.float32)
    for chunk in wrapped:
        chunk.train()
        chunk.config.finalize_model_grads_func = finalize_model_grads
    objective = NextTokenObjective(heads, 0.3)
    counts = objective.count_targets(batches)
    torch.distributed.all_reduce(counts, group=mesh.dp)
    here = [shard(batch, mesh.cp.rank(), mesh.cp.size()) for batch in batches]
    with mesh.active():
        run_pipeline(
            wrapped,
            mesh,
            objective.make_forward_step(broadcast_from_last_stage(counts, mesh), mesh),
            [iter(here) for _ in wrapped],
            shapes=[batch.position_ids_BS.shape for batch in batches],
            forward_only=False,
        )
    return model, family, hf_config, float(take_load_balancing_loss(wrapped, mesh))


def summed_gradient(parameter: Any) -> torch.Tensor:
    return parameter.main_grad.clone()


def gradients_of(directory: Path, out_dir: Path, mesh: Mesh, batches: Sequence[Batch], **options: Any):
    """Return the gradients of a step by HF name, and the logged loss."""
    model, family, hf_config, logged = step(directory, mesh, batches, **options)
    for chunk in model:
        for parameter in chunk.parameters():
            parameter.data = summed_gradient(parameter)
    save_hf(model, out_dir, family, hf_config, dtypes="float32")
    return load_file(out_dir / "model.safetensors"), logged


def loss_gradients(directory: Path, out_dir: Path, mesh: Mesh, batches: Sequence[Batch], **options: Any):
    """Return the gradients of the load-balancing loss alone: gradients with this loss minus gradients without it."""
    with_it, logged = gradients_of(directory, out_dir / "with", mesh, batches, moe_aux_loss_coeff=COEFF, **options)
    without, _ = gradients_of(directory, out_dir / "without", mesh, batches, **options)
    return {name: with_it[name] - without[name] for name in with_it}, logged


def assert_close(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    """Compare gradients of the load-balancing loss.

    `ours` is a difference of larger gradients. Therefore rounding errors of these gradients are allowed.
    """
    largest = max(float(gradient.abs().max()) for gradient in theirs.values())
    assert largest > 1e-3
    for name, gradient in theirs.items():
        if name in ours:
            torch.testing.assert_close(ours[name], gradient, rtol=0, atol=1e-4 * largest, msg=name)


FAMILIES = ("qwen3_moe", "glm4_moe", "deepseek_v3")
CUTS: dict[str, list[list[int]]] = {
    "one micro-batch": [[0, 1, 2, 3]],
    "four": [[0], [1], [2], [3]],
    "two": [[0, 1], [2, 3]],
}


@pytest.mark.parametrize(
    ("family", "cut", "lay_out"),
    some_of(
        product(FAMILIES, CUTS, (padded, packed)),
        ("qwen3_moe", "two", packed),
        ("glm4_moe", "four", padded),
        ("deepseek_v3", "one micro-batch", packed),
    ),
)
def test_the_loss_is_the_papers(family, cut, lay_out, tmp_path, mesh):
    directory = make_tiny_hf(tmp_path / "hf", family)
    samples = make_samples()
    expected, gradients = naive(directory, samples, CUTS[cut])
    batches = [lay_out([samples[n] for n in numbers], 0) for numbers in CUTS[cut]]
    ours, logged = loss_gradients(directory, tmp_path, mesh, batches)
    assert logged == pytest.approx(expected, rel=1e-5)
    assert_close(ours, {name: gradient for name, gradient in gradients.items() if ".experts" not in name})


@pytest.mark.parametrize(("learned", "pad_to"), some_of(product((1.0, 0.2), (8, 64)), (0.2, 64)))
def test_it_depends_neither_on_prompts_nor_on_padding(learned, pad_to, tmp_path, mesh):
    directory = make_tiny_hf(tmp_path / "hf", "qwen3_moe")
    _, gradients = naive(directory, make_samples(), [[0, 1, 2, 3]])
    batch = collate(make_samples(learned), 5, pad_to_multiple_of=pad_to)
    ours, _ = loss_gradients(directory, tmp_path, mesh, [batch])
    router = "model.layers.1.mlp.gate.weight"
    assert_close({router: ours[router]}, {router: gradients[router]})


def test_a_padding_embedding_of_zeros_does_no_harm(tmp_path, mesh):
    """If padding counted as load, norms of zeros (1 / sqrt(eps)) would make its gradient hundreds
    of times too large.
    """
    directory = make_tiny_hf(tmp_path / "hf", "qwen3_moe")
    tensors = load_file(directory / "model.safetensors")
    tensors["model.embed_tokens.weight"][5] = 0
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    samples = [make_sample(np.where(s.input_ids == 5, 6, s.input_ids), s.loss_scale) for s in make_samples()]
    norms = []
    for batch in (collate(samples, 5, pad_to_multiple_of=64), collate(samples, 6, pad_to_multiple_of=64)):
        gradients, _ = gradients_of(directory, tmp_path / str(len(norms)), mesh, [batch], moe_aux_loss_coeff=COEFF)
        norms.append(float(torch.stack([gradient.norm() for gradient in gradients.values()]).norm()))
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


RECOMPUTED = {
    "full": RecomputeArgs(recompute_granularity="full"),
    "moe": RecomputeArgs(recompute_granularity="selective", recompute_modules=["moe"]),
}


@pytest.mark.parametrize("heads", [Heads(1), Heads(1, unroll=3, beta=0.5)], ids=["one step", "unrolled"])
@pytest.mark.parametrize("recompute", RECOMPUTED)
def test_recomputation_changes_nothing(heads, recompute, tmp_path, mesh):
    directory = make_tiny_hf(tmp_path / "hf", "glm4_moe", depth=1)
    batches = [padded(make_samples()[:2], heads.drafts), padded(make_samples()[2:], heads.drafts)]
    options: dict[str, Any] = {"heads": heads, "moe_aux_loss_coeff": COEFF, "moe_router_bias_update_rate": RATE}
    expected = gradients_of(directory, tmp_path / "kept", mesh, batches, **options)
    found = gradients_of(directory, tmp_path / "again", mesh, batches, recompute=RECOMPUTED[recompute], **options)
    assert found[1] == expected[1]
    for name, gradient in expected[0].items():
        # Steps that share weights add up in another order where each is computed again for itself.
        rounding = 1e-6 * float(gradient.abs().max()) if (heads.unroll > 1 and recompute == "moe") else 0
        torch.testing.assert_close(found[0][name], gradient, rtol=0, atol=rounding, msg=name)


@pytest.mark.parametrize(("family", "beta"), once(FAMILIES[:2], [1.0, 0.5]))
def test_steps_of_an_unrolled_head_weigh_as_their_losses(family, beta, tmp_path, mesh, monkeypatch):
    """The router's loss is compared with its definition, computed from the scores that the router had in each step."""
    directory = make_tiny_hf(tmp_path / "hf", family, depth=1)
    heads, samples = Heads(1, unroll=3, beta=beta), make_samples()
    seen: list[torch.Tensor] = []
    stock = TopKRouter.gating

    def gating(self, states):
        logits = stock(self, states)
        seen.append(logits.detach())
        return logits

    monkeypatch.setattr(TopKRouter, "gating", gating)
    model, _, _, logged = step(directory, mesh, [padded(samples, 3)], heads, moe_aux_loss_coeff=COEFF)
    is_softmax = family == "qwen3_moe"
    num_trunk = len(seen) - 3
    assert num_trunk == sum(isinstance(module, TopKRouter) for module in model[0].decoder.modules())

    def loss(logits_SBE: torch.Tensor, ahead: int) -> torch.Tensor:
        scores = logits_SBE.softmax(-1) if is_softmax else logits_SBE.sigmoid()
        scores = scores / scores.sum(-1, keepdim=True)
        rows = [scores[: length - ahead, row] for row, length in enumerate(LENGTHS)]
        num_tokens = sum(map(len, rows))
        groups = [torch.cat(rows)] if is_softmax else rows
        return torch.stack([len(group) / num_tokens * balance_of(group) for group in groups]).sum()

    trunk = sum(loss(logits, 0) for logits in seen[:num_trunk])
    head = sum(
        w * loss(logits, j) for j, (w, logits) in enumerate(zip(heads.weights, seen[num_trunk:], strict=True), 1)
    )
    assert logged == pytest.approx(float(trunk + head) / (num_trunk + 1), rel=1e-5)


def biases(model: Sequence[torch.nn.Module]) -> list[torch.Tensor]:
    routers = [module for chunk in model for module in chunk.modules() if isinstance(module, TopKRouter)]
    return [router.get_buffer("expert_bias").clone() for router in routers]


@pytest.mark.parametrize(("cut", "lay_out"), once([*CUTS], [padded, packed]))
def test_the_expert_bias_moves_by_the_load_of_real_tokens(cut, lay_out, tmp_path, mesh):
    directory = make_tiny_hf(tmp_path / "hf", "glm4_moe")
    samples = make_samples(0.2)
    before = biases(build(directory, mesh)[0])
    batches = [lay_out([samples[n] for n in numbers], 0) for numbers in CUTS[cut]]
    model, *_ = step(directory, mesh, batches, moe_router_bias_update_rate=RATE)
    for old, new, load in zip(before, biases(model), loads_of(directory, samples), strict=True):
        assert load.sum() == TOPK * sum(LENGTHS)
        torch.testing.assert_close(new - old, RATE * torch.sign(load.mean() - load))


def loads_of(directory: Path, samples: Sequence[Sample]) -> list[torch.Tensor]:
    """Return the number of tokens of each expert in each layer, as transformers routes them."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    loads = []
    for layer in model.model.layers:
        if hasattr(layer.mlp, "gate"):
            gate = layer.mlp.gate
            load = torch.zeros(gate.weight.size(0))
            loads.append(load)

            def count(gate, args, out, load=load):
                scores = (
                    args[0].flatten(0, -2).float() @ gate.weight.float().T
                ).sigmoid() + gate.e_score_correction_bias
                load.index_add_(0, scores.topk(TOPK).indices.flatten(), torch.ones(TOPK * len(scores)))

            gate.register_forward_hook(count)
    for sample in samples:
        model(torch.from_numpy(sample.input_ids).long()[None])
    return loads


LAYOUTS: dict[str, dict[str, Any]] = {
    "DP2": {},
    "EP2": {"expert_model_parallel_size": 2},
    "PP2": {"pipeline_model_parallel_size": 2},
    "CP2": {"context_parallel_size": 2},
    "TP2+SP": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
}
SIZES: dict[str, Any] = {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
HEADS = Heads(1, unroll=3, beta=0.5)


def compute(jobs: Sequence[tuple[str, str, bool]], root: Path, ports: Sequence[int]) -> None:
    """Run one step for each layout in this process; write the gradients with the loss, the logged
    loss and the biases.
    """
    for (layout, family, is_packed), port in zip(jobs, ports, strict=True):
        prepare_session(port)
        args = dataclasses.replace(SftArgs(), **LAYOUTS.get(layout, {}))
        with session(layout_of(args), timeout_minutes=2) as mesh:
            lay_out = packed if is_packed else padded
            batches = [lay_out([sample], 3) for sample in make_samples(0.4)]
            mine = batches[mesh.dp.rank() :: mesh.dp.size()]
            options = {"moe_aux_loss_coeff": COEFF, "moe_router_bias_update_rate": RATE}
            model, hf_family, hf_config, logged = step(root / family, mesh, mine, HEADS, **options)
            out_dir = root / layout / f"{family}-{is_packed}"
            found = {"logged": torch.tensor(logged)}
            torch.save(found, root / f"{layout}-{family}-{is_packed}.pt")
            save_hf(model, out_dir / "moved", hf_family, hf_config, dtypes="float32")
            for chunk in model:
                for parameter in chunk.parameters():
                    parameter.data = summed_gradient(parameter)
            save_hf(model, out_dir / "gradients", hf_family, hf_config, dtypes="float32")


@pytest.fixture(scope="module")
def computed(request, tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("balance")
    for family in FAMILIES[:2]:
        make_tiny_hf(root / family, family, depth=1, **SIZES)
    chosen = selected(request, "layout", "family", "is_packed")
    alone = [("alone", *rest) for rest in dict.fromkeys(case[1:] for case in chosen)]
    for num_processes, jobs in ((1, alone), (2, chosen)):
        stores = [open_store() for _ in jobs]
        launch(num_processes, compute, jobs, root, [store.port for store in stores])
    return root


@pytest.mark.gloo
@pytest.mark.parametrize(("layout", "family", "is_packed"), once([*LAYOUTS], FAMILIES[:2], [False, True]))
def test_every_layout_computes_what_one_process_does(computed, layout, family, is_packed):
    one, other = (torch.load(computed / f"{name}-{family}-{is_packed}.pt") for name in ("alone", layout))
    assert float(other["logged"]) == pytest.approx(float(one["logged"]), rel=1e-5)
    for part in ("gradients", "moved"):
        file = Path(f"{family}-{is_packed}") / part / "model.safetensors"
        expected, found = load_file(computed / "alone" / file), load_file(computed / layout / file)
        for name, tensor in expected.items():
            # Float32 sums in another order, through five layers (as tests/parallel/parity.py).
            torch.testing.assert_close(found[name], tensor, rtol=0, atol=2e-5 * float(tensor.abs().max()) + 1e-9)
