"""The table of conventions has a line for every family, says what the families' own rows say, and is read right.

That its lines for vLLM are true is held by counts of the running engine (tests/e2e/test_engines.py) and by the classes
that its own configuration chooses (tests/engines/vllm/test_audit.py).
"""

import pytest

from swiftlite.bridge.layout import SwapHalves
from swiftlite.engines.conventions import CONVENTIONS, Convention
from swiftlite.families import index
from swiftlite.families.drafting import Drafting


@pytest.mark.parametrize("engine", CONVENTIONS)
def test_every_family_has_a_line(engine):
    assert CONVENTIONS[engine].keys() == index.FAMILIES.keys()


@pytest.mark.parametrize(("engine", "name"), [(engine, name) for engine in CONVENTIONS for name in CONVENTIONS[engine]])
def test_the_projection_is_the_one_of_the_files(engine, name):
    frame = index.FAMILIES[name].mtp.frame_rows({"hidden_size": 8, "num_hidden_layers": 2, "vocab_size": 4}, 0)
    (projection,) = [row for row in frame if row.mcore.endswith("eh_proj.weight")]
    swapped = isinstance(projection.layout, SwapHalves)  # megatron-core's order is [embedding, hidden]
    assert CONVENTIONS[engine][name].projection == ("hidden, embedding" if swapped else "embedding, hidden")


@pytest.mark.parametrize(
    ("heads", "depth", "drafting"),
    [("each", 3, 3), ("first", 3, 1), ("last", 3, 1), ("one", 1, 1), ("each", 0, 0), ("first", 0, 0)],
)
def test_heads_that_draft(heads, depth, drafting):
    assert Convention("AnyDraft", heads).num_heads(depth) == drafting


@pytest.mark.parametrize("name", CONVENTIONS["vllm"])
def test_training_feeds_heads_what_vllm_does(name):
    line = CONVENTIONS["vllm"][name]
    assert index.FAMILIES[name].mtp.drafting == Drafting(
        takes_before_norm=line.takes == "before norm",
        recycles_before_norm=line.recycles == "before norm",
        zeroes_first_embedding=line.zeroes_first_embedding,
    )
