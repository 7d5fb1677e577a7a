"""Test templates: trained texts are compared with expected texts, and `test_labels_by_hand` compares every token."""

import json
import pickle
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizer, PreTrainedTokenizerFast

from swiftlite.base.errors import UserError
from swiftlite.data.rows.conversation import RowError, parse_row
from swiftlite.data.template import ChatTemplate, load_tokenizer, stop_token_ids
from tests.data.templates import ALPACA, CHATML, CHATML_GENERATION, GLM, LLAMA3, MISTRAL, OPEN_THINK, QWEN3, R1
from tests.messages import mentions, naming
from tests.tiny import make_tiny_tokenizer

TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {}}}
TWO_ROUNDS = {"query": "And you?", "response": "I am fine", "history": [["2 + 2 =", "4."]]}
AGENT = {
    "messages": [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "tool_calls": [{"name": "get_weather", "arguments": {"city": "Paris"}}]},
        {"role": "tool", "content": "sunny"},
        {"role": "assistant", "content": "It is sunny"},
    ],
    "tools": [TOOL],
}
THINKING = "<think>\nhm\n</think>\n\n"
CALL = '{"name": "get_weather", "arguments": {"city": "Paris"}}'


def trained_texts(template: ChatTemplate, row: dict) -> list[str]:
    """Return the text of each run of consecutive trained tokens."""
    sample = template.encode(parse_row(row))
    trained = np.flatnonzero(sample.labels != -100)
    runs = np.split(trained, np.flatnonzero(np.diff(trained) > 1) + 1)
    assert all(sample.labels[run].tolist() == sample.input_ids[run].tolist() for run in runs)
    return [str(template.tokenizer.decode(sample.labels[run], clean_up_tokenization_spaces=False)) for run in runs]


@pytest.mark.parametrize("kind", ["bytes", "trimmed", "metaspace"])
@pytest.mark.parametrize(
    ("chat_template", "row", "expected"),
    [
        (CHATML, TWO_ROUNDS, ["4.<|im_end|>", "I am fine<|im_end|>"]),
        (CHATML, AGENT, [f"<tool_call>{CALL}</tool_call><|im_end|>", "It is sunny<|im_end|>"]),
        (CHATML_GENERATION, TWO_ROUNDS, ["4.<|im_end|>", "I am fine<|im_end|>"]),
        (LLAMA3, TWO_ROUNDS, ["4.<|eot|>", "I am fine<|eot|>"]),
        (LLAMA3, dict(AGENT, tools=None), [f"{CALL}</s>", "It is sunny<|eot|>"]),
        (QWEN3, TWO_ROUNDS, ["4.<|im_end|>", "<think>\n\n</think>\n\nI am fine<|im_end|>"]),
        (
            QWEN3,
            dict(AGENT, tools=None),
            [f"\n<tool_call>\n{CALL}\n</tool_call><|im_end|>", "<think>\n\n</think>\n\nIt is sunny<|im_end|>"],
        ),
        (QWEN3, {"query": "q", "response": THINKING + "a"}, [THINKING + "a<|im_end|>"]),
        (GLM, TWO_ROUNDS, ["4.", "I am fine<|endoftext|>"]),
        (ALPACA, TWO_ROUNDS, ["4.", "I am fine<|endoftext|>"]),
        (OPEN_THINK, TWO_ROUNDS, ["\n</think>\n\n4.<|im_end|>", "\n</think>\n\nI am fine<|im_end|>"]),
        (OPEN_THINK, {"query": "q", "response": THINKING + "a"}, ["hm\n</think>\n\na<|im_end|>"]),
        (CHATML, {"query": "q", "response": "naïve 😀 日本\n"}, ["naïve 😀 日本\n<|im_end|>"]),
    ],
)
def test_only_the_assistant_trains(make_tokenizer, kind, chat_template, row, expected):
    template = ChatTemplate(make_tokenizer(chat_template, kind))
    assert trained_texts(template, row) == expected


