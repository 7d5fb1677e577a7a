"""Measure how many small changes (mutants) of the code the tests detect, with a sample of all mutants.

    python scripts/mutants.py swiftlite/bridge --tests tests/bridge --then tests/parallel/test_bridge.py
    python scripts/mutants.py swiftlite/data/rows/sources.py:250 --tests tests/data      # all mutants of one line

A mutant is a copy of the checkout with one change: a comparison or an operator is replaced, a number is incremented or
decremented, a condition is negated, a keyword argument or a statement is removed, a result is None, a loop is empty, an
exception is not caught. Strings, annotations, decorators, assertions (including `strict=True` of zip) and the texts of
errors and logs are not changed.

For each mutant the tests of its own file run first (tests/x/test_y.py for swiftlite/x/y.py), then --tests, then --then,
up to the first failure. The tests run in a fork of a process that has imported torch and megatron-core, but nothing of
swiftlite. A test that takes longer than five minutes counts as a failure.
"""

import argparse
import ast
import gc
import importlib
import importlib.util
import itertools
import math
import multiprocessing
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import hypothesis
import pytest

ROOT = Path(__file__).resolve().parents[1]
SECONDS_PER_TEST = 300
BYTES_PER_PROCESS = 8 << 30
PRELOADED = [
    "megatron.core.dist_checkpointing.serialization",
    "megatron.core.models.gpt",
    "megatron.core.optimizer",
    "torch.distributed.checkpoint",
    "transformers.models.auto.tokenization_auto",
]
# Not `/`: it joins paths, where any other operator is a TypeError.
PAIRS = [(ast.Eq, ast.NotEq), (ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Lt, ast.GtE), (ast.Gt, ast.LtE)]
PAIRS += [(ast.Is, ast.IsNot), (ast.In, ast.NotIn), (ast.And, ast.Or), (ast.Add, ast.Sub), (ast.Mult, ast.FloorDiv)]
OTHERS: dict[type[ast.AST], list[type[ast.AST]]] = {ast.Mod: [ast.FloorDiv]}
for one, other in PAIRS:
    OTHERS.setdefault(one, []).append(other)
    OTHERS.setdefault(other, []).append(one)


@dataclass(frozen=True)
class Mutant:
    """One change to one file. `source` is the whole new content of the file."""

    path: str
    line: int
    column: int
    before: str
    after: str
    source: bytes

    def __str__(self) -> str:
        return f"{self.path}:{self.line}:{self.column}: {self.before} -> {self.after or 'nothing'}"


def mutants_of(path: str) -> list[Mutant]:
    """Return every mutant of a file.

    Args:
        path: path of the file, relative to the checkout.
    """
    source = (ROOT / path).read_bytes()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    mutants = []
    for node in _nodes(ast.parse(source)):
        for old, new in _changes(node):
            start = starts[old.lineno - 1] + old.col_offset
            end = starts[(old.end_lineno or 0) - 1] + (old.end_col_offset or 0)
            changed = source[:start] + new.encode() + source[end:]
            mutants.append(Mutant(path, old.lineno, old.col_offset + 1, ast.unparse(old), new, changed))
    return mutants


