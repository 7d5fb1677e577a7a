"""Test sparse attention (DSA) against transformers: selections, logits, gradients, and the loss of indexers."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from swiftlite.acceptance import greedy
from swiftlite.acceptance.teacher_forced import teacher_forced
from swiftlite.args.fields import IndexerArgs, RecomputeArgs
from swiftlite.base.errors import UserError
from swiftlite.base.heads import Heads
from swiftlite.bridge.saving import save_hf
from swiftlite.bridge.transfer import load_hf
from swiftlite.data.batch import Batch, collate, collate_packed
from swiftlite.data.sample import Sample, make_sample
from swiftlite.families.resolved import resolve
from swiftlite.model.attention.indexer import Indexer
from swiftlite.model.forward import forward
from swiftlite.model.gpt import GPTModel
from swiftlite.model.inputs import ModelInputs
from swiftlite.model.loss.balance import Balance
from swiftlite.model.open import build_hf_model, open_model
from tests.messages import naming
from tests.model.test_logits import ids_and_positions, load_megatron, load_transformers
from tests.tiers import some_of
from tests.tiny import make_tiny_hf

TOPK, LENGTH = 16, 64
NAMES = {"wq_b.weight", "wk.weight", "k_norm.weight", "k_norm.bias", "weights_proj.weight"}
CLOSE: dict[str, Any] = {"rtol": 1e-4, "atol": 2e-5}
# With this number of heads, no score is 0 because no head has a positive product. Of equal scores, torch selects any.
SIZES: dict[str, Any] = {"num_attention_heads": 4, "index_topk": TOPK, "index_n_heads": 16}
SHARED: dict[str, Any] = {"num_hidden_layers": 5, "index_topk_freq": 4, "index_skip_topk_offset": 3}
MODELS: dict[str, dict[str, Any]] = {"deepseek_v32": {}, "glm_moe_dsa": {}, "glm_moe_dsa shared": SHARED}
# The last layer has an indexer, because `make_tiny_hf` creates heads like this layer.
WITH_HEADS = MODELS | {"glm_moe_dsa shared": SHARED | {"num_hidden_layers": 7}}


def make_model(directory: Path, model: str = "deepseek_v32", **options: Any) -> Path:
    directory = make_tiny_hf(directory, model.split()[0], **(SIZES | MODELS[model] | options))
    tensors = load_file(directory / "model.safetensors")
    torch.manual_seed(5)
    for name in tensors:
        if "k_norm" in name:  # not the ones and zeros of new models
            tensors[name] = tensors[name] + 0.1 * torch.randn(tensors[name].shape)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def samples_of(lengths: Sequence[int]) -> list[Sample]:
    random = np.random.RandomState(0)
    return [make_sample(random.randint(0, 128, length), np.ones(length, np.float32)) for length in lengths]


class Transformers:
    """transformers' model, which keeps what its indexers and its attention compute for the last row."""

    def __init__(self, directory: Path, model: str):
        self.model = load_transformers(directory, model.split()[0], torch.float32)
        self.model.set_attn_implementation("eager")
        self.attention: dict[int, torch.Tensor] = {}
        self.selected: dict[int, torch.Tensor] = {}
        self.inputs: dict[int, dict[str, Any]] = {}
        for number, layer in enumerate(self.model.model.layers):
            layer.self_attn.register_forward_hook(self._keep(self.attention, number, lambda output: output[1]))
            if layer.self_attn.indexer is not None:
                indexer = layer.self_attn.indexer
                indexer.register_forward_hook(self._keep(self.selected, number, lambda output: output))
                indexer.register_forward_hook(self._keep_inputs(number), with_kwargs=True)

    @staticmethod
    def _keep(kept: dict, number: int, part: Any) -> Any:
        def hook(module: Any, args: Any, output: Any) -> None:
            kept[number] = part(output)

        return hook

    def _keep_inputs(self, number: int) -> Any:
        def hook(module: Any, args: tuple, kwargs: Any, output: Any) -> None:
            hidden, latent, rotary = args[:3]
            self.inputs[number] = {"hidden": hidden.detach(), "latent": latent.detach(), "rotary": rotary}

        return hook

    def visible(self, number: int) -> torch.Tensor:
        """Return which tokens each token sees, bool [S, S]."""
        length = self.selected[number].size(1)
        chosen = torch.zeros(length, length, dtype=torch.bool)
        return chosen.scatter(1, self.selected[number][0].long(), True).tril()

    def scores(self, number: int) -> torch.Tensor:
        """Compute the scores of equation (1) of DeepSeek-V3.2's report [S, S], with gradients of the indexer."""
        indexer: Any = self.model.model.layers[number].self_attn.indexer
        hidden, latent, (cos, sin) = self.inputs[number].values()
        rotary = indexer.qk_rope_head_dim
        query = indexer.wq_b(latent)[0].unflatten(-1, (indexer.n_heads, -1))
        key = indexer.k_norm(indexer.wk(hidden))[0][:, None]
        module = sys.modules[type(indexer).__module__]
        name = "apply_rotary_pos_emb_interleave" if "glm" in module.__name__ else "apply_rotary_pos_emb"
        rotate = getattr(module, name)
        query_pos, key_pos = rotate(query[None, ..., :rotary], key[None, ..., :rotary], cos, sin, unsqueeze_dim=2)
        query = torch.cat([query_pos[0], query[..., rotary:]], -1)
        key = torch.cat([key_pos[0], key[..., rotary:]], -1)[:, 0]
        products = torch.einsum("qhc,kc->qhk", query, key).relu() / indexer.head_dim**0.5
        return torch.einsum("qhk,qh->qk", products, indexer.weights_proj(hidden)[0]) / indexer.n_heads**0.5

    def divergence(self, number: int, visible: torch.Tensor) -> torch.Tensor:
        """Return the sum over tokens of the divergence of an indexer of a row."""
        attention = self.attention[number][0].detach().sum(0)
        attention = attention / attention.sum(-1, keepdim=True)
        scores = self.scores(number).masked_fill(~visible, -torch.inf).softmax(-1)
        terms = attention[visible] * (attention[visible].log() - scores[visible].log())
        return terms.sum()


