import difflib
import json

import pytest

from swiftlite.data.rows.conversation import RowError, parse_row
from tests.messages import mentions


def roles(conversation):
    return [message["role"] for message in conversation.messages]


def contents(conversation):
    return [message["content"] for message in conversation.messages]


def turn(role, content, **fields):
    return {"role": role, "content": content, **fields}


QUESTION, ANSWER = turn("user", "q"), turn("assistant", "a")
CALL = {"id": "1", "type": "function", "function": {"name": "get", "arguments": {"city": "Paris"}}}


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"messages": [QUESTION, ANSWER]}, [("user", "q"), ("assistant", "a")]),
        (
            {"messages": [turn("system", "s"), QUESTION, ANSWER, turn("user", "q2"), turn("assistant", "a2")]},
            [("system", "s"), ("user", "q"), ("assistant", "a"), ("user", "q2"), ("assistant", "a2")],
        ),
        ({"messages": [turn("system", ""), QUESTION, ANSWER]}, [("user", "q"), ("assistant", "a")]),
        ({"messages": json.dumps([QUESTION, ANSWER])}, [("user", "q"), ("assistant", "a")]),
        (
            {"messages": [turn("user", [{"type": "text", "text": "q"}, {"type": "text", "text": "r"}]), ANSWER]},
            [("user", "qr"), ("assistant", "a")],
        ),
        ({"query": "q", "response": "a"}, [("user", "q"), ("assistant", "a")]),
        (
            {"query": "q2", "response": "a2", "history": [["q", "a"]], "system": "s"},
            [("system", "s"), ("user", "q"), ("assistant", "a"), ("user", "q2"), ("assistant", "a2")],
        ),
        (
            {"query": "q2", "response": "a2", "history": '[["q", "a"]]', "system": ""},
            [("user", "q"), ("assistant", "a"), ("user", "q2"), ("assistant", "a2")],
        ),
        ({"instruction": "i", "input": "x", "output": "o"}, [("user", "i\nx"), ("assistant", "o")]),
        ({"instruction": "i", "input": "", "output": "o"}, [("user", "i"), ("assistant", "o")]),
        ({"instruction": "", "input": "x", "output": "o"}, [("user", "x"), ("assistant", "o")]),
        (
            {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
            [("user", "q"), ("assistant", "a")],
        ),
        (
            {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}], "system": "s"},
            [("system", "s"), ("user", "q"), ("assistant", "a")],
        ),
        ({"conversations": [QUESTION, ANSWER]}, [("user", "q"), ("assistant", "a")]),
    ],
)
def test_formats(row, expected):
    conversation = parse_row(row)
    assert list(zip(roles(conversation), contents(conversation), strict=True)) == expected
    assert conversation.weights == [1.0] * len(expected)


@pytest.mark.parametrize(
    "row",
    [
        {"query": "q", "response": "a", "system": "s"},
        {"messages": [QUESTION, turn("assistant", "a", loss_scale=0.5), QUESTION, turn("assistant", "b", loss=False)]},
        {
            "messages": [QUESTION, turn("assistant", "", tool_calls=[CALL]), turn("tool", {"t": 20}), ANSWER],
            "tools": [{"type": "function", "function": {"name": "get"}}],
            "channel": "weather",
        },
    ],
)
def test_a_conversation_as_a_row_is_read_as_itself(row):
    conversation = parse_row(row)
    again = json.loads(json.dumps(conversation.as_row()))
    assert parse_row(again) == conversation


def test_system_is_for_rows_that_bring_none():
    assert contents(parse_row({"query": "q", "response": "a"}, system="default")) == ["default", "q", "a"]
    assert contents(parse_row({"query": "q", "response": "a", "system": "own"}, system="default"))[0] == "own"
    assert contents(parse_row({"messages": [turn("system", "own"), QUESTION, ANSWER]}, system="default"))[0] == "own"


def test_tools_and_calls_keep_their_values_and_order():
    tool = {"type": "function", "function": {"name": "get", "parameters": {"z": None, "a": [1, 2.5, "é"]}}}
    messages = [QUESTION, turn("assistant", "", tool_calls=[CALL]), turn("tool", {"t": 20}), ANSWER]
    for tools in ([tool], json.dumps([tool])):
        conversation = parse_row({"messages": messages, "tools": tools})
        assert json.dumps(conversation.tools) == json.dumps([tool])
    assert conversation.messages[1] == turn("assistant", "", tool_calls=[CALL])
    assert conversation.messages[2] == turn("tool", '{"t": 20}')


