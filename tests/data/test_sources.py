import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from swiftlite.base.errors import UserError
from swiftlite.data.rows.sources import find_rows, read_rows
from tests.messages import mention_each, mentions, naming

ROWS = [{"query": f"q{i}", "response": f"a{i}"} for i in range(4)]


def read(spec, **options):
    return read_rows(find_rows(str(spec)), **options)


def write(path: Path, data: str | bytes) -> Path:
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


def queries(rows):
    return [conversation.messages[0]["content"] for conversation in rows.conversations]


def sources(rows):
    return [conversation.source.rpartition("/")[2] for conversation in rows.conversations]


JSON_LINES = "\n".join(map(json.dumps, ROWS)) + "\n"


@pytest.mark.parametrize(
    ("name", "data", "lines"),
    [
        ("a.jsonl", JSON_LINES, [1, 2, 3, 4]),
        ("a.jsonl", JSON_LINES.strip(), [1, 2, 3, 4]),
        ("a.jsonl", "\ufeff" + JSON_LINES.replace("\n", "\r\n") + "\r\n  \r\n", [1, 2, 3, 4]),
        ("a.jsonl", JSON_LINES.replace("\n", "\n\n"), [1, 3, 5, 7]),
        ("a.JSONL", JSON_LINES, [1, 2, 3, 4]),
        ("a.json", JSON_LINES, [1, 2, 3, 4]),
        ("a.json", json.dumps(ROWS), [1, 1, 1, 1]),
        ("a.json", "\ufeff\r\n" + json.dumps(ROWS, indent=1).replace("\n", "\r\n") + "\r\n", [3, 7, 11, 15]),
        ("a.csv", "query,response\n" + "".join(f"q{i},a{i}\n" for i in range(4)), [2, 3, 4, 5]),
        ("a.csv", "\ufeffresponse,query\r\n" + "".join(f'"a\r\n{i}",q{i}\r\n' for i in range(4)), [2, 4, 6, 8]),
        ("a.csv", "query,response\n" + "".join(f"q{i},a\u2028b\n\n" for i in range(4)), [2, 4, 6, 8]),
    ],
)
def test_every_row_knows_its_line(tmp_path, name, data, lines):
    rows = read(write(tmp_path / name, data))
    assert queries(rows) == ["q0", "q1", "q2", "q3"]
    assert sources(rows) == [f"{name}:{line}" for line in lines]
    assert (rows.num_rows, rows.bad_rows, rows.num_not_sampled) == (4, [], 0)


def compress(path: Path, data: bytes) -> Path:
    compression = {".gz": "gzip", ".zst": "zstd"}[path.suffix]
    with pyarrow.output_stream(str(path), compression=compression) as file:
        file.write(data)
    return path


ARCHIVES = ["a.jsonl.gz", "a.jsonl.zst"]


@pytest.mark.parametrize("name", ARCHIVES)
def test_rows_of_an_archive(tmp_path, name):
    path = compress(tmp_path / name, ("\ufeff" + JSON_LINES.replace("\n", "\n\n") + "{\n").encode())
    path.write_bytes(path.read_bytes() + compress(tmp_path / f"b-{name}", JSON_LINES.encode()).read_bytes())
    rows = read(path)  # an archive to which another was appended
    assert queries(rows) == ["q0", "q1", "q2", "q3"] * 2
    assert sources(rows) == [f"{name}:{line}" for line in (1, 3, 5, 7, 10, 11, 12, 13)]
    assert mention_each([str(bad) for bad in rows.bad_rows], [f"{path}:9 JSON"])
    assert queries(read(f"{path}#8")) == queries(rows)
    path = compress(tmp_path / name, b'{"query": "\xff"}\n')
    assert mention_each([str(bad) for bad in read(path).bad_rows], [f"{path}:1 12 UTF-8"])


