"""Test that the registry of kinds of runs is consistent, so that its readers can select from it."""

from dataclasses import replace

from tests.kinds import KINDS, LAYOUTS


def test_no_kind_is_repeated():
    described = [replace(kind, exported="", on_device=False) for kind in KINDS.values()]
    assert [name for name, kind in zip(KINDS, described, strict=True) if described.count(kind) > 1] == []


def test_every_kind_is_executed_in_known_layouts():
    for name, kind in KINDS.items():
        assert kind.on_device or kind.exported, name
        assert {kind.layout, kind.resumed, kind.exported} <= {"", *LAYOUTS}, name
        assert not kind.on_device or LAYOUTS[kind.layout].num_processes == 1, name