@pytest.mark.parametrize(("kind", "space"), [("bytes", " "), ("metaspace", "")])
def test_space_before_an_answer_trains_with_it(make_tokenizer, kind, space):
    """A SentencePiece decoder drops the first space, but the token contains it."""
    template = ChatTemplate(make_tokenizer(MISTRAL, kind))
    assert trained_texts(template, TWO_ROUNDS) == [space + "4.</s>", space + "I am fine</s>"]
    sample = template.encode(parse_row(TWO_ROUNDS))
    text = "<s>[INST] 2 + 2 = [/INST] 4.</s>[INST] And you? [/INST] I am fine</s>"
    assert sample.input_ids.tolist() == template.tokenizer(text)["input_ids"]
    first = template.tokenizer.convert_ids_to_tokens(int(sample.labels[sample.labels != -100][0]))
    assert first in ("Ġ", "Ġ4", "▁", "▁4")


def hand_made_tokenizer(chat_template: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per word, special token or line end."""
    words = ["<unk>", "<|im_start|>", "<|im_end|>", "\n", "user", "assistant", "hi", "there", "yes", "no", "<|end|>"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"<\|\w+\|>|\n|\w+"), "isolated")
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", chat_template=chat_template)


BY_HAND = {
    "messages": [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "yes", "loss_scale": 0.5},
        {"role": "user", "content": "there"},
        {"role": "assistant", "content": "no"},
    ]
}
IDS = [1, 4, 3, 6, 2, 3, 1, 5, 3, 8, 2, 3, 1, 4, 3, 7, 2, 3, 1, 5, 3, 9, 2, 3]


@pytest.mark.parametrize("chat_template", [CHATML, CHATML_GENERATION])
@pytest.mark.parametrize(
    ("loss_scale", "trained"),
    [
        ("default", {9: 0.5, 10: 0.5, 21: 1, 22: 1}),
        ("last_round", {21: 1, 22: 1}),
        ("all", {i: 0.5 if i in (9, 10) else 1 for i in range(1, 24)}),
    ],
)
def test_labels_by_hand(chat_template, loss_scale, trained):
    sample = ChatTemplate(hand_made_tokenizer(chat_template), loss_scale).encode(parse_row(BY_HAND, source="f:1"))
    assert sample.input_ids.tolist() == IDS
    assert sample.labels.tolist() == [IDS[i] if i in trained else -100 for i in range(24)]
    assert sample.loss_scale.tolist() == [trained.get(i, 0) for i in range(24)]
    assert (sample.input_ids.dtype, sample.labels.dtype, sample.loss_scale.dtype) == (np.int32, np.int32, np.float32)
    assert (sample.source, sample.num_trained_tokens) == ("f:1", len(trained))


def test_all_trains_every_token_that_something_predicts(make_tokenizer):
    sample = ChatTemplate(make_tokenizer(CHATML), "all").encode(parse_row(AGENT))
    assert sample.labels.tolist() == [-100, *sample.input_ids[1:]]
    assert sample.loss_scale.tolist() == [0] + [1] * (len(sample) - 1)


@pytest.mark.parametrize("row", [TWO_ROUNDS, AGENT])
def test_tokens_are_those_of_the_tokenizer_s_own_template(make_tokenizer, row):
    """Some rows have tools."""
    tokenizer = make_tokenizer(CHATML)
    template, conversation = ChatTemplate(tokenizer), parse_row(row)

    def expected(messages, **options) -> list[int]:
        return tokenizer.apply_chat_template(messages, tools=conversation.tools, return_dict=False, **options)

    assert template.encode(conversation).input_ids.tolist() == expected(conversation.messages)
    asked = conversation.prompt().messages
    assert template.encode_prompt(asked, conversation.tools) == expected(asked, add_generation_prompt=True)


def test_turns_with_loss_false_do_not_train(make_tokenizer):
    messages = [dict(message) for message in BY_HAND["messages"]]
    messages[1] = {"role": "assistant", "content": "yes", "loss": False}
    assert trained_texts(ChatTemplate(make_tokenizer(CHATML)), {"messages": messages}) == ["no<|im_end|>"]


def test_last_round_is_every_turn_since_the_last_question(make_tokenizer):
    row = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, *AGENT["messages"]]}
    template = ChatTemplate(make_tokenizer(CHATML), "last_round")
    assert trained_texts(template, row) == [f"<tool_call>{CALL}</tool_call><|im_end|>", "It is sunny<|im_end|>"]


@pytest.mark.parametrize("kind", ["bytes", "trimmed", "metaspace"])
@pytest.mark.parametrize("chat_template", [CHATML, CHATML_GENERATION, LLAMA3, QWEN3, MISTRAL, GLM, ALPACA, OPEN_THINK])
@pytest.mark.parametrize(
    "row",
    [
        {"query": "2 + 2 =", "response": "4."},
        {"query": "q", "response": " starts with a space"},
        {"query": "q", "response": "\n\nstarts with lines"},
        {"query": "q  ", "response": "éa"},
        TWO_ROUNDS,
    ],
)
def test_prompt_is_what_stands_before_the_answer(make_tokenizer, chat_template, kind, row):
    """Tokens are compared.

    If no special token separates an earlier answer from its header, texts are compared instead.
    """
    template = ChatTemplate(make_tokenizer(chat_template, kind), "last_round")
    conversation = parse_row(row)
    sample = template.encode(conversation)
    prompt = template.encode_prompt(conversation.prompt().messages)
    first_label = int(np.flatnonzero(sample.labels != -100)[0])
    before = sample.input_ids[:first_label].tolist()
    if chat_template == ALPACA and row == TWO_ROUNDS:
        before, prompt = template.tokenizer.decode(before), template.tokenizer.decode(prompt)
    assert before == prompt


def test_prompt_that_would_share_a_token_with_the_answer(make_tokenizer):
    """The rendered text contains three newlines in a row, two of which are one token of this tokenizer."""
    tokenizer = make_tokenizer(OPEN_THINK)
    text = "<think>\n\n</think>"
    assert tokenizer.tokenize(text) != tokenizer.tokenize("<think>\n") + tokenizer.tokenize("\n</think>")
    template = ChatTemplate(tokenizer)
    sample = template.encode(parse_row({"query": "q", "response": "a"}))
    assert "<think>\n\n</think>\n\na" in tokenizer.decode(sample.input_ids)


def test_generation_blocks_win_over_prefix_differences(make_tokenizer):
    """A template's blocks may mark less than the whole turn.

    If they mark the whole turn, both methods find the same text.
    """
    row = {"query": "q", "response": "one two"}
    only_answer = CHATML_GENERATION.replace("{% generation %}", "{{ 'Answer: ' }}{% generation %}")
    assert trained_texts(ChatTemplate(make_tokenizer(only_answer)), row) == ["one two<|im_end|>"]
    both = [ChatTemplate(make_tokenizer(text)).encode(parse_row(TWO_ROUNDS)) for text in (CHATML, CHATML_GENERATION)]
    assert both[0].labels.tolist() == both[1].labels.tolist()


def test_end_of_turn_trains_when_a_generation_block_leaves_it_out(make_tokenizer):
    text = "{% generation %}{{ m.content }}{% endgeneration %}{{ '<|im_end|>' }}"
    chat_template = CHATML_GENERATION.replace("{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}", text)
    assert chat_template != CHATML_GENERATION
    template = ChatTemplate(make_tokenizer(chat_template))
    assert trained_texts(template, TWO_ROUNDS) == ["4.<|im_end|>", "I am fine<|im_end|>"]


def test_generation_block_that_starts_with_a_space(make_tokenizer):
    """transformers' mask of whole tokens is wrong for such a block if the offsets of tokens do not include spaces."""
    template = ChatTemplate(make_tokenizer(CHATML_GENERATION, "trimmed"))
    row = {"query": "q", "response": " b", "history": [["q", " a"]]}
    assert trained_texts(template, row) == [" a<|im_end|>", " b<|im_end|>"]


def test_accents_that_the_tokenizer_composes(make_tokenizer):
    row = {"query": "q", "response": "e\u0301te\u0301"}
    assert trained_texts(ChatTemplate(make_tokenizer(CHATML)), row) == ["\u00e9t\u00e9<|im_end|>"]


class Characters(PreTrainedTokenizer):
    """A tokenizer in Python, without offsets."""

    def __init__(self, **options):
        self.characters = [chr(i) for i in range(256)]
        super().__init__(**options)

    @property
    def vocab_size(self):
        return len(self.characters)

    def get_vocab(self):
        return {character: i for i, character in enumerate(self.characters)} | self.added_tokens_encoder

    def _tokenize(self, text, **kwargs):
        return list(text)

    def _convert_token_to_id(self, token):
        return ord(token)

    def _convert_id_to_token(self, index):
        return chr(index)

    def convert_tokens_to_string(self, tokens):
        return "".join(tokens)


def test_tokenizer_without_offsets():
    tokenizer = Characters(eos_token="<|im_end|>", chat_template=CHATML)
    assert not tokenizer.is_fast
    template = ChatTemplate(tokenizer)
    conversation = parse_row(TWO_ROUNDS)
    assert trained_texts(template, TWO_ROUNDS) == ["4.<|im_end|>", "I am fine<|im_end|>"]
    prompt = template.encode_prompt(conversation.prompt().messages)
    assert template.encode(conversation).input_ids[: len(prompt)].tolist() == prompt
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    assert trained_texts(ChatTemplate(tokenizer), {"query": "q", "response": "a"}) == ["a<|im_end|>"]


def test_end_token(make_tokenizer):
    tokenizer = make_tokenizer(CHATML)
    assert ChatTemplate(tokenizer).end_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert ChatTemplate(make_tokenizer(GLM)).end_token_id == tokenizer.eos_token_id
    several = CHATML.replace("<|im_end|>", "</end of turn>")
    assert ChatTemplate(make_tokenizer(several)).end_token_id is None


def test_stop_tokens_are_gathered_from_the_model_directory(make_tokenizer, tmp_path: Path):
    tokenizer = make_tokenizer(CHATML)
    known = {tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|im_end|>")}
    assert len(known) == 2
    assert stop_token_ids(ChatTemplate(tokenizer), tmp_path) == tuple(sorted(known))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 2]}))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 5}))
    assert stop_token_ids(ChatTemplate(tokenizer), tmp_path) == tuple(sorted({*known, 2, 5, 7}))


