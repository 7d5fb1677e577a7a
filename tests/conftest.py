"""Fixtures shared by all tests."""

import gc
import json
import logging
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import hypothesis
import pytest
from filelock import FileLock

hypothesis.settings.register_profile("any machine", deadline=None)  # a busy machine is not a failure
hypothesis.settings.load_profile("any machine")

STEERING = {"NPROC_PER_NODE", "NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK", "WORLD_SIZE"}
"""Variables that change how many processes a command starts."""

Shared = Callable[[str, Callable[[Path], object]], Path]
Trained = Callable[..., tuple[Path, list[list[int]]]]


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Collect tests without garbage collection, and do not visit modules and tests in later garbage collections.

    Importing all tests allocates millions of objects that stay. Visiting them takes a fifth of the time until the first
    test, and a second for each full garbage collection after it.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Give all tests of a file to the same worker, and also all files whose tests fork vLLM from `vllm_host`.

    Importing vLLM once takes as long as several of these tests.
    """
    from xdist.scheduler import LoadFileScheduling

    class ByFileAndHost(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return "vllm_host" if _forks_vllm(config.rootpath / file) else file

    return ByFileAndHost(config, log) if config.getoption("dist") == "loadfile" else None


@cache
def _forks_vllm(file: Path) -> bool:
    return bool(re.search(r"^def \w+\(.*\bvllm(_host)?[,)]", file.read_text(encoding="utf-8"), re.MULTILINE))


@pytest.fixture(autouse=True)
def propagating_logger():
    """Restore the logger's propagation, which a command in this process may have disabled (`log.setup`).

    If a test enabled it again, pytest would capture each record twice: at the logger and at the root.
    """
    logging.getLogger("swiftlite").propagate = True


@pytest.fixture(scope="session")
def mesh():
    """One process with megatron-core's groups, for the whole test session."""
    from swiftlite.runtime.distributed import session

    with session() as mesh:
        yield mesh


@pytest.fixture(scope="session")
def device(mesh):
    """Return the device of this process."""
    return mesh.device


@pytest.fixture(scope="session")
def fork_server() -> None:
    """Start the process that tests fork others from, for code that would otherwise start one with fewer imports."""
    from tests.forked import forkserver

    forkserver()


@pytest.fixture(scope="session")
def shared(tmp_path_factory) -> Shared:
    """Return shared(name, make), which returns a directory that make(directory) fills once for all processes of a
    session.

    The directory must not be changed; a test that changes something copies it first.
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
    """Return trained(family, depth, engine="transformers"), which returns a tiny checkpoint and prompts
    (`write_trained`).

    The heads have learned with the inputs that the engine passes to them. On the prompts they are often correct, but
    not always. The checkpoint must not be changed.
    """
    from tests.engines.reference import convention, follow, write_trained
    from tests.tiny import HYBRID, LATENT, LLAMACPP_SIZES, VLLM_LATENT_SIZES, VLLM_LINEAR_SIZES, VLLM_VALUE_SIZES

    def get(family: str, depth: int, engine: str = "transformers") -> tuple[Path, list[list[int]]]:
        drafting = convention(engine, family).drafting
        is_tied = (engine, family) == ("vllm", "llama")
        unroll = 3 if depth == 1 else 1
        own = VLLM_LATENT_SIZES if family in LATENT else VLLM_LINEAR_SIZES if family in HYBRID else {}
        if (engine, family) == ("vllm", "mimo_v2_flash"):
            own = VLLM_VALUE_SIZES
        sizes = own
        if engine == "transformers":
            sizes = {}
        elif engine == "llamacpp":  # any size; it norms latents with rms_norm_eps, transformers with 1e-6
            sizes = {"rms_norm_eps": 1e-6} if family in LATENT else LLAMACPP_SIZES.get(family, {})

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


@pytest.fixture(scope="session")
def talking(shared) -> tuple[Path, list[list[int]]]:
    """Return a tiny Qwen3 with a tokenizer, whose head is often correct on the rows that it has learned, and prompts.

    The checkpoint must not be changed.
    """
    from tests.engines.reference import write_trained
    from tests.tiny import make_tiny_tokenizer

    def make(directory: Path) -> None:
        tokenizer = make_tiny_tokenizer()
        prompts = write_trained(directory, "qwen3", depth=1, vocab_size=len(tokenizer))
        tokenizer.save_pretrained(directory)
        (directory / "prompts.json").write_text(json.dumps(prompts))

    directory = shared("talking", make)
    return directory, json.loads((directory / "prompts.json").read_text())


@pytest.fixture
def synced(monkeypatch) -> list[Path]:
    """Return the paths that are flushed to disk during the test, in order, with the names that they
    have at that time.
    """
    paths: list[Path] = []
    fsync = os.fsync

    def record(descriptor: int) -> None:
        paths.append(Path(f"/proc/self/fd/{descriptor}").readlink())
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    return paths


@pytest.fixture(scope="session")
def browser(tmp_path_factory):
    """Yield a real browser. Tests that use it are skipped if it is not installed."""
    from tests.browser import Browser

    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.fixture
def swiftlite(tmp_path):
    """Return a function such as swiftlite("megatron", "sft", ..., NPROC_PER_NODE="2"). It runs in tmp_path.

    Its result is a CompletedProcess with text output.
    """

    def run(*argv: str, **env: str) -> subprocess.CompletedProcess:
        inherited = {name: value for name, value in os.environ.items() if name not in STEERING}
        return subprocess.run(
            [sys.executable, "-m", "swiftlite", *argv],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env=inherited | {"COLUMNS": "100"} | env,
            timeout=300,
            check=False,
        )

    return run
