"""Test sliding windows: which tokens a token sees, in padded, packed and split rows, in decoding and in drafts.

The model is Qwen3 whose layers have windows and see all tokens in turn, which transformers supports.
"""

from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from swiftlite import families
from swiftlite.acceptance import greedy
from swiftlite.args.fields import ParallelLayout
from swiftlite.bridge.transfer import load_hf
from swiftlite.families import dense
from swiftlite.families.family import HfConfig
from swiftlite.families.layer import Layer, num_pairs
from swiftlite.families.models.qwen3 import QWEN3
from swiftlite.model.attention import attention as attention_module
from swiftlite.model.attention.attention import CoreAttention
from swiftlite.model.attention.draft_attention import Draft, DraftAttention
from swiftlite.model.build import build_model
from swiftlite.model.context_parallel import causal_segments, describe_packed, shard_sequence
from swiftlite.model.gpt import GPTModel
from swiftlite.model.inputs import ModelInputs
from swiftlite.plan.cost.flops import training_flops
from swiftlite.runtime.distributed import session
from tests.growth.unheard import hf_config, make_model
from tests.model.test_attention import make_attention, make_packed, written_out
from tests.parallel.launch import launch
from tests.tiers import some_of

WINDOW, LENGTH, CHANGED = 8, 64, 20
CU_SEQLENS = torch.tensor([0, 12, 64], dtype=torch.int32)


def layer(hf_config: HfConfig, number: int) -> Layer:
    window = hf_config["sliding_window"] if hf_config["layer_types"][number] == "sliding_attention" else None
    return Layer(dense.attention(hf_config, qk_norm=True, window=window), dense.mlp(hf_config))


WINDOWED = replace(QWEN3, layer=layer, check=lambda hf_config: None)


def write_model(directory: Path, *kinds: str) -> Path:
    """Write a model with layers of these kinds and one head."""
    return make_model(
        directory,
        Qwen3Config,
        Qwen3ForCausalLM,
        intermediate_size=96,
        num_hidden_layers=len(kinds),
        layer_types=[f"{kind}_attention" for kind in kinds],
        use_sliding_window=True,
        sliding_window=WINDOW,
    )


def load(directory: Path, mesh: Any, dtype: torch.dtype = torch.float32) -> GPTModel:
    config = hf_config(directory)
    (model,) = build_model(WINDOWED.architecture(config), config, mesh=mesh, dtype=dtype)
    load_hf([model], directory, WINDOWED, config)
    return model.eval()


def row() -> torch.Tensor:
    return torch.arange(LENGTH)[None] * 37 % 300


@pytest.fixture(scope="module")
def mixed(tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("mixed"), "sliding", "full", "sliding")


@pytest.fixture(scope="module")
def one_layer(tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("one"), "sliding")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_logits_are_those_of_transformers(mixed, mesh, dtype):
    theirs = Qwen3ForCausalLM.from_pretrained(mixed, dtype=dtype)
    with torch.no_grad():
        ours = load(mixed, mesh, dtype)(ModelInputs(row(), torch.arange(LENGTH)[None])).main
        assert torch.equal(ours, theirs(row(), use_cache=False).logits)


def test_long_rows_are_computed_in_blocks_of_queries(mixed, mesh, monkeypatch):
    model, positions = load(mixed, mesh), torch.arange(LENGTH)[None]
    with torch.no_grad():
        whole = model(ModelInputs(row(), positions)).main
        monkeypatch.setattr(attention_module, "MAX_QUERIES", 24)
        blocks = model(ModelInputs(row(), positions)).main
    # Sums in another order: roundings of logits of up to 50.
    torch.testing.assert_close(blocks, whole, rtol=0, atol=1e-4)


def test_heads_have_the_attention_of_the_last_layer_without_a_window(mixed, one_layer):
    architecture = WINDOWED.architecture(hf_config(mixed))
    assert architecture.mtp_sources == (1, 1)
    assert architecture.mtp_block.attention.window is None
    assert WINDOWED.architecture(hf_config(one_layer)).mtp_block.attention.window == WINDOW


