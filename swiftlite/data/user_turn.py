"""Make prompts after which a model writes the user's next turn.

A chat template renders a conversation with a user turn whose text is a mark. The text before the mark is the prompt,
and the first token after the mark is the token that ends the turn:

    <|im_start|>user\n@@mark@@<|im_end|>\n<|im_start|>assistant\n
    ----- prompt -----        -- end ---
"""

from collections.abc import Sequence

from swiftlite.base.errors import UserError
from swiftlite.data.rows.conversation import Conversation, Message, RowError
from swiftlite.data.template import ChatTemplate

MARK = "@@swiftlite marks this user turn@@"
ANSWER = "@@swiftlite marks this answer@@"

CHANNEL = "self_prompts"
"""Channel of rows whose user turns the model wrote, so that acceptance is reported separately for them."""


class UserTurn:
    """The user's turn in a chat template.

    Attributes:
        end_token_id: the token that ends the turn.

    Raises:
        UserError: a model cannot be prompted for a user turn with this template.
    """

    def __init__(self, template: ChatTemplate):
        self._template = template
        exchange = [{"role": "user", "content": "a"}, {"role": "assistant", "content": ANSWER}]
        try:
            _, end = self._around([])
            before, _ = self._around(exchange)
        except RowError as error:
            raise UserError(f"--self_prompts: {error.problem}", "use --dataset") from None
        # Between an answer and the next user turn: the end of the answer, then the text that starts the user's turn.
        between = before.rpartition(ANSWER)[2].strip().removeprefix(template.turn_end)
        if not between.strip():
            raise _unusable("has no text at the start of a user turn")
        ids = template.tokenize(end.lstrip())
        if not ids or ids[0] not in template.tokenizer.added_tokens_decoder:
            raise _unusable("has no token at the end of a user turn")
        self.end_token_id = ids[0]

    def encode_prompt(self, chat: Conversation, opening: str = "") -> list[int]:
        """Return the tokens up to the start of the user turn that follows a conversation.

        Args:
            opening: first words of the turn, which the model completes.

        Raises:
            UserError: the template cannot render the conversation; the error names its `file:line`.
        """
        try:
            before, _ = self._around(chat.messages)
        except RowError as error:
            raise UserError(f"{chat.source}: {error.problem}", error.hint) from None
        # Spaces belong to the next word of the turn, as in "USER: Hello".
        return self._template.tokenize((before + opening).rstrip(" "))

    def _around(self, messages: Sequence[Message]) -> tuple[str, str]:
        """Return the text before and after the user turn that follows these messages."""
        marked = [*messages, {"role": "user", "content": MARK}]
        before, mark, after = self._template.render(marked, None, add_generation_prompt=True).rpartition(MARK)
        if not mark:
            raise RowError("messages", "the chat template drops or changes user turns")
        return before, after


def _unusable(problem: str) -> UserError:
    return UserError(f"--self_prompts: the chat template of --model {problem}", "use --dataset")