@pytest.mark.parametrize(
    ("chat_template", "row", "message"),
    [
        (MISTRAL, {"query": "q", "response": "a", "system": "s"}, "messages:"),
        (
            "{% for m in messages %}{{ m.role + 1 if m.content == 'q' else m.content }}{% endfor %}",
            {"query": "q", "response": "a"},
            "messages:",
        ),
        (
            "{% for m in messages if m.role != 'system' %}{{ m.content }}{% endfor %}",
            {"query": "q", "response": "a", "system": "Be brief"},
            "messages[0]:",
        ),
        (GLM, AGENT, "messages[1].tool_calls:"),
        (LLAMA3, {"query": "q", "response": "a", "tools": [TOOL]}, "tools[0]:"),
        (
            QWEN3,
            {"query": "q2", "response": "a", "history": [["q", THINKING + "a"]]},
            "messages[1]: --loss_scale last_round",
        ),
        (
            QWEN3,
            {
                "messages": [
                    {"role": "user", "content": "q"},
                    {"role": "assistant", "content": "a", "reasoning_content": "hm"},
                    {"role": "user", "content": "q"},
                    {"role": "assistant", "content": "a"},
                ]
            },
            "messages[1]:",
        ),
        (
            R1,
            {"query": "q", "response": "a"},
            "messages[1]: 'user|>q<|assistant|><think>\\n' 'user|>q<|assistant|>a</s>' add_generation_prompt",
        ),
        (
            CHATML.replace("m.content }}", "m.content | replace('some', 'any') }}"),
            {"query": "q", "response": "some text"},
            "messages[1]:",
        ),
        (
            CHATML,
            {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "loss": False}]},
            "messages: false",
        ),
        (CHATML, {"query": "half \ud83d", "response": "a"}, "messages:"),
    ],
)
def test_row_that_the_template_cannot_handle(make_tokenizer, chat_template, row, message):
    template = ChatTemplate(make_tokenizer(chat_template))
    with pytest.raises(RowError) as caught:
        template.encode(parse_row(row))
    assert mentions(str(caught.value), message)


