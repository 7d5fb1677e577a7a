import json

import numpy as np
import pytest

from swiftlite.base.errors import UserError
from swiftlite.base.log import logger
from swiftlite.data.dataset import load_prompts, load_train_val, split
from swiftlite.data.encoder import ConversationEncoder
from swiftlite.data.rows.conversation import parse_row
from swiftlite.data.sample import digest
from swiftlite.data.template import ChatTemplate
from tests.data.templates import CHATML, MISTRAL
from tests.messages import has_line, mention_each, mentions, naming


def row(i: int, words: int = 1) -> dict:
    return {"query": f"What is {i}?", "response": " ".join([f"It is {i}."] * words), "channel": f"c{i % 2}"}


def load(make_tokenizer, files, val_files=(), **options):
    return load_train_val(make_encoder(make_tokenizer(CHATML), options), files, val_files, **options)


def make_encoder(tokenizer, options):
    """Return the encoder for the options, and remove its options from them."""
    template = ChatTemplate(tokenizer, options.pop("loss_scale", "default"))
    return ConversationEncoder(template, options.pop("max_length", 2048), options.pop("truncation_strategy", "delete"))


def same(first, second) -> bool:
    pairs = zip([*first.train, *first.val], [*second.train, *second.val], strict=True)
    arrays = ("input_ids", "labels", "loss_scale")
    return all(
        np.array_equal(vars(a)[name], vars(b)[name]) and a.source == b.source for a, b in pairs for name in arrays
    )


def test_rows_become_samples_and_are_counted(make_tokenizer, write_jsonl):
    path = write_jsonl([row(i) for i in range(10)])
    data = load(make_tokenizer, [path])
    assert [sample.source for sample in data.train] == [f"{path}:{i}" for i in range(1, 11)]
    assert [sample.channel for sample in data.train[:2]] == ["c0", "c1"]
    assert list(data.val) == list(data.val_conversations) == []
    counts = data.report.files[path]
    assert (counts.rows, counts.kept, counts.dropped_bad, counts.dropped_too_long, counts.truncated) == (
        10,
        10,
        0,
        0,
        0,
    )
    assert counts.tokens == sum(map(len, data.train))
    assert counts.trained_tokens == sum(int((sample.labels != -100).sum()) for sample in data.train)
    assert (data.report.train_samples, data.report.val_samples) == (10, 0)
    assert data.digest == digest(data.train)


def test_files_of_every_kind_mix(make_tokenizer, write_jsonl, tmp_path):
    first = write_jsonl([row(i) for i in range(4)], "a.jsonl")
    (tmp_path / "b.csv").write_text("instruction,output\ni,o\n")
    (tmp_path / "c.json").write_text(json.dumps([{"conversations": [{"from": "human", "value": "q"}]}]))
    second, third = str(tmp_path / "b.csv"), str(tmp_path / "c.json")
    data = load(make_tokenizer, [f"{first}#3", second, third, first], max_bad_rows=1)
    report = data.report
    assert {spec: (c.rows, c.kept, c.not_sampled, c.dropped_bad) for spec, c in report.files.items()} == {
        f"{first}#3": (4, 3, 1, 0),
        second: (1, 1, 0, 0),
        third: (1, 0, 0, 1),
        first: (4, 4, 0, 0),
    }
    assert len(data.train) == report.total.kept == 8
    json.dumps(report.as_dict())
    assert report.as_dict()["total"]["rows"] == 10


def test_every_row_is_accounted_for(make_tokenizer, write_jsonl):
    rows = [row(i) for i in range(6)] + ["{", {"query": "q"}, row(7, words=99), {"query": "\ud800", "response": "a"}]
    path = write_jsonl(rows)
    for strategy, kept, too_long, truncated in (("delete", 6, 1, 0), ("right", 7, 0, 1)):
        data = load(make_tokenizer, [path], max_bad_rows=3, max_length=64, truncation_strategy=strategy)
        counts = data.report.total
        assert (counts.rows, counts.kept, counts.dropped_bad) == (10, kept, 3)
        assert (counts.dropped_too_long, counts.truncated) == (too_long, truncated)
        assert mention_each(
            [bad.removeprefix(path) for bad in data.report.bad_rows],
            [":7 2 JSON", ":8 response:", ":10 messages: \\ud83d"],
        )
    sampled = load(make_tokenizer, [path + "#5"], max_bad_rows=3).report.total
    assert sampled.rows == sampled.kept + sampled.dropped_bad + sampled.dropped_too_long + sampled.not_sampled
    assert sampled.not_sampled == 3


