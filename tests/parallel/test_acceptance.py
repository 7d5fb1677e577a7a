"""Test the draft acceptance that a run measures, for every kind of layout, against independent code."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from swiftlite.acceptance.counts import DraftCounts
from swiftlite.acceptance.held_out import HeldOut, Prompt
from swiftlite.acceptance.report import read_acceptance
from swiftlite.args.commands import SftArgs
from swiftlite.base.heads import Heads
from swiftlite.bridge.hf_config import read_config
from swiftlite.families import FAMILIES
from swiftlite.families.resolved import resolve
from swiftlite.model.open import open_model
from swiftlite.plan.layout import layout_of
from swiftlite.runtime.distributed import session
from tests.engines import dflash_reference, eagle3_reference, feature_reference
from tests.engines.dflash_reference import DFlashReference
from tests.engines.eagle3_reference import Eagle3Reference
from tests.engines.feature_reference import FeatureReference
from tests.engines.reference import Reference, follow, write_trained
from tests.parallel.launch import launch, open_store, prepare_session
from tests.parallel.parity import CASES, SIZES, TP2_SP
from tests.tiers import selected, some_of
from tests.tiny import GEMMA4_E

pytestmark = pytest.mark.gloo

NEW_TOKENS = 11
# (family, layers of heads, drafts)
WAYS = {"dense": ("qwen3", 2, 2), "before norm": ("mimo", 2, 2), "latent": ("deepseek_v3", 2, 2)}
WAYS |= {"unrolled": ("glm4_moe", 1, 3), "eagle3": ("llama", 1, 3), "dflash": ("llama", 1, 3)}
WAYS["dspark"] = ("llama", 1, 3)
RANKS = {"dflash": 0, "dspark": 8}
"""Ranks of the Markov heads of block drafters."""
WAYS["features"] = ("llama", 1, 3)
WAYS["shared keys"] = ("gemma4_text", 1, 3)
FEATURES = [1, 2, 3]
NAMES = {
    "dense": ("TP2+SP", "PP2", "PP2xVPP2", "PP2 MTP apart", "CP2", "DP2"),
    "before norm": ("PP2 MTP apart", "PP2xVPP2", "DP2"),
    "latent": ("EP2xTP2", "CP2", "PP2xVPP2", "DP2"),
    "unrolled": ("TP2+SP", "EP2", "PP2", "PP2 MTP apart", "CP2"),
    "eagle3": ("TP2+SP", "PP2", "PP2 MTP apart", "CP2"),
    "dflash": ("TP2+SP", "PP2 MTP apart", "CP2"),
    "dspark": ("TP2+SP", "PP2", "CP2"),
    "features": ("TP2+SP", "PP2", "PP2 MTP apart", "CP2"),
    "shared keys": ("TP2+SP", "PP2", "CP2"),
}
OWN_SIZES = {"shared keys": SIZES | GEMMA4_E}
LAYOUTS = {name: case.options for name, case in CASES.items()} | {"TP2+SP": TP2_SP}


def expected_counts(directory: Path, way: str, prompts: list[list[int]]) -> DraftCounts:
    """Return the counts of an engine that generates NEW_TOKENS after each prompt."""
    family, depth, num_drafts = WAYS[way]
    if way == "eagle3":
        reference: Reference = Eagle3Reference.load(directory, family)
    elif way in RANKS:
        reference = DFlashReference.load(directory, family)
    elif way == "features":
        reference = FeatureReference.load(directory, family)
    else:
        reference = follow(Reference.load(directory, family, depth), FAMILIES[family].mtp.drafting)
    drafts, accepted = 0, [0] * num_drafts
    for prompt in prompts:
        row = reference.greedy(prompt, NEW_TOKENS)
        done = 1
        while done < NEW_TOKENS:
            proposal = reference.draft(prompt + row[:done], num_drafts)
            drafts += 1
            hits = 0
            while hits < num_drafts and proposal[hits : hits + 1] == row[done + hits : done + hits + 1]:
                accepted[hits] += 1
                hits += 1
            done += hits + 1
    return DraftCounts(drafts, drafts * num_drafts, tuple(accepted))


@dataclass(frozen=True)
class Job:
    """A measurement of a model's acceptance with a layout, written to `path`."""

    hf_dir: Path
    path: Path
    heads: Heads
    options: dict[str, Any]
    prompts: list[list[int]]


