"""Load rows with answers for one model."""

from collections.abc import Collection, Sequence

from transformers import PreTrainedTokenizerBase

from swiftlite.data.dataset import Data, load_train_val
from swiftlite.data.encoder import ConversationEncoder
from swiftlite.data.template import ChatTemplate, load_tokenizer
from swiftlite.families.resolved import HfModel


def load_rows(
    model: HfModel,
    dataset: Sequence[str],
    *,
    offered: Collection[str] | None = None,
    trust_remote_code: bool = False,
    max_length: int = 2048,
    max_bad_rows: int = 0,
    system: str | None = None,
) -> tuple[PreTrainedTokenizerBase, Data]:
    """Load the rows as held-out samples, with the model's tokenizer and chat template.

    Args:
        offered: names of the command's options; errors only name these options. Default: the options of `megatron sft`.

    Raises:
        UserError: a file cannot be read, there are more bad rows than allowed, or no row is left.
    """
    tokenizer = load_tokenizer(model.directory, trust_remote_code)
    template = ChatTemplate(tokenizer, vocab_size=model.config["vocab_size"])
    encoder = ConversationEncoder(template, max_length, "right")
    return tokenizer, load_train_val(encoder, (), dataset, max_bad_rows=max_bad_rows, system=system, offered=offered)
