"""Test who generated each token and its text, against examples and against tokenizers' decoding of the whole text."""

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from swiftlite.acceptance.answers import WrittenToken, describe, token_texts, written_tokens
from swiftlite.acceptance.counts import DraftCounts, count_steps, draft_steps
from tests.tiny import make_tiny_hf


def test_who_wrote_each_token():
    """The row is the prompt token 9, then 1 2 3 4 5 6, with two heads.

    After 1, both drafts are correct (2, 3), and the trunk generates 4. After 4, the first draft is wrong (8), and the
    trunk generates 5. After 5, the first draft is correct (6), and the row ends.
    """
    first = [2, 0, 0, 8, 6]
    second = [3, 0, 0, 7, 7]
    drafts_KS = torch.tensor([first, second])
    steps = list(draft_steps(drafts_KS, torch.tensor([9, 1, 2, 3, 4, 5, 6]), 1))
    assert written_tokens([1, 2, 3, 4, 5, 6], steps) == [
        WrittenToken(1, 0, None),
        WrittenToken(2, 1, None),
        WrittenToken(3, 2, None),
        WrittenToken(4, 0, None),
        WrittenToken(5, 0, 8),
        WrittenToken(6, 1, None),
    ]
    assert count_steps(steps, 2) == DraftCounts(3, 6, (2, 1))


def test_a_refused_draft_is_told_by_its_text(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(make_tiny_hf(tmp_path / "model", "qwen3", with_tokenizer=True))
    ids = tokenizer.encode("one two")
    found = describe(tokenizer, [WrittenToken(ids[0], 1, None), WrittenToken(ids[1], 0, ids[0])])
    first, second = token_texts(tokenizer, ids[:2])
    assert found == [
        {"text": first, "depth": 1},
        {"text": second, "depth": 0, "refused": tokenizer.decode(ids[:1])},
    ]


@pytest.mark.parametrize("text", ["plain words, twice two", "naïve 日本語 🙂🙂 x", "🙂", ""])
def test_texts_of_byte_level_tokens_are_the_text(tmp_path, text):
    tokenizer = AutoTokenizer.from_pretrained(make_tiny_hf(tmp_path / "model", "qwen3", with_tokenizer=True))
    ids = tokenizer.encode(text)
    texts = token_texts(tokenizer, ids)
    assert len(texts) == len(ids)
    assert "".join(texts) == text


def test_bytes_that_are_no_character_do_not_swallow_what_follows(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(make_tiny_hf(tmp_path / "model", "qwen3", with_tokenizer=True))
    smile = tokenizer.encode("🙂")
    assert len(smile) > 1  # it is written in bytes
    texts = token_texts(tokenizer, [smile[0]] * 6 + tokenizer.encode("end"))
    assert "".join(texts).endswith("end")
    assert texts[3]


def test_the_space_before_a_word_is_kept():
    """Decoders like sentencepiece's drop this space at the beginning of a text."""
    model = models.WordLevel({"\u2581one": 0, "\u2581two": 1, "[UNK]": 2}, unk_token="[UNK]")
    backend = Tokenizer(model)
    backend.decoder = decoders.Metaspace()  # type: ignore[attr-defined]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    assert tokenizer.decode([1]) == "two"
    assert token_texts(tokenizer, [0, 1, 0]) == ["one", " two", " one"]