@pytest.mark.parametrize("name", ARCHIVES)
@pytest.mark.parametrize("damage", ["cut", "bits", "other"])
def test_a_damaged_archive_is_named(tmp_path, name, damage):
    lines = "".join(json.dumps({"query": f"q{i}", "response": str(i**20)}) + "\n" for i in range(2000))
    whole = compress(tmp_path / name, lines.encode()).read_bytes()
    half = len(whole) // 2
    content = {"cut": whole[:half], "bits": whole[:half] + b"\0" * 99 + whole[half + 99 :], "other": lines.encode()}
    path = write(tmp_path / name, content[damage])
    with pytest.raises(UserError, match=naming(name)) as caught:
        read(path)
    assert f"{path}:" in caught.value.problem


@pytest.mark.parametrize("name", ARCHIVES)
def test_an_archive_without_its_extension_is_recognized(tmp_path, name):
    path = compress(tmp_path / name, JSON_LINES.encode())
    path = path.rename(tmp_path / "a.jsonl")
    first = read(path).bad_rows[0]
    assert mentions(str(first), f"{path}:1 UTF-8")
    assert mentions(first.hint, str(tmp_path / name))


@pytest.mark.parametrize("name", ARCHIVES)
def test_a_line_of_an_archive_has_a_limit(tmp_path, name, monkeypatch):
    """A file of a few bytes can contain a line that does not fit into memory."""
    monkeypatch.setattr("swiftlite.data.rows.sources.LONGEST_LINE", 1 << 20)
    bomb = JSON_LINES.encode() + b" " * (1 << 26)
    path = compress(tmp_path / name, bomb)
    assert path.stat().st_size < 1 << 17
    with pytest.raises(UserError, match=naming(f"{name}:5 1048576")):
        read(path)


def test_a_line_separator_inside_a_string_does_not_end_the_line(tmp_path):
    text = "one\u2028two\u0085three"
    row = json.dumps({"query": "q", "response": text}, ensure_ascii=False)
    rows = read(write(tmp_path / "a.jsonl", row + "\n" + row))
    assert [conversation.answer() for conversation in rows.conversations] == [text, text]


def test_csv_holds_nested_fields_as_json_and_long_texts(tmp_path):
    messages = json.dumps([{"role": "user", "content": "q" * 200_000}, {"role": "assistant", "content": "a"}])
    quoted = messages.replace('"', '""')
    rows = read(write(tmp_path / "a.csv", f'messages,system\n"{quoted}",\n"{quoted}",s\n'))
    assert [len(conversation.messages) for conversation in rows.conversations] == [2, 3]


def test_parquet_rows_are_counted_from_one_over_all_row_groups(tmp_path):
    table = pyarrow.Table.from_pylist([{"query": f"q{i}", "response": f"a{i}"} for i in range(3000)])
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", row_group_size=700)
    rows = read(tmp_path / "a.parquet")
    assert sources(rows) == [f"a.parquet:{i}" for i in range(1, 3001)]
    assert queries(rows) == [f"q{i}" for i in range(3000)]


def test_parquet_that_is_damaged_behind_some_rows_names_the_last_one_that_was_read(tmp_path):
    path = tmp_path / "a.parquet"
    table = pyarrow.table({"query": ["q"] * 3000, "response": ["a"] * 3000})
    pyarrow.parquet.write_table(table, path, row_group_size=1024, use_dictionary=False)
    third = pyarrow.parquet.ParquetFile(path).metadata.row_group(2).column(0).data_page_offset
    content = bytearray(path.read_bytes())
    content[third : third + 8] = b"\xff" * 8
    path.write_bytes(content)
    with pytest.raises(UserError, match=naming("a.parquet: 2048 Parquet")):
        read(path)


def test_parquet_nested_messages(tmp_path):
    call = {"id": None, "function": {"name": "get", "arguments": '{"city": null}'}}
    messages = [
        {"role": "user", "content": "q", "tool_calls": None, "loss": None},
        {"role": "assistant", "content": None, "tool_calls": [call], "loss": True},
    ]
    tools = [{"name": "get", "parameters": {"city": None}}]
    table = pyarrow.Table.from_pylist([{"messages": messages, "tools": json.dumps(tools), "channel": None}])
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    (conversation,) = read(tmp_path / "a.parquet").conversations
    assert conversation.tools == tools
    assert conversation.messages[1]["tool_calls"][0]["function"] == {"name": "get", "arguments": {"city": None}}