def logged_losses(model: GPTModel) -> list[float]:
    """Return the losses that the indexers have kept for the log."""
    found = [module.mean_loss for module in model.modules() if isinstance(module, Indexer)]
    return [float(loss.detach()) for loss in found if loss is not None]


def hf_gradients(model: GPTModel, directory: Path, out_dir: Path) -> dict[str, torch.Tensor]:
    """Return the gradients by HF name; zeros of parameters without one."""
    for parameter in model.parameters():
        parameter.data = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    hf_model = resolve(directory)
    save_hf([model], out_dir, hf_model.family, hf_model.config, dtypes="float32")
    return load_file(out_dir / "model.safetensors")


@pytest.mark.parametrize("model", MODELS)
def test_logits_and_selections(tmp_path, mesh, model, monkeypatch):
    directory = make_model(tmp_path, model)
    ours, theirs = load_megatron(directory, mesh, torch.float32), Transformers(directory, model)
    monkeypatch.setattr("swiftlite.model.attention.indexer.BLOCK", 16 * LENGTH * 7)  # blocks of 7 queries
    monkeypatch.setattr("swiftlite.model.attention.sparse.MAX_QUERIES", 24)
    made: list[Any] = []
    monkeypatch.setattr("swiftlite.model.attention.sparse.select", keeping(made))
    input_ids, position_ids = ids_and_positions(LENGTH, rows=1)
    with torch.no_grad():
        logits = ours(ModelInputs(input_ids, position_ids)).main
        torch.testing.assert_close(logits, theirs.model(input_ids).logits, **CLOSE)
    assert len(made) == len(theirs.selected)
    for number, (selected,) in zip(theirs.selected, made, strict=True):
        chosen = torch.zeros(LENGTH, LENGTH, dtype=torch.bool).scatter(1, selected.long(), True)
        assert torch.equal(chosen, theirs.visible(number))
        assert chosen.sum(-1).tolist() == [min(query + 1, TOPK) for query in range(LENGTH)]


