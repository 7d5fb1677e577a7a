"""Test that every engine has a convention for every family, or reports that it has none.

Counts of running engines (tests/e2e/test_engines.py, test_sglang.py) and the classes that their configuration selects
(tests/engines/*/test_dry_load.py) test that the conventions are correct.
"""

from dataclasses import replace

import pytest

from swiftlite.base.errors import UserError
from swiftlite.engines.index import ENGINES
from swiftlite.families import FAMILIES
from swiftlite.families.serving.convention import Convention, Serving
from tests.messages import naming
from tests.tiny import CANNOT_DRAFT, ONLY_IN_TRANSFORMERS, ONLY_IN_VLLM


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_a_line(engine, family):
    if family in CANNOT_DRAFT.get(engine, ()):
        with pytest.raises(UserError, match=naming(f"{ENGINES[engine].label} {family}")):
            ENGINES[engine].convention_for(FAMILIES[family])
        return
    assert ENGINES[engine].convention_for(FAMILIES[family]).draft


def test_vllm_and_sglang_draft_with_every_family():
    """A family without a convention would otherwise only be missing."""
    assert set(CANNOT_DRAFT["vllm"]) == {*ONLY_IN_TRANSFORMERS}
    assert set(CANNOT_DRAFT["sglang"]) == {*ONLY_IN_TRANSFORMERS, *ONLY_IN_VLLM}


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_family_that_nobody_has_measured(engine):
    info = ENGINES[engine]
    new = replace(FAMILIES["qwen3"], name="new", serving=Serving())
    with pytest.raises(UserError, match=naming(f"{info.label} {new.name}")) as error:
        info.convention_for(new)
    assert "Family.serving" in error.value.hint


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in CANNOT_DRAFT["vllm"]])
def test_training_and_transformers_feed_heads_what_vllm_does(name):
    family = FAMILIES[name]
    assert ENGINES["vllm"].convention_for(family).drafting is family.mtp.drafting
    assert ENGINES["transformers"].convention_for(family).drafting is family.mtp.drafting


@pytest.mark.parametrize(
    ("heads", "depth", "drafting"),
    [("each", 3, 3), ("first", 3, 1), ("last", 3, 1), ("one", 1, 1), ("each", 0, 0), ("first", 0, 0)],
)
def test_heads_that_draft(heads, depth, drafting):
    assert Convention("AnyDraft", heads).num_drafting(depth) == drafting