def test_thinking_in_history_trains_with_last_round(make_tokenizer):
    """With the default setting, this conversation is an error whose hint recommends the option `last_round`."""
    row = {"query": "q2", "response": THINKING + "b", "history": [["q", THINKING + "a"]]}
    template = ChatTemplate(make_tokenizer(QWEN3), "last_round")
    assert trained_texts(template, row) == [THINKING + "b<|im_end|>"]


def test_turn_whose_end_cannot_be_located(make_tokenizer):
    """If an earlier turn changes, later turns are rendered differently, so no position in the text is certain."""
    chat_template = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + m.content }}"
        "{% if not loop.first %}{{ '!' if loop.last else messages[1].content | length }}{% endif %}{% endfor %}"
        "{{ '<|im_start|>assistant' if add_generation_prompt }}"
    )
    with pytest.raises(RowError) as caught:
        ChatTemplate(make_tokenizer(chat_template)).encode(parse_row(TWO_ROUNDS))
    assert mentions(str(caught.value), "messages[1]: --loss_scale last_round")


def test_answer_that_the_tokenizer_does_not_know():
    template = ChatTemplate(hand_made_tokenizer(CHATML))
    with pytest.raises(RowError) as caught:
        template.encode(parse_row({"query": "unheard of", "response": "yes maybe"}))
    assert mentions(str(caught.value), "messages[1]: 'yes maybe<|im_end|>' 'yes <unk> <|im_end|>'")