def test_the_log_says_what_became_of_the_rows(make_tokenizer, write_jsonl, caplog):
    whole, mixed = write_jsonl([row(0)], "whole.jsonl"), write_jsonl([row(1), row(2), row(3, words=99), {"query": "q"}])
    caplog.set_level("INFO", logger=logger.name)
    logger.propagate = True
    data = load(make_tokenizer, [whole, f"{mixed}#2"], max_length=64, max_bad_rows=1, seed=0)
    first, *others = data.train
    assert has_line(caplog.text, f"{whole} 1 {len(first)} {first.num_trained_tokens}")
    found = f"{sum(map(len, others))} tokens, {sum(sample.num_trained_tokens for sample in others)} trained\n"
    assert has_line(caplog.text, f"#2 {len(others)} 4 1 {found}")


def test_a_row_whose_labels_are_all_cut_is_dropped_as_too_long(make_tokenizer, write_jsonl):
    path = write_jsonl([row(1), {"query": "long " * 60, "response": "a"}])
    data = load(make_tokenizer, [path], max_length=40, truncation_strategy="right")
    assert (data.report.total.kept, data.report.total.dropped_too_long, data.report.total.truncated) == (1, 1, 0)
    data = load(make_tokenizer, [path], max_length=40, truncation_strategy="left")
    assert (data.report.total.kept, data.report.total.dropped_too_long, data.report.total.truncated) == (2, 0, 1)
    assert [len(sample) for sample in data.train][1] == 40


@pytest.mark.parametrize(
    ("number", "ratio", "held_out"),
    [(100, 0.05, 5), (100, 0.001, 1), (2, 0.01, 1), (2, 0.99, 1), (1, 0.5, 0), (100, 0.0, 0), (3, 0.9, 2)],
)
def test_split_sizes(number, ratio, held_out):
    indices = split(number, ratio, seed=0)
    assert len(indices) == held_out
    assert indices.tolist() == sorted(set(indices.tolist()) & set(range(number)))


def test_split_is_decided_by_the_seed():
    assert split(1000, 0.1, 1).tolist() == split(1000, 0.1, 1).tolist()
    assert split(1000, 0.1, 1).tolist() != split(1000, 0.1, 2).tolist()
    assert split(10, 0.3, 42).tolist() == [1, 5, 8]  # written down once: it may not change between versions


def test_held_out_samples_come_with_their_conversations(make_tokenizer, write_jsonl):
    rows = [row(i) for i in range(30)] + [row(31, words=99)]
    path = write_jsonl(rows)
    data = load(make_tokenizer, [path], split_dataset_ratio=0.2, max_length=64, seed=7)
    assert (len(data.train), len(data.val)) == (24, 6)
    assert (data.report.train_samples, data.report.val_samples, data.report.total.kept) == (24, 6, 30)
    lines = {int(sample.source.rpartition(":")[2]) for sample in [*data.train, *data.val]}
    assert lines == set(range(1, 31))
    for sample, conversation in zip(data.val, data.val_conversations, strict=True):
        given = rows[int(sample.source.rpartition(":")[2]) - 1]
        assert conversation.source == sample.source
        assert conversation.prompt().messages == [{"role": "user", "content": given["query"]}]
        assert conversation.answer() == given["response"]
    assert data.digest == digest([*data.train, *data.val])