def test_call_arguments_as_text_become_an_object():
    call = {"name": "get", "arguments": '{"city": "Paris"}'}
    conversation = parse_row({"messages": [QUESTION, turn("assistant", None, tool_calls=[call])]})
    expected = {"type": "function", "function": {"name": "get", "arguments": {"city": "Paris"}}}
    assert conversation.messages[1] == turn("assistant", "", tool_calls=[expected])


def test_sharegpt_function_calls():
    said = [
        {"from": "human", "value": "q"},
        {"from": "function_call", "value": '{"name": "get", "arguments": {"city": "Paris"}}'},
        {"from": "observation", "value": ""},
        {"from": "gpt", "value": "a"},
    ]
    conversation = parse_row({"conversations": said})
    assert roles(conversation) == ["user", "assistant", "tool", "assistant"]
    assert conversation.messages[1]["tool_calls"][0]["function"] == CALL["function"]


def test_weights_of_turns():
    messages = [QUESTION, turn("assistant", "a", loss=False), QUESTION, turn("assistant", "a", loss_scale=0.5)]
    messages += [turn("user", "q", loss=False), turn("assistant", "a", loss=True)]
    conversation = parse_row({"messages": messages})
    assert conversation.weights == [1, 0, 1, 0.5, 0, 1]
    assert all(set(message) == {"role", "content"} for message in conversation.messages)