@pytest.mark.parametrize(
    ("chat_template", "message"),
    [
        (None, "chat_template.jinja"),
        ("{{ raise_exception('no') }}", "messages: no"),
        ("{% for m in messages %}{{ m.role }}{% endfor %}", ""),
    ],
)
def test_tokenizer_without_a_usable_template(make_tokenizer, chat_template, message):
    with pytest.raises(UserError) as caught:
        ChatTemplate(make_tokenizer(chat_template))
    assert mentions(str(caught.value), message)


def test_a_directory_without_a_tokenizer(tmp_path):
    """transformers would create an empty tokenizer."""
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    with pytest.raises(UserError) as error:
        load_tokenizer(tmp_path)
    assert mentions(str(error.value), f"{tmp_path} merges.txt tokenizer.json vocab.json")
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(UserError, match=naming(str(tmp_path))):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("expression", "problem"),
    [
        ("1 // 0", "division"),
        ("range(10**9) | list", "Range too big"),
        ("m.content.index('@')", "substring not found"),
        ("'%q' % {}", "unsupported format character"),
        ("'{:d}'.format(m.content)", "format code"),
        ("forever(1)", "recursion"),
    ],
)
def test_a_template_may_raise_anything(make_tokenizer, expression, problem):
    """A simple conversation is rendered without an error, so that only one row fails."""
    fault = "{% macro forever(n) %}{{ forever(n) }}{% endmacro %}{% if m.content == 'q' %}{{ " + expression + " }}"
    template = ChatTemplate(
        make_tokenizer("{% for m in messages %}" + fault + "{% endif %}{{ m.role }}:{{ m.content }}\n{% endfor %}")
    )
    row = {"query": "q", "response": "a"}
    with pytest.raises(RowError, match="messages: .*" + problem):
        template.encode(parse_row(row))


def test_a_config_that_transformers_refuses_is_not_the_tokenizer_s_fault(tmp_path):
    """AutoTokenizer reads config.json first."""
    make_tiny_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "qwen3", "hidden_size": "a"}')
    with pytest.raises(UserError) as error:
        load_tokenizer(tmp_path)
    assert mentions(error.value.problem, f"{tmp_path}/config.json transformers")
    assert "hidden_size" in error.value.problem
    assert "\n" not in error.value.problem
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    assert len(load_tokenizer(tmp_path)) == len(make_tiny_tokenizer())


def test_a_template_without_special_tokens_keeps_few_prompts(make_tokenizer):
    """No two rows share the text before an answer. The template and its cache are sent to worker processes."""
    template = ChatTemplate(make_tokenizer(ALPACA))

    def size_after(first: int, number: int) -> int:
        for n in range(first, first + number):
            template.encode(parse_row({"query": f"What is {n:05d}?", "response": "It is."}))
        return len(pickle.dumps(template))

    assert size_after(0, 100) == pytest.approx(size_after(100, 900), rel=0.01)