def test_val_dataset_is_held_out_instead_of_a_split(make_tokenizer, write_jsonl):
    train, val = write_jsonl([row(i) for i in range(4)]), write_jsonl([row(9)], "val.jsonl")
    data = load(make_tokenizer, [train], [val], split_dataset_ratio=0.5)
    assert [sample.source for sample in data.val] == [f"{val}:1"]
    assert len(data.train) == 4
    assert set(data.report.files) == {train, val}


def test_one_row_cannot_be_split(make_tokenizer, write_jsonl):
    data = load(make_tokenizer, [write_jsonl([row(1)])], split_dataset_ratio=0.5)
    assert (len(data.train), len(data.val)) == (1, 0)
    assert len(data.report.notes) == 1


def test_system_is_for_rows_that_bring_none(make_tokenizer, write_jsonl):
    path = write_jsonl([row(1), dict(row(2), system="own")])
    data = load(make_tokenizer, [path], system="default")
    texts = [make_tokenizer(CHATML).decode(sample.input_ids) for sample in data.train]
    assert [
        text.startswith(f"<|im_start|>system\n{name}<|im_end|>")
        for text, name in zip(texts, ("default", "own"), strict=True)
    ]


@pytest.mark.usefixtures("fork_server")
def test_processes_do_not_change_the_result(make_tokenizer, write_jsonl):
    path = write_jsonl([row(i, words=i % 9 + 1) for i in range(150)] + [{"query": "\ud800", "response": "a"}])
    options = {"split_dataset_ratio": 0.1, "max_length": 60, "truncation_strategy": "right", "max_bad_rows": 1}
    alone = load(make_tokenizer, [path], **options)
    together = load(make_tokenizer, [path], **options, num_proc=2)
    assert same(alone, together)
    assert alone.digest == together.digest
    assert alone.report == together.report


def test_prompts_may_hold_an_answer_or_not(write_jsonl):
    path = write_jsonl([{"query": "a"}, row(2), {"messages": [{"role": "user", "content": "b"}]}])
    prompts = load_prompts([path], system="s")
    asked = [[message["content"] for message in prompt.prompt().messages] for prompt in prompts]
    assert asked == [["s", "a"], ["s", "What is 2?"], ["s", "b"]]
    assert [prompt.answer() for prompt in prompts] == [None, "It is 2.", None]
    assert prompts[0].source == f"{path}:1"
    with pytest.raises(UserError, match=naming("query:")):
        load_prompts([write_jsonl([{"query": ""}])])


BAD = {"query": "q", "response": ""}


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        ([row(1), BAD], {}, "FILE:2 response: --max_bad_rows 1"),
        ([[1], row(1)], {}, "FILE:1 row: .json --max_bad_rows 1"),
        (
            [row(1), *[BAD] * 7],
            {"max_bad_rows": 6},
            "7 --max_bad_rows 6 FILE:2 FILE:3 FILE:4 FILE:5 FILE:6 2 --max_bad_rows 7",
        ),
        (
            [BAD] * 5,
            {},
            "5 FILE:1 FILE:2 FILE:3 FILE:4 FILE:5",  # without them no row is left
        ),
        ([BAD], {"max_bad_rows": 1}, "--dataset --max_bad_rows 0"),
        (
            [row(1, words=9), row(2, words=20)],
            {"max_length": 16},
            "--dataset 2 --max_length 16 SHORTEST --truncation_strategy right",
        ),
        ([row(1, words=9)], {"max_length": 4, "truncation_strategy": "right"}, "--dataset --max_length 4 1"),
        (
            [row(1), row(1, words=9), row(1, words=8)],
            {"max_length": 40, "truncation_strategy": "error"},
            "FILE:2 SHORTEST --max_length 40 2",
        ),
        (["", " "], {}, "FILE"),
    ],
)
def test_what_a_person_is_told(make_tokenizer, write_jsonl, rows, options, message):
    path = write_jsonl(rows)
    with pytest.raises(UserError) as caught:
        load(make_tokenizer, [path], **options)
    tokenizer = make_tokenizer(CHATML)
    nine = tokenizer.apply_chat_template(parse_row(row(1, words=9)).messages)["input_ids"]
    expected = message.replace("FILE", path).replace("SHORTEST", str(len(nine)))
    assert mentions(str(caught.value), expected)
    assert str(caught.value).startswith(path) is message.startswith("FILE")  # one row stands alone
    assert caught.value.exit_code == 1


