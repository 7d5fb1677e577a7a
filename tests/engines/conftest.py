from collections.abc import Callable
from pathlib import Path

import pytest

from tests.engines.reference import convention, follow, write_trained

Trained = tuple[Path, list[list[int]]]


@pytest.fixture(scope="session")
def trained(tmp_path_factory) -> Callable[..., Trained]:
    """trained(family, depth) -> (checkpoint whose heads are often right, prompts); made once per session."""
    made: dict[tuple[str, int], Trained] = {}

    def make(family: str, depth: int) -> Trained:
        if (family, depth) not in made:
            directory = tmp_path_factory.mktemp(f"{family}-{depth}")
            drafting = convention("transformers", family).drafting
            prompts = write_trained(directory, family, depth, draft_as=lambda reference: follow(reference, drafting))
            made[family, depth] = directory, prompts
        return made[family, depth]

    return make
