"""Test that every missing, unexpected or misshapen tensor is reported before any tensor is read or written."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from swiftlite.base.errors import UserError
from swiftlite.bridge.binding import Shard, bind
from swiftlite.bridge.join import GATE_UP, Interleave, Join, PadEnd, SwapHalves
from swiftlite.bridge.rows import Row
from tests.messages import has_line, mentions, naming

ROWS = [
    Row("embedding", {"embed": (10, 4)}, PadEnd(), hf_copies=("head",), mcore_copies=("output",)),
    Row("qkv", {"q": (8, 4), "k": (4, 4), "v": (4, 4)}, Interleave(2)),
    Row("norm", {"ln": (4,)}),
]
HF_SHAPES = {"embed": (10, 4), "q": (8, 4), "k": (4, 4), "v": (4, 4), "ln": (4,)}


def shards() -> list[Shard]:
    return [Shard("embedding", torch.zeros(12, 4)), Shard("qkv", torch.zeros(16, 4)), Shard("norm", torch.zeros(4))]


def message(*args, **kwargs) -> str:
    with pytest.raises(UserError) as raised:
        bind(*args, **kwargs)
    return str(raised.value)


def test_complete():
    bindings = bind(shards(), ROWS, hf_shapes=HF_SHAPES)
    assert [(binding.shard.name, binding.is_copy) for binding in bindings] == [
        ("embedding", False),
        ("qkv", False),
        ("norm", False),
    ]


def test_copies_on_both_sides_may_be_there_or_not():
    with_output = [*shards(), Shard("output", torch.zeros(12, 4))]
    assert bind(with_output, ROWS, hf_shapes=HF_SHAPES | {"head": (10, 4)})[-1].is_copy
    without_embedding = with_output[1:]  # the last pipeline stage of a tied model
    assert len(bind(without_embedding, ROWS, hf_shapes=HF_SHAPES)) == 3


def test_parameters_of_other_stages_count():
    assert len(bind(shards()[:1], ROWS, others_hold={"qkv", "norm"}.__contains__, hf_shapes=HF_SHAPES)) == 1
    assert has_line(message(shards()[:1], ROWS, others_hold={"norm"}.__contains__), "Megatron qkv")


def test_parameters_that_get_their_numbers_elsewhere_must_be_in_the_model():
    held = [*shards(), Shard("mtp.norm", torch.zeros(4))]
    assert has_line(message(held, ROWS, hf_shapes=HF_SHAPES), "mtp.norm")
    assert len(bind(held, ROWS, not_read=["mtp.norm"], hf_shapes=HF_SHAPES)) == len(shards())
    assert has_line(message(shards(), ROWS, not_read=["mtp.norm"]), "Megatron mtp.norm")
    assert bind(shards(), ROWS, not_read=["mtp.norm"], others_hold={"mtp.norm"}.__contains__)


@given(
    missing=st.sets(st.sampled_from(sorted(HF_SHAPES))),
    extra=st.sets(st.sampled_from(["bias", "model.mtp", "qq"])),
    lost=st.sets(st.sampled_from(["embedding", "qkv", "norm"])),
    added=st.sets(st.sampled_from(["mtp.weight", "router"])),
)
def test_any_missing_or_extra_name_is_named(missing, extra, lost, added):
    hf_shapes = {key: shape for key, shape in HF_SHAPES.items() if key not in missing} | dict.fromkeys(extra, (1,))
    held = [shard for shard in shards() if shard.name not in lost] + [Shard(name, torch.zeros(1)) for name in added]
    if not (missing or extra or lost or added):
        bind(held, ROWS, hf_shapes=hf_shapes)
        return
    lines = message(held, ROWS, hf_shapes=hf_shapes).splitlines()[1:]
    names = [*missing, *extra, *lost, *added]
    assert len(lines) == len(names)
    for name in names:
        assert any(mentions(line, name) for line in lines), name


def test_ignored_keys_are_not_unexpected():
    extra = HF_SHAPES | {"inv_freq": (2,)}
    assert "inv_freq" in message(shards(), ROWS, hf_shapes=extra)
    assert len(bind(shards(), ROWS, hf_shapes=extra, ignored=["inv_freq"])) == len(shards())


@pytest.mark.parametrize("key", sorted(HF_SHAPES))
def test_hf_shape_differs_from_the_config(key):
    wrong = (*HF_SHAPES[key][:-1], HF_SHAPES[key][-1] + 1)
    assert mentions(
        message(shards(), ROWS, hf_shapes=HF_SHAPES | {key: wrong}),
        f"{key} {list(wrong)} config.json {list(HF_SHAPES[key])}",
    )


@pytest.mark.parametrize(
    "tensor", [torch.zeros(15, 4), torch.zeros(16, 5), torch.zeros(64), torch.zeros(16, 4, 1), torch.zeros(20, 4)]
)
def test_megatron_shape_cannot_hold_the_tensors(tensor):
    held = [shards()[0], Shard("qkv", tensor), shards()[2]]
    assert has_line(message(held, ROWS, hf_shapes=HF_SHAPES), f"qkv {list(tensor.shape)}")


def test_vocabulary_is_never_cut():
    held = [Shard("embedding", torch.zeros(9, 4)), *shards()[1:]]
    assert has_line(message(held, ROWS, hf_shapes=HF_SHAPES), "embedding [9, 4] embed [10, 4]")


def test_two_rows_for_one_name_are_a_mistake_in_the_table():
    with pytest.raises(ValueError, match=naming("ln")):
        bind(shards(), [*ROWS, Row("other", {"ln": (4,)})])
    with pytest.raises(ValueError, match=naming("norm")):
        bind(shards(), [*ROWS, Row("norm", {"other": (4,)})])


def test_tensors_that_differ_across_the_join_are_a_mistake_in_the_table():
    rows = [Row("qkv", {"q": (8, 4), "k": (8, 5)})]
    with pytest.raises(ValueError, match=naming("qkv 0 (8, 4) (8, 5)")):
        bind([Shard("qkv", torch.zeros(16, 4))], rows)


def test_borrowed_rows_read_what_others_claim():
    held = [*shards(), Shard("mtp.norm", torch.zeros(4))]
    bindings = bind(held, ROWS, borrowed=[Row("mtp.norm", {"ln": (4,)})], hf_shapes=HF_SHAPES)
    assert next(bindings[-1].slices()).hf_key == "ln"


def test_layout_that_loses_numbers_is_a_mistake_in_the_table():
    class FirstTensorOnly(Interleave):
        def source_ranges(self, lengths, total, tp_size):
            return super().source_ranges(lengths, total, tp_size)[:1] * 2

    rows = [Row("qkv", {"q": (4, 4), "k": (4, 4)}, FirstTensorOnly())]
    with pytest.raises(ValueError, match=naming("qkv")):
        bind([Shard("qkv", torch.zeros(8, 4))], rows)


def scatter(row: Row, whole: dict[str, torch.Tensor], shape: tuple[int, ...], dim: int | None, tp_size: int):
    """Return the parameter of each rank, filled through bindings."""
    for rank in range(tp_size):
        local = list(shape)
        if dim is not None:
            local[dim] //= tp_size
        shard = Shard(row.mcore, torch.full(local, -1.0), dim, rank, tp_size)
        for _, local_index, key, index in bind([shard], [row])[0].slices():
            shard.tensor[local_index] = 0.0 if key is None else whole[key][index]
        yield shard.tensor


# What megatron-core holds on each rank, written with chunk and cat as its own layers split their weights.
@pytest.mark.parametrize("tp_size", [1, 2, 4])
@pytest.mark.parametrize(
    ("join", "shapes", "dim"),
    [
        (Interleave(1), {"a": (8, 4)}, 0),  # column parallel
        (Interleave(1), {"a": (3, 8)}, 1),  # row parallel: cut across the join's axis
        (Interleave(1), {"a": (8,)}, None),  # replicated
        (Interleave(4), {"a": (16, 2), "b": (8, 2), "c": (8, 2)}, 0),  # linear_qkv
        (Interleave(4), {"a": (16,), "b": (8,), "c": (8,)}, 0),  # its bias
        (GATE_UP, {"a": (8, 3), "b": (8, 3)}, 0),  # linear_fc1
        (SwapHalves(axis=1), {"a": (8, 6)}, 0),  # MiMo's projection: swapped in columns, cut in rows
        (PadEnd(), {"a": (13, 3)}, 0),  # embedding of a padded vocabulary
    ],
)
def test_parts_of_all_ranks(join: Join, shapes, dim, tp_size):
    whole = {key: torch.randn(shape) for key, shape in shapes.items()}
    expected = list(whole.values())
    if isinstance(join, SwapHalves):
        first, second = whole["a"].chunk(2, dim=1)
        expected = [torch.cat([second, first], dim=1)]
    elif isinstance(join, PadEnd):
        expected = [torch.cat([whole["a"], torch.zeros(3, 3)])]
    elif len(shapes) == 3:
        groups = zip(*(tensor.chunk(4) for tensor in whole.values()), strict=True)
        expected = [torch.cat([part for group in groups for part in group])]
    shape = list(expected[0].shape)
    shape[join.axis] = sum(tensor.shape[join.axis] for tensor in expected)
    parts = scatter(Row("x", shapes, join), whole, tuple(shape), dim, tp_size)
    for rank, part in enumerate(parts):
        assert torch.equal(
            part, torch.cat([tensor if dim is None else tensor.chunk(tp_size, dim)[rank] for tensor in expected])
        )