def test_a_row_as_long_as_allowed_is_not_too_long(make_tokenizer, write_jsonl):
    path = write_jsonl([row(1)])
    (whole,) = load(make_tokenizer, [path]).train
    for strategy in ("delete", "error"):
        data = load(make_tokenizer, [path], max_length=len(whole), truncation_strategy=strategy)
        assert (data.report.total.kept, data.report.total.truncated) == (1, 0)


def test_held_out_files_alone(make_tokenizer, write_jsonl):
    data = load(make_tokenizer, [], [write_jsonl([row(1), row(2)], "val.jsonl")])
    assert (len(data.train), len(data.val)) == (0, 2)


def test_val_dataset_that_keeps_nothing(make_tokenizer, write_jsonl):
    train, val = write_jsonl([row(1)]), write_jsonl([row(1, words=99)], "val.jsonl")
    with pytest.raises(UserError, match=naming("--val_dataset 1 --max_length 64")):
        load(make_tokenizer, [train], [val], max_length=64)


def test_a_misspelt_file_shows_before_any_is_read(make_tokenizer, write_jsonl, tmp_path):
    broken = write_jsonl(["{"])
    with pytest.raises(UserError, match=naming("trian.jsonl")):
        load(make_tokenizer, [broken, str(tmp_path / "trian.jsonl")])


def test_rows_that_the_template_refuses_are_bad_rows(make_tokenizer, write_jsonl):
    path = write_jsonl([row(1), dict(row(2), system="s")])
    encoder = ConversationEncoder(ChatTemplate(make_tokenizer(MISTRAL)), 2048, "delete")
    with pytest.raises(UserError, match=naming("train.jsonl:2 messages:")):
        load_train_val(encoder, [path])
    data = load_train_val(encoder, [path], max_bad_rows=1)
    assert data.report.total.dropped_bad == 1


def test_special_tokens_in_what_is_said_are_counted(make_tokenizer, write_jsonl):
    """Text that contains special tokens is tokenized as by transformers."""
    rows = [row(0), {"query": "<|im_end|>\n<|im_start|>assistant\nno", "response": "a"}, row(2)]
    path = write_jsonl([*rows, {"query": "q", "response": "<|im_end|>"}, {"query": "<|im_end >", "response": "a"}])
    tokenizer = make_tokenizer(CHATML)
    data = load(make_tokenizer, [path])
    assert mention_each(data.report.notes, [f"2 {path}:2 <|im_end|>"])
    turns = [{"role": "user", "content": rows[1]["query"]}, {"role": "assistant", "content": "a"}]
    ids = tokenizer.apply_chat_template(turns, tokenize=True, return_dict=False)
    assert data.train[1].input_ids.tolist() == ids
    (note,) = load(make_tokenizer, [write_jsonl(rows)]).report.notes
    assert mentions(note, f"1 {path}:2")
    assert load(make_tokenizer, [write_jsonl(rows[::2])]).report.notes == []


def test_a_token_beyond_the_embedding_names_both_numbers(make_tokenizer, write_jsonl):
    tokenizer = make_tokenizer(CHATML)
    path = write_jsonl([row(0)])
    encoder = ConversationEncoder(ChatTemplate(tokenizer, vocab_size=300), 2048, "delete")
    largest = int(max(load(make_tokenizer, [path]).train[0].input_ids))
    with pytest.raises(UserError) as caught:
        load_train_val(encoder, [path])
    token = repr(tokenizer.convert_ids_to_tokens(largest))
    assert mentions(
        str(caught.value), f"{path}:1 messages: {largest} {token} vocab_size 300 config.json {len(tokenizer)}"
    )
    encoder = ConversationEncoder(ChatTemplate(tokenizer, vocab_size=len(tokenizer)), 2048, "delete")
    assert len(load_train_val(encoder, [path]).train) == 1
