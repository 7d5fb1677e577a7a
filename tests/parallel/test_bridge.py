"""Test weight conversion with two tensor-parallel ranks, and conversion through checkpoints of other layouts.

Files must be bitwise identical. Parameters are compared by the logits that the model computes with them.
"""

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.multiprocessing.spawn import ProcessRaisedException

from swiftlite import families
from swiftlite.args.fields import ParallelLayout
from swiftlite.base.heads import Heads
from swiftlite.bridge.encoding.expert_stack import transposed_stacks
from swiftlite.bridge.hf_config import read_config
from swiftlite.bridge.saving import save_hf, stream_hf
from swiftlite.bridge.tensors import describe
from swiftlite.bridge.transfer import MtpInit, load_hf
from swiftlite.families import Family
from swiftlite.model.build import build_model
from swiftlite.model.gpt import GPTModel
from swiftlite.model.inputs import ModelInputs
from swiftlite.plan.layout import layout_problems
from swiftlite.runtime.distributed import session
from swiftlite.runtime.mesh import Mesh
from swiftlite.train.checkpoint.checkpointer import Checkpointer, load_checkpoint
from swiftlite.train.checkpoint.state import CheckpointState
from tests.parallel.launch import launch, open_store, prepare_session
from tests.parallel.parity import sensitivity
from tests.tiers import selected, some_of
from tests.tiny import CLASSES, WRAPPED, make_tiny_hf

pytestmark = pytest.mark.gloo

# family, tied, depth
# What is carried through is for tests/bridge/test_wrapped.py; the wrapped families' other tensors are those of `_text`.
NAMES = [name for name in families.FAMILIES if name not in (*WRAPPED, "qwen3_5_moe_text")]
# Every family, and both other forms of the files for a family of each kind of heads.
CASES = [(family, False, 1) for family in NAMES]
CASES += [(family, *rest) for family in ("qwen3", "mimo", "glm4_moe") for rest in ((False, 0), (True, 2))]
# In CI, families with tensors that are split in ways of their own. tests/bridge/test_transfer.py converts every family.
SPLIT = ("mimo", "glm4_moe", "deepseek_v3", "deepseek_v32", "qwen3_next", "gpt_oss", "step3p5", "minimax_m2", "olmo2")
DAILY = [("qwen3", False, 0), ("qwen3", True, 2), *((family, False, 1) for family in (NAMES[0], *SPLIT, "qwen2_moe"))]
SHARDED = CASES[:1]
"""Cases that are also written in several files, which does not depend on the family."""
SIZES: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
TOKENS = torch.arange(3, 15)[None]


def name(family: str, tied: bool, depth: int) -> str:
    return f"{family}-{'tied' if tied else 'untied'}-{depth}"


def build(source: Path, mesh: Mesh, depth: int) -> list[GPTModel]:
    hf_config = read_config(source)
    return build_model(
        families.get(hf_config).architecture(hf_config),
        hf_config,
        mesh=mesh,
        dtype=torch.float32,
        heads=Heads(depth),
    )


def load(source: Path, mesh: Mesh, depth: int, mtp_init: MtpInit = "checkpoint") -> GPTModel:
    hf_config = read_config(source)
    if mesh.tp.size() > 1 and needs_sequence_parallel(hf_config):
        mesh = replace(mesh, layout=replace(mesh.layout, sequence_parallel=True))  # which takes no other groups
    model = build(source, mesh, depth)
    load_hf(model, source, families.get(hf_config), hf_config, mtp_init=mtp_init)
    return model[0].eval()


def needs_sequence_parallel(hf_config: dict[str, Any]) -> bool:
    return families.get(hf_config).architecture(hf_config).has_experts


def save(model: GPTModel, source: Path, out_dir: Path, max_shard_bytes: int) -> None:
    hf_config = read_config(source)
    described = describe(source)
    dtypes = {key: tensor["dtype"] for key, tensor in described.items()}
    transposed = transposed_stacks({key: tensor["shape"] for key, tensor in described.items()})
    family = families.get(hf_config)
    save_hf([model], out_dir, family, hf_config, dtypes=dtypes, transposed=transposed, max_shard_bytes=max_shard_bytes)


@torch.no_grad()
def compute(model: GPTModel) -> list[torch.Tensor]:
    """Return the logits of the trunk and of each head, for this rank's part of the vocabulary."""
    logits = model(ModelInputs(TOKENS, torch.arange(TOKENS.shape[1])[None]))
    return [logits.main, *logits.mtp]