def keeping(made: list[Any]) -> Any:
    """Return the function `select`, which also adds its results to a list."""
    from swiftlite.model.attention.indexer import select

    def selecting(*args: Any) -> Any:
        made.append(select(*args))
        return made[-1]

    return selecting


def test_short_rows_are_those_of_dense_attention(tmp_path, mesh):
    """Bitwise those of DeepSeek-V3, which has no indexer."""
    directory = make_model(tmp_path / "sparse", num_attention_heads=4)
    dense = make_tiny_hf(tmp_path / "dense", "deepseek_v3", num_attention_heads=4)
    tensors = load_file(directory / "model.safetensors")
    plain = {name: tensor for name, tensor in tensors.items() if ".indexer." not in name}
    save_file(plain, dense / "model.safetensors", metadata={"format": "pt"})
    inputs = ModelInputs(*ids_and_positions(TOPK))
    with torch.no_grad():
        logits = [load_megatron(each, mesh, torch.float32)(inputs).main for each in (directory, dense)]
    assert torch.equal(*logits)


RECOMPUTED: dict[str, dict[str, Any]] = {
    "": {},
    "full": {"recompute_granularity": "full", "recompute_num_layers": 2},
    "selective": {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mla_up_proj"]},
}
LENGTHS = (40, 12, 64, 23)


def batch_of(kind: str) -> Batch:
    samples = samples_of(LENGTHS)
    if kind == "packed":
        return collate_packed(samples, 3, num_drafts=0, pad_each_to_multiple_of=8, pad_to_multiple_of=16)
    return collate(samples, 3, num_drafts=0)


def trained_step(directory: Path, mesh, batch: Batch, mode: str, recompute: dict[str, Any]) -> GPTModel:
    """Return the model with the gradients of the summed loss, and of the mean loss of the indexers."""
    (model,), _ = open_model(
        resolve(directory),
        mesh,
        dtype=torch.float32,
        indexer=IndexerArgs(indexer_mode=mode),  # type: ignore[arg-type]
        freeze_trunk=mode == "indexer_only",
        recompute=RecomputeArgs(**recompute),
    )
    model.train()
    MoEAuxLossAutoScaler.set_loss_scale(torch.ones(1))  # as megatron-core's schedules do
    losses = forward(model, batch, Balance([sum(LENGTHS)], divisor=1))
    losses.main.loss_BS.sum().backward()
    return model


GRADIENTS = [(model, kind, how) for model in MODELS for kind in ("packed", "padded") for how in RECOMPUTED]
DAILY = (
    ("deepseek_v32", "padded", "selective"),
    ("glm_moe_dsa", "packed", ""),
    ("glm_moe_dsa shared", "packed", "full"),
)


@pytest.mark.parametrize(("model", "kind", "recompute"), some_of(GRADIENTS, *DAILY))
def test_gradients(tmp_path, mesh, model, kind, recompute):
    """Of the model, and of the loss of the indexers, which has no gradient of the model."""
    directory = make_model(tmp_path / "in", model)
    ours = trained_step(directory, mesh, batch_of(kind), "joint", RECOMPUTED[recompute])
    theirs = Transformers(directory, model)
    theirs.model.train()
    total, mean = torch.zeros(()), torch.zeros(())
    for sample in samples_of(LENGTHS):
        ids = torch.from_numpy(sample.input_ids).long()[None]
        logits = theirs.model(ids).logits[0]
        total = total + torch.nn.functional.cross_entropy(logits[:-1], ids[0, 1:], reduction="sum")
        for number in theirs.inputs:
            mean = mean + theirs.divergence(number, theirs.visible(number)) / sum(LENGTHS)
    (total + mean).backward()
    logged = logged_losses(ours)
    assert len(logged) == len(theirs.inputs)
    assert sum(logged) == pytest.approx(float(mean.detach()), rel=1e-5)
    compare(hf_gradients(ours, directory, tmp_path / "out"), theirs)


def compare(gradients: dict[str, torch.Tensor], theirs: Transformers, *, only_indexers: bool = False) -> None:
    compared = 0
    for name, parameter in theirs.model.named_parameters():
        if name not in gradients or (only_indexers and ".indexer." not in name):
            continue  # stacks of experts have other names
        expected = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        bound = 2e-5 * max(float(expected.abs().max()), 1e-3)
        torch.testing.assert_close(gradients[name], expected, rtol=1e-4, atol=bound, msg=lambda m, n=name: f"{n}: {m}")
        compared += bool(expected.any())
    assert compared >= 5


@pytest.mark.parametrize("model", MODELS)
def test_training_only_indexers(tmp_path, mesh, model):
    """Attention is to all tokens, and so is the divergence."""
    directory = make_model(tmp_path / "in", model)
    ours = trained_step(directory, mesh, batch_of("packed"), "indexer_only", {})
    theirs = Transformers(directory, model)
    for layer in theirs.model.model.layers:
        if layer.self_attn.indexer is not None:
            layer.self_attn.indexer.index_topk = max(LENGTHS)
    mean = torch.zeros(())
    for sample in samples_of(LENGTHS):
        theirs.model(torch.from_numpy(sample.input_ids).long()[None])
        for number in theirs.inputs:
            mean = mean + theirs.divergence(number, theirs.visible(number)) / sum(LENGTHS)
    mean.backward()
    gradients = hf_gradients(ours, directory, tmp_path / "out")
    compare(gradients, theirs, only_indexers=True)
    trunk = {name for name, _ in theirs.model.named_parameters() if ".indexer." not in name} & gradients.keys()
    assert trunk
    assert not any(gradients[name].any() for name in trunk)


class Largest(TorchDispatchMode):
    """Keeps the largest number of elements of all tensors that operations return."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs or {})
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.numel = max(self.numel, tensor.numel())
        return result


@pytest.mark.parametrize("mode", ["joint", "indexer_only"])
def test_no_matrix_of_all_pairs_is_computed(tmp_path, mesh, mode, monkeypatch):
    """Neither for selected tokens nor for the loss of indexers."""
    length = 1024
    monkeypatch.setattr("swiftlite.model.attention.indexer.BLOCK", 2**17)
    monkeypatch.setattr("swiftlite.model.attention.sparse.MAX_QUERIES", 32)
    directory = make_model(tmp_path, max_position_embeddings=length, v_head_dim=24)  # as keys, for kernels of torch
    with Largest() as largest:
        trained_step(directory, mesh, collate(samples_of([length]), 3, num_drafts=0), mode, {})
    assert largest.numel < length**2 // 2


@pytest.mark.parametrize("model", MODELS)
def test_packed_rows_are_single_rows(tmp_path, mesh, model):
    directory = make_model(tmp_path, model, depth=1, **WITH_HEADS[model])
    (ours,), _ = open_model(resolve(directory), mesh, dtype=torch.float32)
    ours.eval()
    samples = samples_of(LENGTHS)
    batch = collate_packed(samples, 3, num_drafts=1, pad_each_to_multiple_of=8, pad_to_multiple_of=8)
    with torch.no_grad():
        packed = forward(ours, batch)
        single = [forward(ours, collate([sample], 3, num_drafts=1)) for sample in samples]
    for part in (lambda losses: losses.main, lambda losses: losses.mtp[0]):
        together = part(packed).loss_BS
        apart = torch.cat([part(losses).loss_BS[0] for losses in single])
        torch.testing.assert_close(together[together != 0], apart[apart != 0], **CLOSE)


@pytest.mark.parametrize("model", MODELS)
def test_decoding_selects(tmp_path, mesh, model, monkeypatch):
    """Of rows of different lengths, in passes of at most 10 tokens; tokens and drafts are those of whole rows."""
    directory = make_model(tmp_path, model, depth=1, **WITH_HEADS[model])
    (ours,), _ = open_model(resolve(directory), mesh, dtype=torch.float32)
    ours.eval()
    monkeypatch.setattr("swiftlite.acceptance.greedy.MAX_PASS_TOKENS", 10)
    rows = [greedy.GreedyRow.of(range(3, 3 + length), 30, LENGTH) for length in (25, 7)]
    decoding = greedy.GreedyRows([ours], mesh, rows, ())
    while decoding.num_unfinished:
        decoding.step()
    drafts = {id(row): tokens_KS for row, tokens_KS in decoding.drafts(1)}
    for row in rows:
        ids = torch.tensor(row.tokens)[None]
        with torch.no_grad():
            logits = ours(ModelInputs(ids, torch.arange(ids.size(1))[None], [ids.roll(-1, 1)]))
        assert len(row.tokens) == row.first + 30
        assert row.tokens[row.first :] == logits.main[0, row.first - 1 : -1].argmax(-1).tolist()
        assert drafts[id(row)][0].tolist() == logits.mtp[0][0, row.first - 1 : -1].argmax(-1).tolist()


def of_indexers(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in tensors.items() if ".indexer." in name}


def opened(directory, mesh, dtype: torch.dtype, **options: Any) -> GPTModel:
    (model,), _ = open_model(resolve(directory), mesh, dtype=dtype, **options)
    return model


def test_tensors_in_float32_stay_exact_in_bfloat16(tmp_path, mesh):
    directory = make_tiny_hf(tmp_path / "in", "deepseek_v32", depth=1, dtype=torch.bfloat16)
    tensors = load_file(directory / "model.safetensors")
    for name in tensors:
        if "k_norm" in name or "weights_proj" in name:
            tensors[name] = torch.randn(tensors[name].shape)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    hf_model = resolve(directory)
    (model,) = build_hf_model(hf_model, mesh, dtype=torch.bfloat16)
    model.bfloat16()  # as megatron-core's wrapper does
    load_hf([model], directory, hf_model.family, hf_model.config)
    dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
    save_hf([model], tmp_path / "out", hf_model.family, hf_model.config, dtypes=dtypes)
    written = load_file(tmp_path / "out/model.safetensors")
    assert len(of_indexers(tensors)) == 3 * len(NAMES)
    for name, tensor in of_indexers(tensors).items():
        assert written[name].dtype is tensor.dtype
        assert torch.equal(written[name], tensor), name


@pytest.mark.parametrize("mtp_init", ["random", "copy_last_layer"])
def test_new_heads_have_the_indexer_of_the_trunk(tmp_path, mesh, mtp_init):
    """Of the last layer that has one, which is layer 2 here."""
    shared: dict[str, Any] = {"num_hidden_layers": 4, "index_topk_freq": 4, "index_skip_topk_offset": 3}
    directory = make_tiny_hf(tmp_path, "glm_moe_dsa", **shared)
    model = opened(directory, mesh, torch.float32, heads=Heads(2), mtp_init=mtp_init)
    state = model.state_dict()
    for head in (0, 1):
        names = [name for name in state if name.startswith(f"mtp.layers.{head}.") and ".indexer." in name]
        assert len(names) == len(NAMES)
        for name in names:
            part = name.partition(".self_attention.")[2]
            assert torch.equal(state[name], state[f"decoder.layers.2.self_attention.{part}"])
            assert state[name].any()


def test_unrolled_heads_have_short_rows(tmp_path, mesh):
    """Later steps of a draft do not select tokens."""
    directory = make_model(tmp_path, depth=1)
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"mtp_unroll": 2}))

    def measure(length: int) -> Any:
        (sample,) = samples_of([length])
        return teacher_forced(resolve(directory), [sample], torch_dtype="float32", mesh=mesh)

    assert measure(TOPK)["all"]["samples"] == 1
    with pytest.raises(UserError, match=naming(f"{directory} {TOPK + 1} mtp_unroll 2 {TOPK} index_topk")):
        measure(TOPK + 1)
    assert resolve(directory).max_length == TOPK