def test_parquet_that_padded_tools_with_nulls_is_refused(tmp_path):
    tools = [[{"name": "get", "parameters": {"city": "text"}}], [{"name": "sum", "parameters": {"of": "list"}}]]
    table = pyarrow.Table.from_pylist([dict(row, tools=tool) for row, tool in zip(ROWS, tools, strict=False)])
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    rows = read(tmp_path / "a.parquet")
    expected = [f"{tmp_path}/a.parquet:{i} tools: Parquet" for i in (1, 2)]
    assert mention_each([str(bad) for bad in rows.bad_rows], expected)
    assert mentions(rows.bad_rows[0].hint, "JSON json.dumps")


@pytest.mark.parametrize("arguments", [[{"city": "x"}, {"of": "x"}], [{"city": "x"}, {"city": "x", "of": "x"}]])
def test_parquet_that_padded_call_arguments_with_nulls_is_refused(tmp_path, arguments):
    calls = [{"name": "get", "arguments": given} for given in arguments]
    messages = [
        {"role": "user", "content": "q", "tool_calls": None},
        {"role": "assistant", "content": "", "tool_calls": [{"function": call} for call in calls]},
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"messages": messages}]), tmp_path / "a.parquet")
    (bad,) = read(tmp_path / "a.parquet").bad_rows
    assert mentions(str(bad), "a.parquet:1 messages[1].tool_calls:")


def test_sample_is_a_function_of_seed_and_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "a.jsonl", "".join(json.dumps({"query": f"q{i}", "response": "a"}) + "\n" for i in range(100)))
    ten = read("a.jsonl#10", seed=1)
    assert len(set(queries(ten))) == 10
    assert ten.num_not_sampled == 90
    lines = [int(source.partition(":")[2]) for source in sources(ten)]
    assert lines == sorted(lines)
    assert queries(read("a.jsonl#10", seed=1)) == queries(ten)
    assert queries(read("a.jsonl#10", seed=2)) != queries(ten)


def test_sample_is_drawn_from_good_rows_and_says_when_there_are_too_few(tmp_path):
    path = write(tmp_path / "a.jsonl", JSON_LINES + "{}\n")
    rows = read(f"{path}#4")
    assert (len(rows.conversations), rows.note) == (4, "")
    rows = read(f"{path}#9")
    assert len(rows.conversations) == 4
    assert mentions(rows.note, f"{path}#9 4")


def test_a_number_sign_may_be_part_of_a_name(tmp_path):
    path = write(tmp_path / "c#1.jsonl", JSON_LINES)
    assert find_rows(str(path)).sample is None
    assert find_rows(f"{path}#2").sample == 2


def test_bad_rows_are_named_and_the_others_read(tmp_path):
    path = write(
        tmp_path / "a.jsonl", b'{"query": "q0", "response": "a"}\n{"query": \n{"query": "\xff"}\n[1]\n' + b"3\n"
    )
    rows = read(path)
    assert queries(rows) == ["q0"]
    assert mention_each(
        [str(bad).removeprefix(f"{path}:") for bad in rows.bad_rows], ["2 11 JSON", "3 12 UTF-8", "4 row:", "5 row:"]
    )
    assert rows.num_rows == 5


@pytest.mark.parametrize("value", ["[" * 10_000, "[" * 500 + "]" * 500, '{"a":' * 500 + "1" + "}" * 500, "9" * 5000])
@pytest.mark.parametrize("row", ['{{"query": "q", "response": {}}}', '{{"messages": {}}}', '{{"tools": {}}}', "{}"])
def test_a_row_that_no_reader_survives_is_a_bad_row(tmp_path, row, value):
    rows = read(write(tmp_path / "a.jsonl", JSON_LINES + row.format(value) + "\n" + JSON_LINES))
    assert len(rows.conversations) == 8
    problem = "4300" if value[0] == "9" else "100"
    assert mention_each(
        [str(bad).removeprefix(f"{tmp_path}/") for bad in rows.bad_rows], [f"a.jsonl:5 1 JSON {problem}"]
    )


