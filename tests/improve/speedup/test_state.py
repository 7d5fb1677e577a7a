"""Test speedup.json."""

import pytest

from swiftlite.base.errors import UserError
from swiftlite.improve.speedup.state import Progress
from tests.messages import naming

SETTINGS = {"model": "org/name", "seed": 42}


def test_it_is_read_as_it_was_written(tmp_path):
    progress = Progress.read(tmp_path / "new", SETTINGS)
    assert (progress.rounds, progress.spent, progress.best) == ([], 0, "")
    progress.rounds += [128, 500]
    progress.seconds |= {"round-1/answers": 10.5, "round-1/training": 20.0}
    progress.acceptance |= {"model": [0.5, 0.1], "round-1": [0.4, 0.3], "round-2": [0.5, 0.2]}
    progress.write(tmp_path)
    again = Progress.read(tmp_path, SETTINGS)
    assert again == progress
    assert again.spent == 30.5
    assert again.best == "round-1"  # as many drafts as the second, and earlier


def test_a_file_of_a_killed_command_is_no_obstacle(tmp_path):
    (tmp_path / ".lock").touch()
    assert Progress.read(tmp_path, SETTINGS).rounds == []


def test_other_settings_are_named(tmp_path):
    Progress(SETTINGS).write(tmp_path)
    with pytest.raises(UserError, match=naming("--seed 42 1")):
        Progress.read(tmp_path, SETTINGS | {"seed": 1})


def test_a_setting_that_is_newer_than_the_file_had_its_default(tmp_path):
    Progress(SETTINGS).write(tmp_path)
    assert Progress.read(tmp_path, SETTINGS | {"drafter": "mtp"}, {"drafter": "mtp"}).settings == SETTINGS
    with pytest.raises(UserError, match=naming("--drafter mtp dspark")):
        Progress.read(tmp_path, SETTINGS | {"drafter": "dspark"}, {"drafter": "mtp"})


@pytest.mark.parametrize("content", ["", "{", "[]", '{"settings": {}, "rounds": "many"}', '{"rounds": []}'])
def test_a_damaged_file_is_named(tmp_path, content):
    (tmp_path / Progress.FILE).write_text(content)
    with pytest.raises(UserError, match=naming(str(tmp_path / Progress.FILE))):
        Progress.read(tmp_path, SETTINGS)


def test_a_directory_with_something_else_is_left_alone(tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(UserError, match=naming(f"{tmp_path} {Progress.FILE}")):
        Progress.read(tmp_path, SETTINGS)