def _nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a node and all nodes below it that can be mutated."""
    # Python 3.11 has no positions for expressions in an f-string.
    if isinstance(node, ast.Assert | ast.JoinedStr) or _is_message(node):
        return
    yield node
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list") or (name == "keywords" and _is_zip(node)):
            continue
        children = value
        if not isinstance(value, list):
            children = [value]
        for child in children:
            if isinstance(child, ast.AST):
                yield from _nodes(child)


def _is_message(node: ast.AST) -> bool:
    """Return whether a node creates an error or logs a line."""
    if not isinstance(node, ast.Call):
        return False
    name = ast.unparse(node.func)
    return name.endswith("Error") or name.startswith("logger.")


def _is_zip(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func) == "zip"


def _changes(node: ast.AST) -> Iterator[tuple[ast.expr | ast.stmt, str]]:
    """Yield the changes of a node: the expression or statement to replace, and the replacement."""
    match node:
        case ast.Compare():
            for position, operator in enumerate(node.ops):
                for other in OTHERS[type(operator)]:
                    ops = [*node.ops[:position], other(), *node.ops[position + 1 :]]
                    yield node, _expression(ast.Compare(node.left, ops, node.comparators))
        case ast.BoolOp() | ast.BinOp():
            for other in OTHERS.get(type(node.op), []):
                yield node, _expression(_with(node, op=other()))
        case ast.UnaryOp(op=ast.Not()):
            yield node, _expression(node.operand)
        case ast.Constant(value=bool(truth)):
            yield node, str(not truth)
        case ast.Constant(value=int(number) | float(number)):
            yield node, str(number + 1)
            yield node, f"({number - 1})"
        case ast.Call():
            for keyword in node.keywords:
                if keyword.arg and not _is_zip(node):
                    others = [other for other in node.keywords if other is not keyword]
                    yield node, ast.unparse(_with(node, keywords=others))
        case ast.For():
            yield node.iter, "()"
        case ast.ExceptHandler(type=ast.expr() as caught):
            yield caught, "()"
        case ast.Return(value=ast.expr() as result) if ast.unparse(result) != "None":
            yield result, "None"
        case ast.Break():
            yield node, "continue"
        case ast.Continue():
            yield node, "break"
        case ast.Expr(value=ast.Call() | ast.Yield() | ast.YieldFrom()) if not _is_message(node.value):
            yield node, "pass"
        case ast.AugAssign() | ast.Raise() | ast.Delete():
            yield node, "pass"
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield node, "pass"
    for condition in _conditions(node):
        yield condition, f"(not ({ast.unparse(condition)}))"


def _conditions(node: ast.AST) -> list[ast.expr]:
    """Return the conditions of a node that can be negated.

    The negation of comparisons and negations is already another mutant.
    """
    conditions = []
    if isinstance(node, ast.If | ast.While | ast.IfExp):
        conditions = [node.test]
    elif isinstance(node, ast.comprehension):
        conditions = node.ifs
    return [condition for condition in conditions if not isinstance(condition, ast.Compare | ast.UnaryOp)]


def _with(node: ast.AST, **fields: object) -> ast.AST:
    return type(node)(**{**dict(ast.iter_fields(node)), **fields})


def _expression(node: ast.AST) -> str:
    return f"({ast.unparse(node)})"


class _Limit:
    """Pytest plugin that ends the process if a test takes too long."""

    def pytest_runtest_logstart(self) -> None:
        signal.alarm(SECONDS_PER_TEST)


def _become_pytest(files: Sequence[str], log: Path) -> None:
    os.setsid()
    for descriptor in (1, 2):
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    resource.setrlimit(resource.RLIMIT_DATA, (BYTES_PER_PROCESS, BYTES_PER_PROCESS))
    signal.alarm(SECONDS_PER_TEST)
    # The same examples each time, without shrinking a failure.
    phases = [hypothesis.Phase.explicit, hypothesis.Phase.generate]
    hypothesis.settings.register_profile("mutants", deadline=None, derandomize=True, database=None, phases=phases)
    words = f"-x -q -p no:cacheprovider --hypothesis-profile=mutants --basetemp={log.parent}/tmp".split()
    code = pytest.main([*words, "-m", "not engine and not gpu", *files], plugins=[_Limit()])
    sys.stdout.flush()
    os._exit(code)  # unloading torch and megatron-core would take a second


def first_failure(files: Sequence[str], directory: Path) -> str:
    """Run tests of the working directory in a separate process, and return pytest's line about the first failure."""
    log = directory / "log"
    log.unlink(missing_ok=True)
    process = multiprocessing.get_context("fork").Process(target=_become_pytest, args=(files, log))
    process.start()
    process.join()
    with suppress(ProcessLookupError):
        os.killpg(process.pid or 0, signal.SIGKILL)  # its child processes
    if process.exitcode == 0:
        return ""
    failures = [line for line in log.read_text().splitlines() if line.startswith(("FAILED", "ERROR"))]
    if not failures:
        return f"the process ended with exit code {process.exitcode}"
    return failures[-1]