def test_prompt_and_answer():
    conversation = parse_row({"query": "q", "response": "a", "channel": "math"}, source="f:1")
    assert conversation.prompt().messages == [turn("user", "q")]
    assert conversation.prompt().weights == [1]
    assert (conversation.answer(), conversation.channel, conversation.source) == ("a", "math", "f:1")
    asked = parse_row({"query": "q"}, needs_answer=False)
    assert asked.prompt() is asked
    assert asked.answer() is None
    answered = asked.with_answer("b")
    assert answered.messages == [turn("user", "q"), turn("assistant", "b")]
    assert answered.weights == [1, 1]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ([1], "row: .json"),
        ("x", "row:"),
        ({"text": "x"}, "row: text messages conversations query"),
        ({}, "row: messages conversations query"),
        ({"instruction": "Add.", "inputs": "1 2", "output": "3"}, "inputs: input"),
        ({"query": "q", "respones": "r"}, "respones: response"),
        ({"query": "q", "response": "a", "images": ["x.png"]}, "images:"),
        ({"query": "", "response": "a"}, "query:"),
        ({"query": "q", "response": "  "}, "response:"),
        ({"query": "q"}, "response:"),
        ({"query": "q", "response": 3}, "response:"),
        ({"query": "q", "response": "a", "history": [["q"]]}, "history[0]: [question, answer]"),
        ({"query": "q", "response": "a", "history": [["q", ""]]}, "history[0][1]:"),
        ({"query": "q", "response": "a", "history": {"q": 1}}, "history: [question"),
        ({"query": "q", "response": "a", "history": "[["}, "history: JSON"),
        ({"query": "q", "response": "a", "channel": 3}, "channel:"),
        ({"query": "q", "response": "a", "tools": "{"}, "tools: JSON"),
        ({"query": "q", "response": "a", "tools": {"a": 1}}, "tools: JSON"),
        ({"query": "q", "response": "a", "tools": ["get"]}, "tools[0]:"),
        ({"instruction": "i", "output": ""}, "output:"),
        ({"instruction": "", "output": "o"}, "instruction:"),
        ({"messages": []}, "messages:"),
        ({"messages": 3}, "messages:"),
        ({"messages": ["q"]}, "messages[0]:"),
        ({"messages": [turn("bot", "q")]}, "messages[0].role: 'bot' system user assistant tool"),
        ({"messages": [turn(["user"], "q")]}, "messages[0].role: ['user']"),
        ({"messages": [{"content": "q"}]}, "messages[0].role: None"),
        ({"messages": [QUESTION, turn("assistant", "")]}, "messages[1].content:"),
        ({"messages": [QUESTION, turn("assistant", None)]}, "messages[1].content:"),
        ({"messages": [turn("user", {"a": 1}), ANSWER]}, "messages[0].content:"),
        ({"messages": [turn("user", [{"type": "image_url", "url": ""}]), ANSWER]}, "messages[0].content: image_url"),
        ({"messages": [QUESTION]}, "messages[0]: user assistant"),
        ({"messages": [ANSWER]}, "messages[0]: assistant"),
        ({"messages": [QUESTION, QUESTION]}, "messages[1]: user"),
        ({"messages": [QUESTION, turn("system", "s")]}, "messages[1]: system user"),
        ({"messages": [turn("system", "s")]}, "messages[0]: user"),
        ({"messages": [turn("system", "")]}, "row: user"),
        ({"messages": [turn("system", "s"), QUESTION, ANSWER], "system": "s"}, "system:"),
        ({"messages": [turn("user", "q", tool_calls=[CALL]), ANSWER]}, "messages[0].tool_calls: user"),
        ({"messages": [QUESTION, turn("assistant", "", tool_calls=["get"])]}, "messages[1].tool_calls[0]:"),
        ({"messages": [QUESTION, turn("assistant", "", tool_calls="get")]}, "messages[1].tool_calls: JSON"),
        ({"messages": [QUESTION, turn("assistant", "", tool_calls=3)]}, "messages[1].tool_calls:"),
        (
            {"messages": [QUESTION, turn("assistant", "", tool_calls=[{"name": "get", "arguments": "{"}])]},
            "messages[1].tool_calls[0].arguments: JSON",
        ),
        (
            {"messages": [QUESTION, turn("assistant", "", tool_calls=[{"name": "get", "arguments": [1]}])]},
            "messages[1].tool_calls[0].arguments:",
        ),
        ({"messages": [QUESTION, turn("assistant", "a", loss="no")]}, "messages[1].loss: 'no' true false"),
        ({"messages": [QUESTION, turn("assistant", "a", loss_scale=-1)]}, "messages[1].loss_scale: -1"),
        ({"messages": [QUESTION, turn("assistant", "a", loss_scale=True)]}, "messages[1].loss_scale: True"),
        ({"messages": [QUESTION, turn("assistant", "a", loss=True, loss_scale=1)]}, "messages[1].loss: loss_scale"),
        ({"messages": [turn("user", "q", loss=True), ANSWER]}, "messages[0].loss: assistant"),
        ({"messages": [QUESTION, turn("assistant", "a", loss_scale=10**400)]}, "messages[1].loss_scale: 0 1e+06"),
        ({"messages": [QUESTION, turn("assistant", "a", loss_scale=1e39)]}, "messages[1].loss_scale: 1e+39 0 1e+06"),
        ({"messages": [turn("user", [{"type": "text", "text": 5}]), ANSWER]}, "messages[0].content[0].text:"),
        ({"messages": [QUESTION, turn("assistant", "a", reasoning_content=[1])]}, "messages[1].reasoning_content:"),
        ({"query": "q", "response": "a", "channel": "\ud83d"}, "channel:"),
        ({"query": "q", "response": "a", "tools": "[" * 5000}, "tools: JSON 100"),
        ({"query": "q", "response": "a", "tools": "9" * 5000}, "tools: JSON 4300"),
        ({"conversations": [{"from": "me", "value": "q"}]}, "conversations[0].from: 'me' system human"),
        ({"conversations": [{"from": "human", "value": ""}]}, "conversations[0].value:"),
        (
            {"conversations": [{"from": "human", "value": "q"}, {"from": "function_call", "value": "get()"}]},
            "conversations[1].value: JSON",
        ),
        ({"conversations": [{"from": "human", "value": "q"}, {"from": "function_call"}]}, "conversations[1].value:"),
    ],
)
def test_bad_row_names_its_field(row, message):
    with pytest.raises(RowError) as caught:
        parse_row(row)
    assert mentions(str(caught.value), message)


def test_fields_with_names_a_little_like_known_ones_are_left_alone():
    own = {"query_id": 1, "message_id": 2, "history_len": 3, "tools_used": 4}
    assert parse_row({"query": "q", "response": "a"} | own).answer() == "a"


def test_names_of_fields_are_compared_once_for_all_rows(monkeypatch):
    compared = []
    closest = difflib.get_close_matches

    def counted(name, *known, **how):
        compared.append(name)
        return closest(name, *known, **how)

    monkeypatch.setattr(difflib, "get_close_matches", counted)
    for number in range(1000):
        parse_row({"query": "q", "response": "r", "identifier": number, "annotated_by": "somebody"})
    assert sorted(compared) == ["annotated_by", "identifier"]