def test_csv_row_of_another_width(tmp_path):
    rows = read(write(tmp_path / "a.csv", "query,response\nq0,a\nq1,a,b\nq2\n"))
    assert mention_each([str(bad).partition("a.csv:")[2] for bad in rows.bad_rows], ["3 row: 2", "4 row: 1 2"])


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.json", '[{"query": 1},\n {"query" 2}]', "a.json:2 11 JSON ':'"),
        ("a.json", '[{"query": 1}\n {"query": 2}]', "a.json:2 2 JSON ]"),
        ("a.json", '[{"query": 1},\n', "a.json:2 1 JSON ]"),
        ("a.json", "[{}]\n{}", "a.json:2 1 JSON"),
        ("a.json", "", "a.json"),
        ("a.json", "[]", "a.json"),
        ("a.jsonl", "\n \n", "a.jsonl"),
        ("a.csv", "query,response\n", "a.csv"),
        ("a.csv", 'query,response\nq,"a', "a.csv:2 CSV"),
        ("a.csv", b"query,response\nq,\xff\n", "a.csv:2 UTF-8 iconv -f LATIN1 -t UTF-8"),
        ("a.json", '[{"query": 1}]'.encode("utf-16"), "a.json:1 UTF-8 iconv -f UTF-16 -t UTF-8"),
        ("a.parquet", "query,response\n", "a.parquet: Parquet"),
        ("a.csv", "query,response,query\nq,a,b\n", "a.csv:1 2 'query'"),
        ("a.json", "[{}]" + "[" * 5000, "a.json:1 5 JSON"),
        ("a.json", "[{},\n" + "[" * 5000, "a.json:2 1 JSON 100"),
    ],
)
def test_unreadable_file(tmp_path, name, data, message):
    with pytest.raises(UserError) as caught:
        read(write(tmp_path / name, data))
    assert mentions(str(caught.value).removeprefix(f"{tmp_path}/"), message)


@pytest.mark.parametrize("spec", ["trian.jsonl", "trian.jsonl#5", ".", "train.jsonl#all"])
def test_misnamed_file(tmp_path, monkeypatch, spec):
    write(tmp_path / "train.jsonl", JSON_LINES)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=naming(spec)):
        find_rows(spec)


def table(path: Path, columns: dict) -> Path:
    pyarrow.parquet.write_table(pyarrow.table(columns), path, compression="NONE")
    return path


def test_parquet_with_a_column_twice(tmp_path):
    rows = pyarrow.Table.from_arrays([pyarrow.array(["q"])] * 3, names=["query", "query", "response"])
    pyarrow.parquet.write_table(rows, tmp_path / "a.parquet")
    with pytest.raises(UserError, match=naming("a.parquet: 2 'query'")):
        read(tmp_path / "a.parquet")


def test_parquet_with_a_date_before_all_dates(tmp_path):
    days = pyarrow.array([-10_000_000], pyarrow.int32()).cast(pyarrow.date32())
    with pytest.raises(UserError, match=naming("a.parquet: Parquet")):
        read(table(tmp_path / "a.parquet", {"query": ["q"], "response": ["a"], "day": days}))


@pytest.mark.parametrize("damage", [b"\xff\xfe\xfd", b"\0" * 40])
def test_parquet_that_is_damaged_is_said_to_be_or_read(tmp_path, damage):
    """The damage can be anywhere. Some bytes, such as statistics, are not read."""
    whole = table(tmp_path / "whole.parquet", {"query": ["question"] * 9, "response": ["answer"] * 9}).read_bytes()
    refused = 0
    for place in range(0, len(whole) - len(damage), 7):
        path = write(tmp_path / "a.parquet", whole[:place] + damage + whole[place + len(damage) :])
        refusal = refusal_of(path)
        assert str(path) in refusal
        refused += refusal != str(path)
    assert refused > 10


def refusal_of(path: Path) -> str:
    """Return the error for a file that is rejected; the file's name if it is read."""
    try:
        rows = read(path)
    except UserError as error:
        return error.problem
    assert rows.num_rows == len(rows.conversations) + len(rows.bad_rows)
    return str(path)
