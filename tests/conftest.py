"""Fixtures shared by all tests."""

import json
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import hypothesis
import pytest
from filelock import FileLock

hypothesis.settings.register_profile("any machine", deadline=None)  # a busy machine is not a failure
hypothesis.settings.load_profile("any machine")

Shared = Callable[[str, Callable[[Path], object]], Path]
Trained = Callable[..., tuple[Path, list[list[int]]]]


@pytest.fixture(autouse=True)
def propagating_logger():
    """A command that an earlier test ran in this process has turned propagation off (`log.setup`). pytest would then
    capture a record twice if the test turns it on: at the logger and at the root."""
    logging.getLogger("swiftlite").propagate = True


@pytest.fixture(scope="session")
def mesh():
    """One process with megatron-core's groups, for the whole test session."""
    from swiftlite.runtime.distributed import session

    with session() as mesh:
        yield mesh


@pytest.fixture(scope="session")
def device(mesh):
    """What that process computes on."""
    return mesh.device


@pytest.fixture(scope="session")
def shared(tmp_path_factory) -> Shared:
    """shared(name, make): a directory that make(directory) fills, once for all processes of a test session.

    It is to be read only: a test that changes something copies it first.
    """
    root = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:  # each worker has a directory of its own in that of the session
        root = root.parent
    root /= "shared"
    root.mkdir(exist_ok=True)

    def get(name: str, make: Callable[[Path], object]) -> Path:
        directory = root / name
        unfinished = root / f".{name}"
        with FileLock(root / f"{name}.lock"):
            if not directory.exists():
                shutil.rmtree(unfinished, ignore_errors=True)  # of a process that failed
                unfinished.mkdir()
                make(unfinished)
                unfinished.rename(directory)
        return directory

    return get


@pytest.fixture(scope="session")
def trained(shared) -> Trained:
    """trained(family, depth, engine="transformers"): a tiny checkpoint whose heads have learned to be run as the engine
    does, and prompts on which they are often right, not always (`write_trained`). It is to be read only.
    """
    from tests.engines.reference import convention, follow, write_trained
    from tests.tiny import HYBRID, LATENT, VLLM_LATENT_SIZES, VLLM_LINEAR_SIZES

    def get(family: str, depth: int, engine: str = "transformers") -> tuple[Path, list[list[int]]]:
        drafting = convention(engine, family).drafting
        is_tied = (engine, family) == ("vllm", "llama")
        unroll = 3 if depth == 1 else 1
        own = VLLM_LATENT_SIZES if family in LATENT else VLLM_LINEAR_SIZES if family in HYBRID else {}
        sizes = {} if engine == "transformers" else own

        def make(directory: Path) -> None:
            def draft_as(reference):
                return follow(reference, drafting)

            prompts = write_trained(directory, family, depth, is_tied, unroll, draft_as, **sizes)
            (directory / "prompts.json").write_text(json.dumps(prompts))

        # Engines that run the heads alike share what was trained.
        fed = "".join("1" if value else "0" for value in vars(drafting).values())
        directory = shared(f"{family}-{depth}-fed{fed}-{'tied' if is_tied else 'untied'}-{len(sizes)}", make)
        return directory, json.loads((directory / "prompts.json").read_text())

    return get


@pytest.fixture
def synced(monkeypatch) -> list[Path]:
    """What is flushed to disk during the test, by the path that it has then; in order."""
    paths: list[Path] = []
    fsync = os.fsync

    def record(descriptor: int) -> None:
        paths.append(Path(f"/proc/self/fd/{descriptor}").readlink())
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    return paths


@pytest.fixture(scope="session")
def browser(tmp_path_factory):
    """A real one; tests that use it are skipped where there is none."""
    from tests.browser import Browser

    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()
