import difflib
import json

import pytest

from swiftlite.data.conversation import RowError, parse_row


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


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ([1], "row: is a list, not an object\n    rename the file to .json if it is one array"),
        ("x", "row: is text, not an object"),
        ({"text": "x"}, "row: has none of the known fields, only text\n    rows are messages, conversations, query"),
        ({}, "row: has none of the known fields, only nothing"),
        (
            {"instruction": "Add.", "inputs": "1 2", "output": "3"},
            "inputs: is no field of a row\n    did you mean input? A field of your own needs another name",
        ),
        ({"query": "q", "respones": "r"}, "respones: is no field of a row\n    did you mean response?"),
        ({"query": "q", "response": "a", "images": ["x.png"]}, "images: swiftlite trains on text alone"),
        ({"query": "", "response": "a"}, "query: is empty"),
        ({"query": "q", "response": "  "}, "response: is empty"),
        ({"query": "q"}, "response: is empty"),
        ({"query": "q", "response": 3}, "response: is a number, not text"),
        ({"query": "q", "response": "a", "history": [["q"]]}, "history[0]: is not a pair [question, answer]"),
        ({"query": "q", "response": "a", "history": [["q", ""]]}, "history[0][1]: is empty"),
        ({"query": "q", "response": "a", "history": {"q": 1}}, "history: is an object, not a list of [question"),
        ({"query": "q", "response": "a", "history": "[["}, "history: is not JSON: Expecting value"),
        ({"query": "q", "response": "a", "channel": 3}, "channel: is a number, not text"),
        ({"query": "q", "response": "a", "tools": "{"}, "tools: is not JSON"),
        ({"query": "q", "response": "a", "tools": {"a": 1}}, "tools: is an object, not a list of JSON schemas"),
        ({"query": "q", "response": "a", "tools": ["get"]}, "tools[0]: is text, not an object"),
        ({"instruction": "i", "output": ""}, "output: is empty"),
        ({"instruction": "", "output": "o"}, "instruction: is empty"),
        ({"messages": []}, "messages: is empty"),
        ({"messages": 3}, "messages: is a number, not a list of turns"),
        ({"messages": ["q"]}, "messages[0]: is text, not an object"),
        ({"messages": [turn("bot", "q")]}, "messages[0].role: is 'bot', not one of system, user, assistant, tool"),
        ({"messages": [turn(["user"], "q")]}, "messages[0].role: is ['user'], not one of"),
        ({"messages": [{"content": "q"}]}, "messages[0].role: is None, not one of"),
        ({"messages": [QUESTION, turn("assistant", "")]}, "messages[1].content: is empty"),
        ({"messages": [QUESTION, turn("assistant", None)]}, "messages[1].content: is empty"),
        ({"messages": [turn("user", {"a": 1}), ANSWER]}, "messages[0].content: is an object, not text"),
        (
            {"messages": [turn("user", [{"type": "image_url", "url": ""}]), ANSWER]},
            "messages[0].content: holds parts of type image_url; swiftlite trains on text alone",
        ),
        ({"messages": [QUESTION]}, "messages[0]: the last turn is the user's, not the assistant's: nothing to train"),
        ({"messages": [ANSWER]}, "messages[0]: wrong order: assistant comes first"),
        ({"messages": [QUESTION, QUESTION]}, "messages[1]: wrong order: user follows user"),
        ({"messages": [QUESTION, turn("system", "s")]}, "messages[1]: wrong order: system follows user"),
        ({"messages": [turn("system", "s")]}, "messages[0]: there is no user turn"),
        ({"messages": [turn("system", "")]}, "row: there is no user turn"),
        (
            {"messages": [turn("system", "s"), QUESTION, ANSWER], "system": "s"},
            "system: is given twice, here and as the first turn",
        ),
        ({"messages": [turn("user", "q", tool_calls=[CALL]), ANSWER]}, "messages[0].tool_calls: stands on a user turn"),
        (
            {"messages": [QUESTION, turn("assistant", "", tool_calls=["get"])]},
            "messages[1].tool_calls[0]: is not a call",
        ),
        ({"messages": [QUESTION, turn("assistant", "", tool_calls="get")]}, "messages[1].tool_calls: is not JSON"),
        ({"messages": [QUESTION, turn("assistant", "", tool_calls=3)]}, "messages[1].tool_calls: is a number, not a"),
        (
            {"messages": [QUESTION, turn("assistant", "", tool_calls=[{"name": "get", "arguments": "{"}])]},
            "messages[1].tool_calls[0].arguments: is not JSON",
        ),
        (
            {"messages": [QUESTION, turn("assistant", "", tool_calls=[{"name": "get", "arguments": [1]}])]},
            "messages[1].tool_calls[0].arguments: is a list, not an object",
        ),
        ({"messages": [QUESTION, turn("assistant", "a", loss="no")]}, "messages[1].loss: is 'no', not true or false"),
        (
            {"messages": [QUESTION, turn("assistant", "a", loss_scale=-1)]},
            "messages[1].loss_scale: is -1, not a number",
        ),
        ({"messages": [QUESTION, turn("assistant", "a", loss_scale=True)]}, "messages[1].loss_scale: is True, not a n"),
        (
            {"messages": [QUESTION, turn("assistant", "a", loss=True, loss_scale=1)]},
            "messages[1].loss: stands beside loss_scale; give one of them",
        ),
        (
            {"messages": [turn("user", "q", loss=True), ANSWER]},
            "messages[0].loss: stands on a turn that is not the assistant's",
        ),
        (
            {"messages": [QUESTION, turn("assistant", "a", loss_scale=10**400)]},
            "messages[1].loss_scale: is 1000000000",
        ),
        (
            {"messages": [QUESTION, turn("assistant", "a", loss_scale=1e39)]},
            "messages[1].loss_scale: is 1e+39, not a number from 0 to 1e+06",
        ),
        (
            {"messages": [turn("user", [{"type": "text", "text": 5}]), ANSWER]},
            "messages[0].content[0].text: is a number, not text",
        ),
        (
            {"messages": [QUESTION, turn("assistant", "a", reasoning_content=[1])]},
            "messages[1].reasoning_content: is a list, not text",
        ),
        ({"query": "q", "response": "a", "channel": "\ud83d"}, "channel: half of a surrogate pair"),
        ({"query": "q", "response": "a", "tools": "[" * 5000}, "tools: is not JSON: nested more than 100 deep"),
        ({"query": "q", "response": "a", "tools": "9" * 5000}, "tools: is not JSON: a number of more than 4300 digits"),
        ({"conversations": [{"from": "me", "value": "q"}]}, "conversations[0].from: is 'me', not one of system, human"),
        ({"conversations": [{"from": "human", "value": ""}]}, "conversations[0].value: is empty"),
        (
            {"conversations": [{"from": "human", "value": "q"}, {"from": "function_call", "value": "get()"}]},
            "conversations[1].value: is not JSON",
        ),
        (
            {"conversations": [{"from": "human", "value": "q"}, {"from": "function_call"}]},
            "conversations[1].value: is empty",
        ),
    ],
)
def test_bad_row_names_its_field(row, message):
    with pytest.raises(RowError) as caught:
        parse_row(row)
    assert str(caught.value).startswith(message)


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