def measure_all(jobs: Sequence[Job], ports: Sequence[int]) -> None:
    """Run each job in a separate session in this process."""
    for job, port in zip(jobs, ports, strict=True):
        prepare_session(port)
        measure(job)


def measure(job: Job) -> None:
    options = dict(job.options)
    if stages := options.get("pipeline_model_parallel_layout"):
        options["pipeline_model_parallel_layout"] = stages.replace("MTP", "m" * job.heads.layers)
    with session(layout_of(SftArgs(model=str(job.hf_dir), **options)), timeout_minutes=2) as mesh:
        chunks, _ = open_model(resolve(job.hf_dir), mesh, dtype=torch.float32, heads=job.heads)
        for chunk in chunks:
            chunk.eval()
        held_out = HeldOut(
            path=job.path,
            mesh=mesh,
            num_drafts=job.heads.drafts,
            prompts=[Prompt(prompt) for prompt in job.prompts],
            eos_token_ids=(),
            max_new_tokens=NEW_TOKENS,
            max_length=512,
        )
        held_out.measure("before", chunks, {f"eval_mtp_{k + 1}_acceptance": 0.5 for k in range(job.heads.drafts)})


@pytest.fixture(scope="module")
def measured(request, shared, tmp_path_factory) -> dict[tuple[str, str], tuple[dict[str, Any], DraftCounts]]:
    """Return the content of acceptance.json and the expected counts, by kind of model and layout."""
    root = tmp_path_factory.mktemp("acceptance")
    jobs: dict[tuple[str, str], Job] = {}
    expected: dict[str, DraftCounts] = {}
    needed = selected(request, "way", "name")
    for way in dict.fromkeys(way for way, _ in needed):
        family, depth, num_drafts = WAYS[way]

        def make(
            directory: Path, way: str = way, family: str = family, depth: int = depth, num_drafts: int = num_drafts
        ) -> None:
            def draft_as(reference: Reference) -> Reference:
                if way == "eagle3":
                    return Eagle3Reference.of(reference.trunk, family, FEATURES, "3.1")
                if way in RANKS:
                    return DFlashReference.of(reference.trunk, family, FEATURES, layers=2, rank=RANKS[way])
                if way == "features":
                    return FeatureReference.of(reference.trunk, family, FEATURES)
                return follow(reference, FAMILIES[family].mtp.drafting)

            sizes = OWN_SIZES.get(way, SIZES)
            is_tied = way == "shared keys"  # untied, it does not learn its rows
            prompts = write_trained(directory, family, depth, is_tied, num_drafts, draft_as, **sizes)
            if way == "eagle3":
                eagle3_reference.declare(directory, "3.1", FEATURES)
            elif way in RANKS:
                dflash_reference.declare(directory, FEATURES, layers=2, rank=RANKS[way])
            elif way == "features":
                feature_reference.declare(directory, FEATURES)
            (directory / "prompts.json").write_text(json.dumps(prompts))

        directory = shared(f"acceptance-{way}", make)
        heads = replace(Heads.from_config(read_config(directory)), unroll=num_drafts // depth)
        prompts = json.loads((directory / "prompts.json").read_text())
        chosen = [prompts[index] for index in (1, 11, 3, 9, 10)]  # uneven for two ranks; known by heart and new
        expected[way] = expected_counts(directory, way, chosen)
        for name in [name for other, name in needed if other == way]:
            jobs[way, name] = Job(directory, root / f"{way} {name}", heads, LAYOUTS[name], chosen)
    stores = [open_store() for _ in jobs]
    launch(2, measure_all, list(jobs.values()), [store.port for store in stores])
    return {key: (read_acceptance(job.path)["before"]["generated"], expected[key[0]]) for key, job in jobs.items()}


# Each kind of layout with one of two models, which must be trained first.
@pytest.mark.parametrize(
    ("way", "name"),
    some_of(
        [(way, name) for way, names in NAMES.items() for name in names],
        ("latent", "EP2xTP2"),
        ("latent", "CP2"),
        ("latent", "PP2xVPP2"),
        ("latent", "DP2"),
        ("eagle3", "TP2+SP"),
        ("dflash", "TP2+SP"),
        ("features", "PP2 MTP apart"),
        ("shared keys", "PP2"),
    ),
)
def test_counts_are_those_of_an_engine(measured, way, name):
    found, expected = measured[way, name]
    assert found == {"prompts": 5, **expected.to_json()}
    assert 0 < found["acceptance_rate"] < 1