def states(model: GPTModel, tokens: torch.Tensor, cu_seqlens: torch.Tensor | None) -> torch.Tensor:
    """Return the trunk's states of this rank's part of a row, [S, H]."""
    group: Any = model.pg_collection.cp
    lengths = [LENGTH] if cu_seqlens is None else cu_seqlens.diff().tolist()
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    tokens, positions = (shard_sequence(t, 1, group.rank(), group.size(), cu_seqlens) for t in (tokens, positions))
    packed = describe_packed(cu_seqlens)
    with torch.no_grad():
        rotary_emb = model.rotary_emb(ModelInputs(positions, positions, packed_seq_params=packed))
        return model.forward_decoder(model.forward_preprocess(tokens, positions), rotary_emb, packed)[:, 0]


def changes(directory: Path, cp: int, cu_seqlens: torch.Tensor | None) -> list[int]:
    """Return the tokens of this rank's part of the row whose state has another bit if one token is changed."""
    with session(ParallelLayout(context_parallel_size=cp)) as mesh:
        model = load(directory, mesh)
        other = row()
        other[0, CHANGED] += 1
        is_changed = (states(model, row(), cu_seqlens) != states(model, other, cu_seqlens)).any(-1)
        positions = shard_sequence(torch.arange(LENGTH), 0, mesh.cp.rank(), cp, cu_seqlens)
        return [int(position) for position in positions[is_changed]]


@pytest.mark.gloo
@pytest.mark.parametrize("cp", some_of([1, 2], 2))
@pytest.mark.parametrize("cu_seqlens", [None, CU_SEQLENS], ids=["padded", "packed"])
def test_a_token_outside_of_the_window_changes_no_bit(one_layer, cp, cu_seqlens):
    found = chain.from_iterable(launch(cp, changes, one_layer, cp, cu_seqlens))
    assert sorted(found) == list(range(CHANGED, CHANGED + WINDOW))


def test_decoding_sees_the_same_window(mixed, mesh, monkeypatch):
    """Cached prompts are processed in parts, then token by token, as without a cache."""
    model, prompt = load(mixed, mesh), row()[0, :40].tolist()
    expected = list(prompt)
    with torch.no_grad():
        for _ in range(12):
            tokens = torch.tensor([expected])
            logits = model(ModelInputs(tokens, torch.arange(tokens.size(1))[None])).main
            expected.append(int(logits[0, -1].argmax()))
    monkeypatch.setattr(greedy, "MAX_PASS_TOKENS", 7)
    decoded = greedy.GreedyRow.of(prompt, 12, LENGTH)
    rows = greedy.GreedyRows([model], mesh, [decoded], ())
    while not decoded.is_finished:
        rows.step()
    assert decoded.tokens == expected


