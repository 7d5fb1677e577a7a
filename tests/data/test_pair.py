"""Test rows with two answers: all formats, and errors that name the field."""

import pytest

from swiftlite.data.encoder import ConversationEncoder
from swiftlite.data.rows.conversation import RowError
from swiftlite.data.rows.pair import parse_pair
from swiftlite.data.rows.rated import parse_rated
from swiftlite.data.rows.sources import find_rows, read_rows
from swiftlite.data.template import ChatTemplate
from tests.data.templates import CHATML, LLAMA3
from tests.messages import mentions, naming

ASKED = {"role": "user", "content": "q"}
GOOD, BAD = {"role": "assistant", "content": "good"}, {"role": "assistant", "content": "bad"}


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [ASKED, GOOD], "rejected_response": "bad"},
        {"messages": [ASKED, GOOD], "rejected_messages": [ASKED, BAD]},
        {"query": "q", "response": "good", "rejected_response": "bad", "margin": 2},
        {"prompt": "q", "chosen": "good", "rejected": "bad"},
        {"prompt": [ASKED], "chosen": [GOOD], "rejected": [BAD]},
        {"prompt": "q", "chosen": [GOOD], "rejected": [BAD], "score_chosen": 1.0},
        {"prompt": "q", "chosen": [ASKED, GOOD], "rejected": [ASKED, BAD]},
        {"chosen": [ASKED, GOOD], "rejected": [ASKED, BAD]},
    ],
)
def test_every_format_is_the_same_pair(row):
    pair = parse_pair(row)
    assert (pair.messages, pair.rejected) == ([ASKED, GOOD], BAD)
    assert pair.other().messages == [ASKED, BAD]
    assert pair.prompt().rejected is None


def test_the_system_prompt_stands_before_both():
    pair = parse_pair({"query": "q", "response": "good", "rejected_response": "bad"}, system="be brief")
    assert [turn["content"] for turn in pair.messages] == ["be brief", "q", "good"]
    assert [turn["content"] for turn in pair.other().messages] == ["be brief", "q", "bad"]


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"query": "q", "response": "good"}, "row: query response"),
        ({"query": "q", "response": "same", "rejected_response": "same"}, "rejected_response: response"),
        ({"prompt": "q", "chosen": "same", "rejected": "same"}, "rejected: chosen"),
        ({"query": "q", "response": "good", "rejected_response": " "}, "rejected_response:"),
        ({"query": "q", "response": "", "rejected_response": "bad"}, "response:"),
        ({"query": "q", "response": "good", "rejected_response": ""}, "row:"),
        ({"prompt": "q", "chosen": "", "rejected": "bad"}, "chosen:"),
        ({"chosen": "good", "rejected": "bad"}, "prompt: chosen"),
        ({"prompt": 3, "chosen": [GOOD], "rejected": [BAD]}, "prompt:"),
        ({"chosen": [ASKED, GOOD], "rejected": [{**ASKED, "content": "r"}, BAD]}, "rejected:"),
        ({"chosen": [ASKED, GOOD], "rejected": [ASKED]}, "rejected: messages[0]: user assistant"),
        ({"chosen": [ASKED, GOOD], "rejected": ["bad"]}, "rejected: messages[0]:"),
        ([1], "row:"),
    ],
)
def test_what_is_no_pair_is_named(row, problem):
    with pytest.raises(RowError, match=naming(problem)) as raised:
        parse_pair(row)
    assert ("messages[" in raised.value.problem) is ("messages[" in problem)


def test_a_row_with_a_label_is_for_another_loss():
    with pytest.raises(RowError) as raised:
        parse_pair({"query": "q", "response": "a", "label": True})
    assert mentions(raised.value.hint, "--loss_type kto")


def test_bad_pairs_have_their_line(tmp_path):
    path = tmp_path / "pairs.jsonl"
    path.write_text(
        '{"prompt": "q", "chosen": "a", "rejected": "b"}\n{"prompt": "q", "chosen": "a", "rejected": "a"}\n'
    )
    rows = read_rows(find_rows(str(path)), parse=parse_pair)
    assert len(rows.conversations) == 1
    assert mentions(str(rows.bad_rows[0]), f"{path}:2 rejected: chosen")


CALLED = {"role": "assistant", "content": "", "tool_calls": [{"name": "add", "arguments": {"a": 1, "b": 1}}]}
TOOL_PROMPT = [ASKED, CALLED, {"role": "tool", "content": "2"}]


@pytest.mark.parametrize("template", [CHATML, LLAMA3], ids=["chatml", "llama3"])
@pytest.mark.parametrize("loss_scale", ["default", "last_round"])
def test_a_tool_call_before_the_answer_does_not_train(make_tokenizer, template, loss_scale):
    tokenizer = make_tokenizer(template)
    end = "<|im_end|>" if template is CHATML else "<|eot|>"
    encode = ConversationEncoder(ChatTemplate(tokenizer, loss_scale), 2048, "delete", parse_pair)
    (pair,) = encode(parse_pair({"prompt": TOOL_PROMPT, "chosen": [GOOD], "rejected": [BAD]})).samples
    (good,) = encode(parse_rated({"prompt": TOOL_PROMPT, "completion": [GOOD], "label": True})).samples
    trained = [
        tokenizer.decode(answer.labels[answer.labels != -100]).strip() for answer in (*pair.sequences, *good.sequences)
    ]
    assert trained == [f"good{end}", f"bad{end}", f"good{end}"]


def test_a_last_turn_that_does_not_train_is_named(make_tokenizer):
    encode = ConversationEncoder(ChatTemplate(make_tokenizer(CHATML)), 2048, "delete", parse_pair)
    row = {"prompt": TOOL_PROMPT, "chosen": [{**GOOD, "loss": False}], "rejected": [BAD]}
    bad = encode(parse_pair(row)).bad
    assert bad is not None
    assert mentions(bad.problem, "messages:")
