"""Test the real package `datasets` with a hub on this machine."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import datasets
import pytest

from tests.data.images import encoded, noise
from tests.hub.asking import answers
from tests.hub.server import TOKEN, Hub, running_hub
from tests.messages import mentions

GOOD = ("org/rows", "org/rows:small", "org/rows:/test_sft", "org/rows#5", "org/rows:default/train@main#3")
BAD = ("org/nope", "org/rows@v9", "org/rows:large", "org/rows:/test", "org/script", "org/gated", "org/mixed")
IMAGE = encoded(noise(9, 7))
CARD = """---
configs:
- config_name: default
  data_files:
  - {split: train, path: data/train.jsonl}
  - {split: test_sft, path: data/test.jsonl}
- config_name: small
  data_files: [{split: train, path: small/*.jsonl}]
---
"""


def lines(*rows: dict) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


@contextmanager
def hub_with_rows() -> Iterator[Hub]:
    """Run a hub with two datasets: org/rows with two subsets, one of which has two splits, and org/script with a Python
    file.
    """
    with running_hub() as hub:
        hub.add(
            "org/rows",
            {
                "README.md": CARD.encode(),
                "data/train.jsonl": lines(*({"query": f"q{number}", "response": "a"} for number in range(20))),
                "data/test.jsonl": lines({"query": "q", "response": "a"}, {"query": "q", "response": None}),
                "small/0.jsonl": lines({"instruction": "small", "input": "", "output": "s"}),
            },
            kind="datasets",
        )
        mixed = {"a.jsonl": lines({"query": "q"}), "b.jsonl": lines({"text": "t"})}
        hub.add("org/mixed", mixed, kind="datasets")
        hub.add("org/script", {"script.py": b"raise SystemExit('it ran')"}, kind="datasets")
        yield hub


@pytest.fixture
def hub() -> Iterator[Hub]:
    with hub_with_rows() as hub:
        yield hub


@pytest.fixture(scope="module")
def answered(tmp_path_factory) -> dict[str, str]:
    """Return what is read from a hub, by name. One process reads everything, because it imports `datasets` first."""
    directory = tmp_path_factory.mktemp("hub")
    features = datasets.Features(
        {"query": datasets.Value("string"), "response": datasets.Value("string"), "images": [datasets.Image()]}
    )
    row = {"query": ["q"], "response": ["a"], "images": [[{"bytes": IMAGE, "path": None}]]}
    datasets.Dataset.from_dict(row, features=features).to_parquet(directory / "train.parquet")
    with hub_with_rows() as hub:
        hub.add("org/seen", {"train.parquet": (directory / "train.parquet").read_bytes()}, kind="datasets")
        hub.add("org/gated", {"README.md": b"", "a.jsonl": b"{}"}, kind="datasets").gated = True
        hub.add("org/private", {"rows.jsonl": lines({"query": "q", "response": "a"})}, kind="datasets").private = True
        calls = [*map(read, (*GOOD, *BAD, "org/private")), (f"{__name__}:images", "org/seen")]
        calls.append((f"{__name__}:shown_without_datasets", "org/rows"))
        found = answers(hub, directory / "home", *calls, HF_TOKEN=TOKEN)
        names = (*GOOD, *BAD, "org/private", "org/seen", "without datasets", "url")
        return dict(zip(names, (*found, hub.url), strict=True))


def read(spec: str) -> tuple[str, str]:
    return (f"{__name__}:shown", spec)


def shown(spec: str) -> str:
    """Return the result of `read_rows` for a name, as JSON."""
    from swiftlite.data.rows.sources import find_rows, read_rows

    rows = read_rows(find_rows(spec))
    found = [[chat.source, chat.messages[0]["content"]] for chat in rows.conversations]
    return json.dumps({"rows": rows.num_rows, "found": found, "bad": [bad.source for bad in rows.bad_rows]})


def test_subsets_splits_and_samples(answered):
    found = [answered[spec] for spec in GOOD]
    assert [answer for answer in found if answer.startswith("UserError")] == []
    train, small, test, sample, spelt_out = map(json.loads, found)
    assert train["rows"] == 20
    assert train["found"][:2] == [["org/rows:1", "q0"], ["org/rows:2", "q1"]]
    assert small["found"] == [["org/rows:small:1", "small"]]
    assert test == {"rows": 2, "found": [["org/rows:/test_sft:1", "q"]], "bad": ["org/rows:/test_sft:2"]}
    assert len(sample["found"]) == 5
    assert all(row in train["found"] for row in sample["found"])
    assert [source.rpartition(":")[0] for source, _ in spelt_out["found"]] == ["org/rows:default@main"] * 3


def images(spec: str) -> str:
    """Return the sources of the images in the rows, as JSON."""
    from functools import partial

    from swiftlite.data.rows.conversation import parse_row
    from swiftlite.data.rows.sources import find_rows, read_rows

    rows = read_rows(find_rows(spec), parse=partial(parse_row, no_images=None))
    sources = [image.source for chat in rows.conversations for image in chat.images]
    return json.dumps([source.hex() if isinstance(source, bytes) else source for source in sources])


def test_images_are_not_decoded_by_datasets(answered):
    assert json.loads(answered["org/seen"]) == [IMAGE.hex()]


@pytest.mark.slow
def test_what_is_here_is_read_without_network_and_at_its_commit(hub, tmp_path):
    """`datasets` alone would use the version that it loaded last."""
    home = tmp_path / "home"
    (first,) = answers(hub, home, read("org/rows"))
    repository = hub.repositories["datasets/org/rows"]
    commit = repository.resolve("main")
    newer = lines({"query": "new", "response": "a"})
    repository.commit(repository.commits[commit] | {"data/train.jsonl": newer})
    pinned = json.dumps({"datasets/org/rows@main": commit})
    hub.asked.clear()
    offline, of_a_rank = answers(hub, home, read("org/rows"), read(f"org/rows@{commit}"), HF_HUB_OFFLINE="1")
    assert offline == first
    assert json.loads(of_a_rank)["rows"] == 20
    (resumed,) = answers(hub, home, read("org/rows"), SWIFTLITE_COMMITS=pinned)
    assert resumed == first
    assert hub.asked == []
    (now,) = answers(hub, home, read("org/rows"))
    assert json.loads(now)["found"] == [["org/rows:1", "new"]]
    (old,) = answers(hub, home, read(f"org/rows@{commit}"), HF_HUB_OFFLINE="1")
    assert json.loads(old)["rows"] == 20


def test_what_cannot_be_had_says_what_to_type(answered):
    missing, revision, subset, split, script, gated, mixed = (answered[spec] for spec in BAD)
    url = answered["url"]
    assert mentions(missing, f"{url} org/nope")
    assert mentions(revision, "org/rows v9")
    assert mentions(subset, "org/rows:large 'default' 'small'")
    assert mentions(split, "org/rows:/test 'train' 'test_sft' ORG/NAME:/SPLIT")
    assert mentions(script, "org/script")
    assert "it ran" not in script
    assert mentions(gated, f"org/gated {url}/datasets/org/gated")
    assert mentions(mixed, "org/mixed")


def test_a_private_dataset_and_a_missing_package(answered):
    assert json.loads(answered["org/private"])["rows"] == 1
    problem, hint = answered["without datasets"].splitlines()
    assert mentions(problem, "UserError: org/rows datasets")
    assert mentions(hint, "pip install datasets")


def shown_without_datasets(spec: str) -> str:
    import sys

    sys.modules["datasets"] = None  # pyright: ignore[reportArgumentType]
    return shown(spec)


@pytest.mark.slow
def test_a_damaged_note_is_written_again(hub, tmp_path):
    home = tmp_path / "home"
    (first,) = answers(hub, home, read("org/rows"))
    (note,) = (home / "datasets").glob("swiftlite-*.json")
    note.write_text("{")
    (again,) = answers(hub, home, read("org/rows"))
    assert again == first
    assert [Path(file).suffix for file in json.loads(note.read_text())] == [".arrow"]
