"""Samples that mean nothing, of given lengths, for benchmarks: `--sft_mock_dataset_config_json`.

    {"mode": "file", "path": "lengths.csv"}
    {"mode": "distribution", "type": "lognormal", "min_seq_len": 1024, "max_seq_len": 8192, "mean_seq_len": 4096,
     "lognormal_sigma": 1.1}

As in Megatron-LM, `mean_seq_len` is the mean before lengths are cut to [min, max]; the mean of what comes is another.
Unlike there, a file's first line counts if it is a number, and an end-of-document token does not come on top.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from swiftlite.data.sample import Sample, make_sample
from swiftlite.errors import UserError

FLAG = "--sft_mock_dataset_config_json"
NUM_SAMPLES = 100_000
"""Of a distribution, as in Megatron-LM; a file has as many as it has lines."""
KEYS = {
    "file": {"mode", "path"},
    "distribution": {"mode", "type", "min_seq_len", "max_seq_len", "mean_seq_len", "lognormal_sigma"},
}
EXAMPLES = {
    "file": """'{"mode": "file", "path": "lengths.csv"}'""",
    "distribution": """'{"mode": "distribution", "type": "lognormal", "min_seq_len": 1024, "max_seq_len": 8192, """
    """"mean_seq_len": 4096, "lognormal_sigma": 1.1}'""",
}


@dataclass(frozen=True)
class MockSamples(Sequence[Sample]):
    """Samples made when they are asked for; number `i` depends on seed, `i` and its length alone.

    Attributes:
        lengths: int64 `[num_samples]`.
        vocab_size: tokens are drawn from all of it. Every one trains but the first.
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
        # RandomState, because numpy promises its stream for good and Generator's only within a version.
        ids = np.random.RandomState([self.seed, index]).randint(self.vocab_size, size=length, dtype=np.int32)
        return make_sample(ids, np.ones(length), source=f"mock:{index}")


def mock_samples(config_json: str, vocab_size: int, *, seed: int = 42, num_samples: int = NUM_SAMPLES) -> MockSamples:
    """The samples that a value of the option describes.

    Args:
        num_samples: of a distribution.

    Raises:
        UserError: see `mock_lengths`.
    """
    return MockSamples(mock_lengths(config_json, seed=seed, num_samples=num_samples), vocab_size, seed)


def mock_lengths(config_json: str, *, seed: int = 42, num_samples: int = NUM_SAMPLES) -> np.ndarray:
    """Lengths that a value of the option describes, int64.

    Raises:
        UserError: names the key that cannot be, or the file and line.
    """
    config = check_mock_config(config_json)
    if config["mode"] == "file":
        return _read_lengths(Path(config["path"]))
    sigma, mean = config["lognormal_sigma"], config["mean_seq_len"]
    drawn = np.random.RandomState(seed).lognormal(math.log(mean) - sigma**2 / 2, sigma, num_samples)
    return np.clip(drawn, config["min_seq_len"], config["max_seq_len"]).astype(np.int64)


def check_mock_config(config_json: str) -> dict[str, Any]:
    """The option's value, read.

    Raises:
        UserError: naming the key that cannot be.
    """
    try:
        config = json.loads(config_json)
    except json.JSONDecodeError as error:
        raise UserError(f"{FLAG}: column {error.colno}: not JSON: {error.msg}", EXAMPLES["distribution"]) from None
    if not isinstance(config, dict):
        raise UserError(f"{FLAG} is not an object", EXAMPLES["distribution"])
    mode = config.get("mode")
    if mode not in ("file", "distribution"):
        raise UserError(f'{FLAG}: "mode" is {json.dumps(mode)}, not "file" or "distribution"', EXAMPLES["file"])
    if unknown := sorted(config.keys() - KEYS[mode]):
        raise UserError(f'{FLAG}: "{unknown[0]}" is no key of mode {mode}', EXAMPLES[mode])
    if missing := sorted(KEYS[mode] - config.keys()):
        raise UserError(f'{FLAG}: mode {mode} needs "{missing[0]}"', EXAMPLES[mode])
    if mode == "file":
        if not isinstance(config["path"], str):
            raise _wrong(config, "path", "is not text")
        return config
    if config["type"] != "lognormal":
        raise _wrong(config, "type", 'is not known; known is "lognormal"')
    for key in ("min_seq_len", "max_seq_len"):
        if type(config[key]) is not int or config[key] < 1:
            raise _wrong(config, key, "is not a whole number of at least 1")
    for key in ("mean_seq_len", "lognormal_sigma"):
        value = config[key]
        if type(value) not in (int, float) or not math.isfinite(value) or value < 0:
            raise _wrong(config, key, "is not a number of at least 0")
    low, mean, high = config["min_seq_len"], config["mean_seq_len"], config["max_seq_len"]
    if low > high:
        raise _wrong(config, "min_seq_len", f"is over max_seq_len, {high}")
    if not low <= mean <= high:
        raise _wrong(config, "mean_seq_len", f"is not from min_seq_len to max_seq_len, {low} to {high}")
    return config


def _wrong(config: dict[str, Any], key: str, problem: str) -> UserError:
    return UserError(f'{FLAG}: "{key}": {json.dumps(config[key])} {problem}', EXAMPLES[config["mode"]])


def _read_lengths(path: Path) -> np.ndarray:
    """One length on each line; a first line that is no number is a header."""
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise UserError(f"{FLAG}: {path}: {reason}", "one length on each line, as 1024") from None
    lengths = []
    for number, line in enumerate(lines, start=1):
        text = line.strip()
        if not text or (number == 1 and not any(character.isdecimal() for character in text)):
            continue
        if not text.isascii() or not text.isdecimal() or int(text) < 1:
            raise UserError(f"{path}:{number}: {text!r} is no length", "one whole number of at least 1 on each line")
        lengths.append(int(text))
    if not lengths:
        raise UserError(f"{path} holds no lengths", "one length on each line, as 1024")
    return np.array(lengths, np.int64)