def convert_all(root: Path, tp_size: int, cases: Sequence[tuple[str, bool, int]]) -> dict[str, list[torch.Tensor]]:
    """Convert each case to Megatron and back, with and without shards; return the logits by case."""
    logits = {}
    with session(ParallelLayout(tensor_model_parallel_size=tp_size)) as mesh:
        for case in cases:
            source = root / name(*case)
            model = load(source, mesh, case[2])
            logits[name(*case)] = compute(model)
            save(model, source, root / f"tp{tp_size}" / name(*case), 10**9)
            if case in SHARDED:
                save(model, source, root / f"tp{tp_size}-sharded" / name(*case), 40_000)
        for mtp_init in ("random", "copy_last_layer"):
            source = root / name("qwen3", False, 0)
            model = load(source, mesh, 1, mtp_init)
            logits[mtp_init] = compute(model)
            save(model, source, root / f"tp{tp_size}" / mtp_init, 10**9)
        dist.barrier()
    return logits


@pytest.fixture(scope="module")
def converted(request, tmp_path_factory) -> tuple[Path, dict[int, list[dict[str, list[torch.Tensor]]]]]:
    """Convert the selected cases with TP 1 and 2; return the directory of the files, and the logits of each rank by TP
    size.
    """
    root = tmp_path_factory.mktemp("converted")
    cases = list(dict.fromkeys([*selected(request, "case"), ("qwen3", False, 0)]))
    for family, tied, depth in cases:
        make_tiny_hf(root / name(family, tied, depth), family, depth, tied, **SIZES)
    return root, {tp_size: launch(tp_size, convert_all, root, tp_size, cases) for tp_size in (1, 2)}


def read_all(directory: Path) -> dict[str, torch.Tensor]:
    return {key: tensor for path in directory.glob("*.safetensors") for key, tensor in load_file(path).items()}


@pytest.mark.parametrize(
    ("case", "out"),
    some_of(
        [*product(CASES, ("tp1", "tp2")), *product(SHARDED, ("tp1-sharded", "tp2-sharded"))],
        *product(DAILY, ("tp1", "tp2")),
        *product(SHARDED, ("tp1-sharded", "tp2-sharded")),
    ),
    ids=lambda value: value if isinstance(value, str) else name(*value),
)
def test_round_trip_is_bit_exact(converted, case, out):
    root, _ = converted
    original, written = read_all(root / name(*case)), read_all(root / out / name(*case))
    assert written.keys() == original.keys()
    for key, tensor in original.items():
        assert tensor.dtype == written[key].dtype
        assert torch.equal(tensor, written[key]), key
    names = sorted(path.name for path in (root / out / name(*case)).iterdir())
    if "sharded" in out:
        index = json.loads((root / out / name(*case) / names[-1]).read_text())
        assert names == sorted({*index["weight_map"].values(), "model.safetensors.index.json"})
    else:
        assert names == ["model.safetensors"]


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=() if case in DAILY else pytest.mark.slow, id=name(*case)) for case in CASES],
)
def test_two_ranks_compute_what_one_computes(converted, case):
    """If a part were on the wrong rank, files would still be identical after the conversion back, but logits would
    differ.
    """
    root, logits = converted
    (alone,), (first, second) = logits[1], logits[2]
    for one, *parts in zip(alone[name(*case)], first[name(*case)], second[name(*case)], strict=True):
        # Sums over two halves: float32 rounding on logits of about 10; a misplaced part differs by about 1.
        tolerance: Any = {"rtol": 1e-5, "atol": 1e-4 * sensitivity(case[0])}
        torch.testing.assert_close(torch.cat(parts, dim=-1), one, **tolerance)
    if case[0] in CLASSES and case[0] != "mimo":
        config_class, model_class = CLASSES[case[0]]
        config = config_class.from_pretrained(root / name(*case))
        # By this name, transformers finds how experts are stored; it does not know kimi_k2.
        config.model_type = config_class.model_type
        model = model_class.from_pretrained(root / name(*case), config=config, dtype=torch.float32)
        torch.testing.assert_close(alone[name(*case)][0], model(TOKENS).logits, **tolerance)


@pytest.mark.parametrize("mtp_init", ["random", "copy_last_layer"])
def test_new_heads_do_not_depend_on_the_number_of_ranks(converted, mtp_init):
    root, _ = converted
    one, two = read_all(root / "tp1" / mtp_init), read_all(root / "tp2" / mtp_init)
    assert "mtp.fc.weight" in one
    assert one.keys() == two.keys()
    assert all(torch.equal(one[key], two[key]) for key in one)


def layout(tp: int = 1, pp: int = 1, vpp: int | None = None, ep: int = 1, etp: int = 1, stages: str | None = None):
    return ParallelLayout(
        tensor_model_parallel_size=tp,
        sequence_parallel=tp > 1,
        pipeline_model_parallel_size=pp,
        num_virtual_stages_per_pipeline_rank=vpp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=etp,
        pipeline_model_parallel_layout=stages,
    )