def test_a_kernel_for_all_sequences_gets_the_window(mesh):
    """The kernel computes what calls for each sequence do, also for a context-parallel rank's part of the row."""
    calls = make_attention(mesh, window=WINDOW)
    together = make_attention(mesh, window=WINDOW, varlen=in_one_call)
    assert isinstance(calls, CoreAttention)
    torch.manual_seed(0)
    key, value = (torch.randn(LENGTH, 1, 2, 16, dtype=torch.float64) for _ in range(2))
    for rank, size in [(0, 1), (0, 2), (1, 2)]:
        query = torch.randn(LENGTH // size, 1, 4, 16, dtype=torch.float64)
        segments = causal_segments((12, 52), rank, size, WINDOW)
        results = [attention._attend_row(query, key, value, segments) for attention in (calls, together)]
        torch.testing.assert_close(*results, rtol=0, atol=1e-13)


def in_one_call(query_TND, key_KGD, value_KGD, cu_q, cu_k, longest_q, longest_k, *, scale, window):
    """Compute attention like a packed kernel, by its definition."""
    parts = []
    for index in range(len(cu_q) - 1):
        query = query_TND[cu_q[index] : cu_q[index + 1]]
        key, value = (
            tensor[cu_k[index] : cu_k[index + 1]].repeat_interleave(2, dim=1) for tensor in (key_KGD, value_KGD)
        )
        distance = torch.arange(len(key))[None] - (torch.arange(len(query))[:, None] + len(key) - len(query))
        scores = torch.einsum("qnd,knd->nqk", query, key) * scale
        scores = scores.masked_fill((distance > 0) | (distance <= -window), -torch.inf)
        parts.append(torch.einsum("nqk,knd->qnd", scores.softmax(-1), value))
    return torch.cat(parts)


@pytest.mark.parametrize("window", [2, 8])
def test_steps_of_a_draft_see_the_window_of_their_position(mesh, window):
    """Step 3 from s sees what a row of the tokens up to s and the two tokens of the draft would show it."""
    attention = make_attention(mesh, DraftAttention, window=window)
    torch.manual_seed(0)
    steps = [[torch.randn(20, 1, heads, 16, dtype=torch.float64) for heads in (4, 2, 2)] for _ in range(3)]
    draft = Draft()
    for query, key, value in steps:
        out = attention(query, key, value, draft, packed_seq_params=None)
    for position in (0, 5, 19):
        keys, values = (
            torch.cat([steps[0][part][: position + 1, 0], *(steps[step][part][position] for step in (1, 2))])
            for part in (1, 2)
        )
        seen = slice(max(0, len(keys) - window), None)
        queries = steps[2][0][position]
        expected = written_out(queries.expand(len(keys[seen]), -1, -1), keys[seen], values[seen])[-1]
        torch.testing.assert_close(out[position, 0], expected, rtol=0, atol=1e-13)


def test_operations_and_pairs_are_those_of_the_window():
    pairs = [[second - first < 3 for first in range(second + 1)] for second in range(9)]
    assert num_pairs(9, 3) == sum(map(sum, pairs))
    assert num_pairs(3, 3) == num_pairs(3, None) == 6


def test_flops_count_only_pairs_within_the_window(mixed, monkeypatch):
    monkeypatch.setitem(families.FAMILIES, "qwen3", WINDOWED)
    config = hf_config(mixed)
    both = [training_flops(config), training_flops(config | {"sliding_window": LENGTH})]
    per_pair = 3 * 2 * WINDOWED.architecture(config).layers[0].attention.macs_per_pair()
    saved = 2 * per_pair * (num_pairs(LENGTH, None) - num_pairs(LENGTH, WINDOW))
    outside = [flops.outside_windows(LENGTH) for flops in both]
    assert outside == [saved, 0]
    steps = [
        flops.step(LENGTH, LENGTH**2, [1], outside_windows=more) for flops, more in zip(both, outside, strict=True)
    ]
    assert steps[1] - steps[0] == saved


def test_the_output_of_one_block_is_not_copied(mesh):
    """The backward pass keeps the output of the kernel, which is also the input of the next layer."""
    attention = make_attention(mesh, window=WINDOW)
    inputs = [torch.randn(LENGTH, 1, heads, 16, requires_grad=True) for heads in (4, 2, 2)]
    kept = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = attention(*inputs, None)
    assert out.data_ptr() in kept


def test_packed_rows_are_computed_as_sequence_by_sequence(mesh):
    attention = make_attention(mesh, window=WINDOW)
    torch.manual_seed(0)
    inputs = [torch.randn(LENGTH, heads, 16, requires_grad=True) for heads in (4, 2, 2)]
    packed = attention(*inputs, None, packed_seq_params=make_packed([12, 52]))
    sequences = zip(*(tensor.split([12, 52]) for tensor in inputs), strict=True)
    alone = torch.cat([attention(*(part[:, None] for part in sequence), None)[:, 0] for sequence in sequences])
    assert torch.equal(packed, alone)
