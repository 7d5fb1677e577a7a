"""Make a small instruction dataset from the documentation in Python's standard library.

Each row is a line of JSON with `messages` (question, answer) and `channel` (purpose, arguments or module). Source files
are parsed and never imported. The C modules in `C_MODULES` have no source, and are imported. The rows depend only on
the Python version.

    python scripts/make_docstring_dataset.py --output train.jsonl --val_output val.jsonl
"""

import argparse
import ast
import importlib
import inspect
import json
import random
import re
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

# Modules that are not libraries: jokes, test suites, vendored installers, GUI programs, build files.
SKIPPED = {"antigravity", "this", "test", "tests", "idlelib", "tkinter", "turtle", "turtledemo", "lib2to3", "ensurepip",
           "site-packages", "dist-packages", "pydoc_data", "__phello__", "__main__"}  # fmt: skip
C_MODULES = ("builtins", "cmath", "errno", "gc", "itertools", "marshal", "math", "operator", "select", "time", "zlib")
LONGEST_PURPOSE = 240  # characters; about 60 tokens, so that a 2-core machine answers a prompt in well under a second
PURPOSE_QUESTIONS = ("What does `{name}` do?", "Explain `{name}`.", "What is `{name}` for?")
ARGUMENTS_QUESTIONS = ("What are the arguments of `{name}`?", "How do I call `{name}`?")
MODULE_QUESTIONS = ("Where do I find `{short}`?", "Which module has `{short}`?")


@dataclass(frozen=True)
class Entry:
    """A documented function, class or method: dotted name, module, call signature without the name, and docstring."""

    name: str
    module: str
    signature: str
    docstring: str

    @property
    def short(self) -> str:
        return self.name.removeprefix(self.module + ".")


@cache
def stdlib_entries() -> tuple[Entry, ...]:
    """Return every public documented function, class and method of the standard library once, sorted by name."""
    entries: dict[str, Entry] = {}
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        if parts[-1] == "__init__":
            parts = parts[:-1]
        if parts and not any(part in SKIPPED or part.startswith("_") or "-" in part for part in parts):
            for entry in parsed_entries(path.read_text("utf-8", errors="replace"), ".".join(parts)):
                entries.setdefault(entry.name, entry)
    for module in C_MODULES:
        for entry in compiled_entries(module):
            entries.setdefault(entry.name, entry)
    return tuple(entries[name] for name in sorted(entries))


def parsed_entries(source: str, module: str) -> Iterator[Entry]:
    """Yield the entries of a source file, at top level and inside classes, without running it."""

    def walk(nodes: list[ast.stmt], prefix: str, in_class: bool) -> Iterator[Entry]:
        for node in nodes:
            if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) or node.name.startswith("_"):
                continue
            if any(ast.unparse(decorator).endswith("property") for decorator in node.decorator_list):
                continue  # an attribute, not a method
            name = f"{prefix}.{node.name}"
            docstring = ast.get_docstring(node)
            if docstring:
                yield Entry(name, module, parsed_signature(node, in_class), docstring)
            if isinstance(node, ast.ClassDef):
                yield from walk(node.body, name, in_class=True)

    yield from walk(ast.parse(source).body, module, in_class=False)


def parsed_signature(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef, in_class: bool) -> str:
    """Return a signature like `(text, width=70)`, without `self`, `cls` and annotations.

    For a class, it is that of `__init__`.
    """
    if isinstance(node, ast.ClassDef):
        found = [n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"]
        if not found:
            return "()"
        return parsed_signature(found[0], in_class=True)
    arguments = node.args
    for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg):
        if argument is not None:
            argument.annotation = None
    is_static = any(isinstance(d, ast.Name) and d.id == "staticmethod" for d in node.decorator_list)
    if in_class and not is_static:
        del (arguments.posonlyargs or arguments.args)[:1]
    return f"({ast.unparse(arguments)})"