LAYOUTS = [  # of 4 processes
    layout(),
    layout(tp=2),
    layout(pp=2),
    layout(pp=4),
    layout(tp=2, pp=2),
    layout(pp=2, vpp=2),
    layout(tp=2, pp=2, vpp=2),
    layout(pp=2, stages="Et*3|tmL"),
    layout(pp=4, stages="Ett|tt|m|L"),
    layout(ep=2),
    layout(ep=4),
    layout(tp=2, ep=2),
    layout(tp=2, etp=2),
    layout(pp=2, ep=2),
    layout(tp=2, pp=2, etp=2),
    layout(pp=2, vpp=2, ep=2),
]
Pair = tuple[str, bool, ParallelLayout, ParallelLayout]
# In CI, one family of each kind of attention: latent, linear, and with windows and sinks. All have experts.
RESHARDED = ("deepseek_v3", "qwen3_next", "gpt_oss")
resharded_families = pytest.mark.parametrize("family", some_of(NAMES, *RESHARDED))


def reshard_all(root: Path, pairs: Sequence[Pair], ports: Sequence[int]) -> None:
    """In this process, convert files through a model with one layout, its checkpoint, and a model
    with another layout.
    """
    port = iter(ports)
    for family_name, tied, first, second in pairs:
        source, out_dir = root / name(family_name, tied, 1), root / family_name
        hf_config = read_config(source)
        family = families.get(hf_config)
        for one in (first, second):
            prepare_session(next(port))
            with session(one, tied_embeddings=tied, timeout_minutes=2) as mesh:
                model = build(source, mesh, 1)
                if one is first:
                    load_hf(model, source, family, hf_config)
                    Checkpointer(
                        out_dir, mesh, model, None, CheckpointState(step=0, mtp_num_layers=1, torch_dtype="float32")
                    ).save(1)
                else:
                    for parameter in (parameter for chunk in model for parameter in chunk.parameters()):
                        parameter.data.fill_(float("nan"))
                    load_checkpoint(out_dir / "checkpoint-1", mesh, model)
                    save_hf(model, out_dir / "hf", family, hf_config, dtypes="float32")
                    stream(model, out_dir, family, hf_config)
                dist.barrier()


def stream(model: list[GPTModel], out_dir: Path, family: Family, hf_config: dict[str, Any]) -> None:
    """Write the tensors that the first rank receives to trunk.safetensors and heads.safetensors.

    Other ranks receive none.
    """
    for part in ("trunk", "heads"):
        tensors = {}
        for bucket in stream_hf(model, family, hf_config, part, bucket_bytes=20_000):
            tensors |= bucket
        if dist.get_rank() == 0:
            save_file(tensors, out_dir / f"{part}.safetensors")
        else:
            assert not tensors


@pytest.fixture(scope="module")
def resharded(request, tmp_path_factory) -> tuple[Path, dict[str, Pair]]:
    root = tmp_path_factory.mktemp("resharded")
    generator = random.Random(0)
    pairs: list[Pair] = []
    for family in selected(request, "family"):
        tied = len(pairs) % 2 == 0
        source = make_tiny_hf(root / name(family, tied, 1), family, 1, tied, **SIZES, num_hidden_layers=4)
        hf_config = read_config(source)
        architecture = families.get(hf_config).architecture(hf_config)
        possible = [one for one in LAYOUTS if not layout_problems(one, architecture, 1)]
        first, second = generator.sample(possible, 2)
        pairs.append((family, tied, first, second))
    stores = [open_store() for _ in range(2 * len(pairs))]
    launch(4, reshard_all, root, pairs, [store.port for store in stores])
    return root, {pair[0]: pair for pair in pairs}


@resharded_families
def test_over_a_checkpoint_to_another_layout(resharded, family):
    root, pairs = resharded
    _, tied, *_ = pairs[family]
    original, written = read_all(root / name(family, tied, 1)), read_all(root / family / "hf")
    assert written.keys() == original.keys()
    assert [key for key in original if not torch.equal(written[key], original[key])] == [], pairs[family]


@resharded_families
def test_an_engine_is_given_the_same_tensors_at_any_layout(resharded, family):
    root, pairs = resharded
    _, tied, *_ = pairs[family]
    hf_config = read_config(root / name(family, tied, 1))
    known = families.get(hf_config)
    original = read_all(root / name(family, tied, 1))
    for part in ("trunk", "heads"):
        streamed = load_file(root / family / f"{part}.safetensors")
        wanted = {key for key in original if known.is_mtp(hf_config, key) is (part == "heads")}
        copies = known.mtp.copies(hf_config, 0)
        assert streamed.keys() == wanted - copies.keys()
        assert [key for key in streamed if not torch.equal(streamed[key], original[key])] == [], pairs[family]


def fail_on_second_rank() -> None:
    with session(ParallelLayout(tensor_model_parallel_size=2)):
        if dist.get_rank() == 1:
            raise RuntimeError("the second rank fails")
        dist.barrier()


def test_launcher_brings_the_traceback_of_the_rank_that_failed():
    with pytest.raises(ProcessRaisedException, match="the second rank fails"):
        launch(2, fail_on_second_rank)
