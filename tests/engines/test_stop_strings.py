"""Test that an answer ends at the token that completes a text."""

import random

from swiftlite.engines.stop_strings import stop_strings
from tests.tiny import CORPUS, make_tiny_tokenizer

TEXT = CORPUS[1] + " über 漢字 🦊."


def test_an_answer_ends_where_its_text_first_contains_one_of_the_texts():
    """A text can begin and end within a token, and a character can have several tokens."""
    tokenizer = make_tiny_tokenizer()
    ids: list[int] = tokenizer.encode(TEXT)
    texts = [str(tokenizer.decode(ids[: end + 1])) for end in range(len(ids))]
    numbers, found = random.Random(0), set()
    for _ in range(200):
        begin = numbers.randrange(len(TEXT))
        strings = (TEXT[begin : begin + numbers.randint(1, 9)], "absent")
        first = next(end for end, text in enumerate(texts, start=1) if any(each in text for each in strings))
        stops = stop_strings(strings, tokenizer)
        assert stops is not None
        assert stops.end(ids) == stops.end(ids, first - 1) == first
        assert stops.end(ids[: first - 1]) is None
        found.add(first)
    assert len(found) > 20
    assert stop_strings((), tokenizer) is None
