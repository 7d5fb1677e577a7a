"""Test the file of answers while it is written: its content at any time, and which command may continue it."""

import json
import os
import resource
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from swiftlite.args.commands import InferArgs
from swiftlite.base.errors import UserError
from swiftlite.data.rows.conversation import Conversation
from swiftlite.engines.engine import Sampling
from swiftlite.engines.served_model import resolve_served
from swiftlite.serve.answers import AnswersFile, as_line, describe
from tests.messages import mentions, naming
from tests.tiny import make_tiny_hf

SOURCES = ["a.jsonl:1", "a.jsonl:2", "a.jsonl:3"]
MADE_WITH = {"options": {"temperature": 0.0}, "prompts": "1", "model": "2", "stop_token_ids": [3]}


def record(place: int) -> dict:
    return {"messages": [], "source": SOURCES[place], "response": f"answer {place}"}


@pytest.fixture
def open_file() -> Iterator[Callable[..., AnswersFile]]:
    """Return open_file(path, ...), which returns an AnswersFile and closes the previous one."""
    opened: list[AnswersFile] = []

    def get(path: Path, sources: list[str] = SOURCES, made_with: dict = MADE_WITH) -> AnswersFile:
        while opened:
            opened.pop().close()
        opened.append(AnswersFile(path, sources, made_with))
        return opened[-1]

    yield get
    while opened:
        opened.pop().close()


def answers_in(path: Path) -> list[str]:
    return [json.loads(line)["response"] for line in path.read_text().splitlines()]


def test_every_line_is_there_at_once_and_the_end_is_in_order(tmp_path, open_file):
    path = tmp_path / "answers.jsonl"
    file = open_file(path)
    assert file.missing == [0, 1, 2]
    for number, place in enumerate((2, 0, 1), start=1):
        file.add(place, record(place))
        assert len(answers_in(path)) == number  # another reader's view
    assert answers_in(path) == ["answer 2", "answer 0", "answer 1"]
    file.finish()
    assert answers_in(path) == ["answer 0", "answer 1", "answer 2"]
    assert mentions(str(file), f"3 {path}")


def test_a_link_stays_one(tmp_path, open_file):
    (tmp_path / "link.jsonl").symlink_to("answers.jsonl")
    file = open_file(tmp_path / "link.jsonl")
    file.add(1, record(1))
    file.add(0, record(0))
    file.finish()
    assert (tmp_path / "link.jsonl").is_symlink()
    assert answers_in(tmp_path / "answers.jsonl") == ["answer 0", "answer 1"]


@pytest.mark.parametrize("tail", [b"", b'{"source": "a.js', b"\0" * 4096])
def test_half_a_line_is_cut_off_and_the_rest_goes_on(tmp_path, tail, open_file):
    path = tmp_path / "answers.jsonl"
    whole = as_line(record(1))
    open_file(path)
    path.write_bytes(whole + tail)
    file = open_file(path)
    assert file.missing == [0, 2]
    assert path.read_bytes() == whole
    file.add(0, record(0))
    assert answers_in(path) == ["answer 1", "answer 0"]


def test_a_prompt_that_is_there_twice_has_two_answers(tmp_path, open_file):
    path = tmp_path / "answers.jsonl"
    twice = [SOURCES[0], SOURCES[1], SOURCES[0]]
    open_file(path, twice).add(0, record(0))
    file = open_file(path, twice)
    assert file.missing == [1, 2]
    file.add(2, record(0))
    assert open_file(path, twice).missing == [1]
    file.add(2, record(0))
    with pytest.raises(UserError, match=naming("answers.jsonl:3 --result_path")):
        open_file(path, twice)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"options": {"temperature": 0.5}}, "--temperature 0.0 0.5"),
        ({"options": {"temperature": 0.0, "system": "Be kind."}}, "--system Be kind."),
        ({"prompts": "9"}, "--result_path"),
        ({"model": "9"}, "--model"),
        ({"stop_token_ids": []}, "--model"),
    ],
)
def test_answers_that_were_made_otherwise_are_left_alone(tmp_path, change, told, open_file):
    path = tmp_path / "answers.jsonl"
    open_file(path).add(0, record(0))
    before = path.read_bytes()
    with pytest.raises(UserError) as error:
        open_file(path, SOURCES, MADE_WITH | change)
    assert mentions(error.value.problem, told)
    assert mentions(error.value.hint, "--result_path")
    assert path.read_bytes() == before