def who_notices(mutant: Mutant, rooms: Sequence[Sequence[str]], directory: Path) -> str:
    """Run the tests on a mutant, and return the result of `first_failure`; empty if all tests pass.

    The working directory is a copy of the checkout.
    """
    path = Path(mutant.path)
    original = path.read_bytes()
    own = [name for name in itertools.chain(*rooms) if name.startswith(_own_tests(path))]
    try:
        _write(path, mutant.source)
        for room in (own, *rooms):
            files = [name for name in room if room is own or name not in own]
            if files and (failure := first_failure(files, directory)):
                return failure
        return ""
    finally:
        _write(path, original)


def _own_tests(path: Path) -> str:
    """Return the prefix of the paths of the test files that belong to a file."""
    return str(Path("tests", *path.parts[1:-1], f"test_{path.stem}"))


def _write(path: Path, source: bytes) -> None:
    path.write_bytes(source)
    # Python would use the old bytecode if size and time in seconds are the same.
    Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)


def _files(names: Sequence[str], pattern: str) -> list[str]:
    """Return the named files, and the files in the named folders."""
    files = []
    for name in names:
        if Path(name).is_dir():
            files += [str(path) for path in sorted(Path(name).rglob(pattern))]
        else:
            files.append(name)
    return files


def sample_of(places: Sequence[str], number: int, seed: int) -> list[Mutant]:
    """Return a sample of the mutants of files, folders and single lines (FILE:LINE), in the order of the files."""
    mutants: list[Mutant] = []
    for place in places:
        name, _, line = place.partition(":")
        for path in _files([name], "*.py"):
            mutants += [mutant for mutant in mutants_of(path) if not line or mutant.line == int(line)]
    print(f"{min(number, len(mutants))} of {len(mutants)} mutants", flush=True)
    chosen = random.Random(seed).sample(range(len(mutants)), min(number, len(mutants)))
    return [mutants[position] for position in sorted(chosen)]


def interval(part: int, whole: int) -> tuple[float, float]:
    """Return the 95 % confidence interval of a share (Wilson)."""
    z = 1.96
    middle = (part + z * z / 2) / (whole + z * z)
    half = z * math.sqrt(part * (whole - part) / whole + z * z / 4) / (whole + z * z)
    return middle - half, middle + half


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("places", nargs="+", metavar="PLACE", help="a file, a folder, or FILE:LINE")
    parser.add_argument("--tests", nargs="+", required=True, help="files or folders, the fast ones first")
    parser.add_argument("--then", nargs="+", default=[], help="tests for the mutants that --tests does not detect")
    parser.add_argument("--sample", type=int, default=150, help="maximum number of mutants (default: 150)")
    parser.add_argument("--seed", type=int, default=1, help="seed of the sample (default: 1)")
    return parser.parse_args()


def main() -> int:
    args = parse()
    os.chdir(ROOT)
    mutants = sample_of(args.places, args.sample, args.seed)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name).resolve()
        shutil.copytree(ROOT, directory / "copy", ignore=shutil.ignore_patterns(".*", "__pycache__"))
        os.chdir(directory / "copy")
        os.environ["PYTHONPATH"] = sys.path[0] = str(directory / "copy")
        for module in PRELOADED:
            importlib.import_module(module)
        gc.freeze()  # otherwise each fork would scan all preloaded objects
        rooms = [_files(room, "test_*.py") for room in (args.tests, args.then) if room]
        for room in rooms:
            if failure := first_failure(room, directory):
                raise SystemExit(f"the tests fail on the unchanged code: {failure}")
        began = time.monotonic()
        survivors = 0
        for mutant in mutants:
            failure = who_notices(mutant, rooms, directory)
            survivors += not failure
            print(f"{time.monotonic() - began:6.0f} s  {mutant}\n          {failure or 'NOT DETECTED'}", flush=True)
    killed = len(mutants) - survivors
    low, high = interval(killed, len(mutants))
    print(f"{killed} of {len(mutants)} detected: {killed / len(mutants):.0%} (95 % interval {low:.0%} to {high:.0%})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
