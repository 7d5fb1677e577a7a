"""Random samples of given lengths, for benchmarks: `--sft_mock_dataset_config_json`.

    {"mode": "file", "path": "lengths.csv"}
    {"mode": "distribution", "type": "lognormal", "min_seq_len": 1024, "max_seq_len": 8192, "mean_seq_len": 4096,
     "lognormal_sigma": 1.1}

As in Megatron-LM, `mean_seq_len` is the mean before lengths are clipped to [min, max]. Unlike in Megatron-LM, the first
line of a file is used if it is a number, and no end-of-document token is added.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from swiftlite.args.mock_config import FLAG, check_mock_config
from swiftlite.base.errors import UserError
from swiftlite.data.sample import Sample, make_sample

NUM_SAMPLES = 100_000
"""Number of samples in the mode "distribution", as in Megatron-LM. In the mode "file" there is one sample per line."""


@dataclass(frozen=True)
class MockSamples(Sequence[Sample]):
    """Samples that are created when they are read; sample `i` depends only on the seed, `i` and its length.

    Attributes:
        lengths: int64 `[num_samples]`.
        vocab_size: size of the vocabulary, from which tokens are drawn. All tokens except the first are labels.
    """

    lengths: np.ndarray
    vocab_size: int
    seed: int

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Sample:  # pyright: ignore[reportIncompatibleMethodOverride]
        if not 0 <= index < len(self):
            raise IndexError(index)
        length = int(self.lengths[index])
        # RandomState, because numpy guarantees its stream across versions, unlike that of Generator.
        ids = np.random.RandomState([self.seed, index]).randint(self.vocab_size, size=length, dtype=np.int32)
        return make_sample(ids, np.ones(length), source=f"mock:{index}")


def mock_lengths(config: dict[str, Any], *, seed: int = 42, num_samples: int = NUM_SAMPLES) -> np.ndarray:
    """Return the lengths that a value of `--sft_mock_dataset_config_json` describes, int64.

    Raises:
        UserError: a key or a line of the file is invalid.
    """
    check_mock_config(config)
    if config["mode"] == "file":
        return _read_lengths(Path(config["path"]))
    sigma = config["lognormal_sigma"]
    mu = math.log(config["mean_seq_len"]) - sigma**2 / 2
    drawn = np.random.RandomState(seed).lognormal(mu, sigma, num_samples)
    return np.clip(drawn, config["min_seq_len"], config["max_seq_len"]).astype(np.int64)


def _read_lengths(path: Path) -> np.ndarray:
    """Read one length per line, after an optional header."""
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except OSError as error:
        raise UserError(f"{FLAG}: {path}: {error.strerror}", "write one length per line, such as 1024") from None
    except UnicodeDecodeError:
        raise UserError(f"{FLAG}: {path}: not UTF-8", "write one length per line, such as 1024") from None
    lengths = []
    for number, line in enumerate(lines, start=1):
        text = line.strip()
        if not text or (number == 1 and not any(character.isdecimal() for character in text)):
            continue
        if not text.isascii() or not text.isdecimal() or not 0 < int(text) < 2**31:
            raise UserError(f"{path}:{number}: invalid length {text!r}", "write one integer of at least 1 per line")
        lengths.append(int(text))
    if not lengths:
        raise UserError(f"{path} has no lengths", "write one length per line, such as 1024")
    return np.array(lengths, np.int64)