@pytest.mark.parametrize("args", [None, "", "[]", "{", '{"options": 1}', "[" * 100_000])
def test_a_file_of_unknown_origin_is_left_alone(tmp_path, args, open_file):
    path = tmp_path / "answers.jsonl"
    path.write_text("mine\n")
    if args is not None:
        (tmp_path / "answers.jsonl.args.json").write_text(args)
    with pytest.raises(UserError, match=naming("--result_path answers.jsonl.args.json")):
        open_file(path)
    assert path.read_text() == "mine\n"


@pytest.mark.parametrize("line", ["mine", "[]", '{"source": []}', '{"source": "b.jsonl:1"}', "[" * 100_000])
def test_a_line_that_is_no_answer_is_named(tmp_path, line, open_file):
    path = tmp_path / "answers.jsonl"
    open_file(path).add(0, record(0))
    with path.open("a") as file:
        file.write(line + "\n")
    with pytest.raises(UserError, match=naming("answers.jsonl:2 --result_path")):
        open_file(path)


def test_one_process_writes_at_a_time(tmp_path):
    path = tmp_path / "answers.jsonl"
    with AnswersFile(path, SOURCES, MADE_WITH), pytest.raises(UserError, match=naming(f"--result_path {path}")):
        AnswersFile(path, SOURCES, MADE_WITH)
    AnswersFile(path, SOURCES, MADE_WITH).close()


def test_no_room_leaves_whole_lines(tmp_path, open_file):
    """As on a full disk, the kernel writes a part of the line and rejects the rest."""
    path = tmp_path / "answers.jsonl"
    file = open_file(path)
    file.add(0, record(0))
    before = path.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 20, limits[1]))
    try:
        with pytest.raises(UserError, match=naming(f"--result_path {path}")):
            file.add(1, record(1))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert path.read_bytes() == before
    file.add(1, record(1))
    assert answers_in(path) == ["answer 0", "answer 1"]


@pytest.mark.parametrize("name", ["/proc/answers.jsonl", "/dev/null", "/sys/answers.jsonl"])
def test_a_path_that_cannot_be_written_is_named(name, open_file):
    with pytest.raises(UserError, match=naming(f"--result_path {name}")):
        open_file(Path(name))


def test_a_pipe_is_no_file(tmp_path, open_file):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match=naming(f"--result_path {tmp_path / 'pipe'}")):
        open_file(tmp_path / "pipe")


def test_a_lone_surrogate_is_escaped():
    line = as_line({"channel": "a\ud800b", "response": "ß"})
    assert json.loads(line) == {"channel": "a\ud800b", "response": "ß"}
    assert "ß".encode() in as_line({"response": "ß"})


def test_what_answers_are_made_with(tmp_path):
    directory = make_tiny_hf(tmp_path / "model", "qwen3", depth=1)
    chat = Conversation([{"role": "user", "content": "hello"}], source="a.jsonl:1")

    def made_with(**options) -> dict:
        args = InferArgs(model=str(directory), **options)
        return describe(args, resolve_served(directory), [chat], [[1, 2]], Sampling(8, stop_token_ids=(3,)))

    first = made_with(vllm_engine_kwargs={"hf_token": "SECRET"})
    assert "SECRET" not in json.dumps(first)
    same = made_with(vllm_engine_kwargs={"hf_token": "OTHER"}, compare=True, result_path="x", max_batch_size=4)
    assert same == first
    weights = directory / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert made_with()["model"] != first["model"]
