"""Test that only `doctor --engine` reports that conventions were measured with another version of the engine."""

import pytest
from torch import nn

from swiftlite.engines.index import ENGINES
from swiftlite.engines.loading.load_report import Loading
from swiftlite.engines.served_model import resolve_served
from tests.messages import mentions
from tests.tiny import make_tiny_hf


@pytest.mark.parametrize(("version", "is_noted"), [("0.32.0", False), ("0.32.1", False), ("0.33.0", True)])
def test_another_version_than_the_one_measured_is_noted(tmp_path, version, is_noted):
    info = ENGINES["vllm"]
    loading = Loading(info, resolve_served(make_tiny_hf(tmp_path, "qwen3", depth=1)))
    assert loading.report(version, 1).notes == []  # nothing drafts
    draft_class = type(info.convention_for(loading.model.family).draft, (nn.Module,), {})
    loading.draft = draft_class()
    notes = loading.report(version, 1).notes
    assert [mentions(note, version) for note in notes] == [True] * is_noted


def test_whoever_drafts_in_its_own_way_was_measured_in_a_version():
    assert {name for name, info in ENGINES.items() if not info.measured} == {"transformers"}
