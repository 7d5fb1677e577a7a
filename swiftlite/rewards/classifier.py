"""Score completions with reward models, in the child process of reward functions, and tokenize conversations for them.

A model reads a conversation in its own chat template and with its own tokenizer, as in TRL's GRPOTrainer.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedTokenizerBase

from swiftlite.base.errors import UserError
from swiftlite.rewards.models import TRAIN_ONE, check_directory
from swiftlite.rewards.settings import RewardSettings

MAX_TOKENS = 16384
"""Tokens of a batch, including padding. A longer conversation is a batch by itself."""


def load_model(settings: RewardSettings, directory: str) -> Callable[..., list[float]]:
    """Load a reward model, and return it as a reward function.

    Raises:
        UserError: the directory is not a reward model, or cannot be read.
    """
    check_directory(directory)
    path, given = Path(directory).expanduser(), f"--reward_model {directory}"
    trust = settings.trust_remote_code
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer = load_tokenizer(directory, trust_remote_code=trust)
    try:
        model, report = AutoModelForSequenceClassification.from_pretrained(
            path, trust_remote_code=trust, use_safetensors=True, dtype="auto", output_loading_info=True
        )
    except Exception as error:  # of many kinds
        raise _cannot_load(directory, error) from None
    if model.config.num_labels != 1:
        problem = f"{given} has {model.config.num_labels} labels; a reward model has one"
        raise UserError(problem, TRAIN_ONE, exit_code=2)
    if missing := sorted(report["missing_keys"]):
        problem = f"{given} lacks weights, which would be random: {', '.join(missing[:3])}"
        raise UserError(problem, TRAIN_ONE, exit_code=2)
    model.config.get_text_config().pad_token_id = tokenizer.pad_token_id  # by which its class finds the last token
    model = model.to(device).eval()

    @torch.inference_mode()
    def score(prompts: Sequence[Any], completions: Sequence[str]) -> list[float]:
        """Return the model's score of each conversation."""
        rows = tokenize(tokenizer, prompts, completions)
        scores = [0.0] * len(rows)
        for numbers in _batches([len(row) for row in rows]):
            inputs = tokenizer.pad(
                {"input_ids": [rows[number] for number in numbers]}, padding_side="right", return_tensors="pt"
            ).to(device)
            found = model(**inputs).logits[:, 0].float().tolist()
            for number, value in zip(numbers, found, strict=True):
                scores[number] = value
        return scores

    return score


def load_tokenizer(directory: str, *, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a reward model, with a pad token.

    Raises:
        UserError: it cannot be loaded, or has no chat template or no token for padding.
    """
    given = f"--reward_model {directory}"
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(
            Path(directory).expanduser(), trust_remote_code=trust_remote_code
        )
    except Exception as error:  # of many kinds
        raise _cannot_load(directory, error) from None
    if not tokenizer.chat_template:
        raise UserError(f"{given}: its tokenizer has no chat template", "copy chat_template.jinja", exit_code=2)
    pad = tokenizer.pad_token or tokenizer.eos_token
    if pad is None:
        raise UserError(
            f"{given}: its tokenizer has no pad token", "set pad_token in tokenizer_config.json", exit_code=2
        )
    tokenizer.pad_token = pad
    return tokenizer


def tokenize(tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Any], completions: Sequence[str]) -> list[list[int]]:
    """Return the tokens of each conversation: the messages of a prompt, and the completion as an answer."""
    rows = []
    for prompt, completion in zip(prompts, completions, strict=True):
        turns = [*prompt, {"role": "assistant", "content": str(completion)}]
        text: Any = tokenizer.apply_chat_template(turns, tokenize=False)
        rows.append(tokenizer(text, add_special_tokens=False)["input_ids"])
    return rows


def _cannot_load(directory: str, error: Exception) -> UserError:
    reason = " ".join(str(error).split())
    return UserError(f"--reward_model {directory} cannot be loaded: {reason}", TRAIN_ONE, exit_code=2)


def _batches(lengths: Sequence[int]) -> list[list[int]]:
    """Divide rows, from short to long, into batches of at most MAX_TOKENS tokens; return their numbers."""
    batches: list[list[int]] = [[]]
    for number in sorted(range(len(lengths)), key=lengths.__getitem__):
        if batches[-1] and (len(batches[-1]) + 1) * lengths[number] > MAX_TOKENS:
            batches.append([])
        batches[-1].append(number)
    return batches
