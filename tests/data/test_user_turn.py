"""Test prompts for a user's turn, with templates that behave like those of well-known models."""

import pytest

from swiftlite.base.errors import UserError
from swiftlite.data.rows.conversation import Conversation
from swiftlite.data.template import ChatTemplate
from swiftlite.data.user_turn import UserTurn
from tests.data.templates import ALPACA, CHATML, CHATML_GENERATION, GLM, LLAMA3, MISTRAL, OPEN_THINK, QWEN3, R1
from tests.messages import mentions

EXCHANGE = Conversation([{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "I am fine"}])
CHATML_PROMPT = "<|im_start|>user\n"


@pytest.mark.parametrize("kind", ["bytes", "metaspace"])
@pytest.mark.parametrize(
    ("chat_template", "beginning", "end"),
    [
        (CHATML, CHATML_PROMPT, "<|im_end|>"),
        (CHATML_GENERATION, CHATML_PROMPT, "<|im_end|>"),
        (QWEN3, CHATML_PROMPT, "<|im_end|>"),
        (OPEN_THINK, CHATML_PROMPT, "<|im_end|>"),
        (LLAMA3, "<s><|header|>user<|end_header|>\n\n", "<|eot|>"),
        (GLM, "<|user|>\n", "<|assistant|>"),  # a turn ends where the next header begins
        (R1, "<|user|>", "<|assistant|>"),
    ],
)
def test_prompt_ends_where_the_user_begins(make_tokenizer, kind, chat_template, beginning, end):
    template = ChatTemplate(make_tokenizer(chat_template, kind))
    turn = UserTurn(template)
    assert template.tokenizer.convert_ids_to_tokens(turn.end_token_id) == end
    assert turn.encode_prompt(Conversation([])) == template.tokenize(beginning)
    # What the model continues is the prefix of the prompt for the answer to that turn.
    asked = [*EXCHANGE.messages, {"role": "user", "content": "thank you"}]
    prompt = turn.encode_prompt(EXCHANGE)
    whole = template.encode_prompt(asked)
    assert whole[: len(prompt)] == prompt
    assert template.decode(whole[len(prompt) :]).lstrip().startswith("thank you" + end)


@pytest.mark.parametrize("chat_template", [QWEN3, LLAMA3, GLM])
def test_an_opening_follows_the_start_of_the_turn(make_tokenizer, chat_template):
    template = ChatTemplate(make_tokenizer(chat_template))
    turn = UserTurn(template)
    start = template.decode(turn.encode_prompt(EXCHANGE))
    assert template.decode(turn.encode_prompt(EXCHANGE, "thank you")) == f"{start}thank you"


@pytest.mark.parametrize("chat_template", [ALPACA, MISTRAL])
def test_turn_without_an_end_token_is_refused(make_tokenizer, chat_template):
    """The tokenizer of these tests has no token [/INST]."""
    with pytest.raises(UserError) as raised:
        UserTurn(ChatTemplate(make_tokenizer(chat_template)))
    assert mentions(str(raised.value), "--self_prompts")


@pytest.mark.parametrize(
    "user",
    [
        "{{ m.content + '<|eot|>' }}",  # nothing introduces the turn
        "{{ '<|user|>' }}",  # its text is dropped
        "{{ '<|user|>' + m.content | upper + '<|eot|>' }}",  # its text is changed
        "{{ '<|user|>' + m.content }}",  # nothing ends it
    ],
)
def test_template_without_a_place_for_the_user_is_refused(make_tokenizer, user):
    chat_template = "{% for m in messages %}{% if m.role == 'user' %}" + user
    chat_template += "{% else %}{{ '<|assistant|>' + m.content + '</s>' }}{% endif %}{% endfor %}"
    with pytest.raises(UserError) as raised:
        UserTurn(ChatTemplate(make_tokenizer(chat_template)))
    assert mentions(str(raised.value), "--self_prompts")


def test_refused_system_prompt_names_its_source(make_tokenizer):
    """A topic is put into the system prompt, which some templates do not support."""
    chat_template = MISTRAL.replace(" [/INST]", "<|eot|>")
    turn = UserTurn(ChatTemplate(make_tokenizer(chat_template)))
    with pytest.raises(UserError) as raised:
        turn.encode_prompt(Conversation([{"role": "system", "content": "Be brief."}], source="topic 1"))
    assert mentions(str(raised.value), "topic 1")