def compiled_entries(module: str) -> Iterator[Entry]:
    """Yield the entries of a C module, from the docstrings and text signatures of its objects."""
    namespace = vars(importlib.import_module(module))
    named = [(f"{module}.{name}", value) for name, value in sorted(namespace.items())]
    for name, value in list(named):
        if inspect.isclass(value):
            named += [(f"{name}.{member}", found) for member, found in sorted(vars(value).items())]
    for name, value in named:
        docstring = None
        if inspect.isclass(value) or inspect.isroutine(value):
            docstring = inspect.getdoc(value)
        if docstring and not any(part.startswith("_") for part in name.split(".")):
            yield Entry(name, module, compiled_signature(value), docstring)


def compiled_signature(value: Callable) -> str:
    """Return a signature like `parsed_signature`, from an object's text signature; empty if the object has none."""
    try:
        signature = inspect.signature(value)
    except ValueError:
        return ""
    parameters = [p for p in signature.parameters.values() if p.name not in ("self", "type")]
    return str(signature.replace(parameters=parameters))


def purpose(docstring: str) -> str:
    """Return the first paragraph on one line, up to its last complete sentence within `LONGEST_PURPOSE` characters."""
    paragraphs = re.split(r"\n\s*\n", docstring.strip())
    # C docstrings and some others start with the signature, such as "range(stop) -> range object".
    text = next((" ".join(p.split()) for p in paragraphs if not re.match(r"[\w.]+\(.*", p.strip())), "")
    if len(text) > LONGEST_PURPOSE:
        end = text.rfind(". ", 0, LONGEST_PURPOSE)
        if end <= 0:
            return ""
        text = text[: end + 1]
    return text


def rows_of(entry: Entry, rng: random.Random) -> list[dict]:
    """Return rows with questions about an entry. The wordings are drawn with `rng`."""

    def row(channel: str, questions: tuple[str, ...], answer: str) -> dict:
        question = rng.choice(questions).format(name=entry.name, short=entry.short)
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        return {"messages": messages, "channel": channel}

    rows = []
    if text := purpose(entry.docstring):
        rows.append(row("purpose", PURPOSE_QUESTIONS, text))
    if entry.signature and len(entry.signature) <= LONGEST_PURPOSE:
        call = f"`{entry.short}{entry.signature}`"
        rows.append(row("arguments", ARGUMENTS_QUESTIONS, f"Call it as {call}."))
    rows.append(row("module", MODULE_QUESTIONS, f"`{entry.short}` is in the module `{entry.module}`."))
    return rows


def make_rows(max_rows: int, val_rows: int) -> tuple[list[dict], list[dict]]:
    """Return training rows and held-out rows in a fixed shuffled order.

    All rows about a function are in the same set.
    """
    rng = random.Random(0)
    entries = list(stdlib_entries())
    rng.shuffle(entries)
    held_out: list[dict] = []
    while len(held_out) < val_rows:
        held_out += rows_of(entries.pop(), rng)
    training = [row for entry in entries for row in rows_of(entry, rng)]
    for rows in (training, held_out):
        rng.shuffle(rows)
    return training[:max_rows], held_out[:val_rows]


def write(path: Path, rows: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    print(f"{path}: {len(rows)} rows")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="JSON-lines file for the training rows")
    parser.add_argument("--val_output", type=Path, help="JSON-lines file for the held-out rows, about other functions")
    parser.add_argument("--max_rows", type=int, default=6000, help="maximum number of training rows (default: 6000)")
    parser.add_argument("--val_rows", type=int, default=64, help="number of rows in --val_output (default: 64)")
    args = parser.parse_args()
    val_rows = 0
    if args.val_output:
        val_rows = args.val_rows
    training, held_out = make_rows(args.max_rows, val_rows)
    write(args.output, training)
    if args.val_output:
        write(args.val_output, held_out)


if __name__ == "__main__":
    main()
