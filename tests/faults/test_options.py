"""Test YAML, JSON and args.json with any content: the result is options, or one error that names the file."""

import dataclasses
import json
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import example, given

from swiftlite import rules
from swiftlite.args.commands import DoctorArgs, ExportArgs, InferArgs, SftArgs
from swiftlite.args.config import from_config, read_file, write_config
from swiftlite.args.docs import options
from tests.faults.fuzzing import answer, damaged, fuzz, junk, texts

COMMANDS = (SftArgs, ExportArgs, InferArgs, DoctorArgs)
NAMES = sorted({name for command in COMMANDS for name in options(command)})

SCALARS = "1 1e-5 true null x '\"' 'a' 0x1F 1_0 .inf 2024-01-01 ! & * | > - ? : , [ ] { } # % @ ` !!int !!float !!bool"
SCALARS += " !!binary !!set !!python/object:os.system !!timestamp &a *a <<"
yaml_lines = st.lists(
    st.one_of(
        st.tuples(
            st.sampled_from([*NAMES, "&a lr", "*a", "? [x]", "<<"]),
            st.lists(st.sampled_from(SCALARS.split()), max_size=4),
        ).map(lambda line: f"{line[0]}: {' '.join(line[1])}"),
        st.tuples(st.sampled_from(NAMES), junk).map(lambda line: f"{line[0]}: {json.dumps(line[1])}"),
        st.text(max_size=8),
    ),
    max_size=4,
)


@fuzz
@given(lines=yaml_lines)
@example(lines=["lr: \0"])
@example(lines=["? [lr]", ": 1"])
@example(lines=["lr: " + "[" * 5000])
@example(lines=["lr: " + "9" * 5000])
@example(lines=["seed: 0x" + "f" * 5000])
@example(lines=["seed: !!float ''"])
@example(lines=["vllm_engine_kwargs: {a: 2024-01-01}"])
@example(
    lines=[
        "a: &a [x, x]",
        *(f"{new}: &{new} [{', '.join([f'*{old}'] * 9)}]" for old, new in zip("abcdefghi", "bcdefghij", strict=True)),
    ]
)
def test_any_yaml(tmp_path, monkeypatch, lines):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "run.yaml"
    path.write_text("\n".join(lines), errors="surrogatepass")
    answer(read_file, str(path), names=str(path))
    for command in COMMANDS:
        args = answer(from_config, command, path, names=str(path))
        if args is not None:
            answer(rules.check, args)
            write_config(args, tmp_path / "args.json")
            again = from_config(command, tmp_path / "args.json")
            assert again == args or "NaN" in (tmp_path / "args.json").read_text()  # which equals nothing


@fuzz
@given(content=st.dictionaries(st.one_of(st.sampled_from(NAMES), texts), junk, max_size=4))
@example(content={"train_iters": 10**400})
@example(content={"model": "\0"})
@example(content={"output_dir": "a" * 300})
@example(content={"system": "\ud83d"})
@pytest.mark.parametrize("command", COMMANDS)
def test_any_json(tmp_path, monkeypatch, command, content):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "run.json"
    path.write_text(json.dumps(content))
    args = answer(from_config, command, path, names=str(path))
    if args is not None:
        answer(rules.check, args)


@pytest.fixture
def run(tmp_path) -> SftArgs:
    """Return the options that resume a run."""
    (tmp_path / "out/checkpoint-2").mkdir(parents=True)
    (tmp_path / "t.jsonl").write_text('{"query": "q", "response": "a"}\n')
    args = SftArgs(model=str(tmp_path), dataset=[str(tmp_path / "t.jsonl")], output_dir=str(tmp_path / "out"))
    return dataclasses.replace(args, resume=True)


@fuzz
@given(data=st.data())
def test_any_args_json_of_a_run(run, data):
    path = Path(run.output_dir) / "args.json"
    changes = data.draw(st.dictionaries(st.sampled_from(NAMES), junk, max_size=3))
    path.write_text(json.dumps(dataclasses.asdict(run) | changes))
    answer(rules.check, run)
    path.write_bytes(data.draw(damaged(path.read_bytes())))
    answer(rules.check, run)
    answer(from_config, SftArgs, path, names=str(path))
