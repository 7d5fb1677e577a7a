"""Parse the value of `--sft_mock_dataset_config_json` without reading files.

    {"mode": "file", "path": "lengths.csv"}
    {"mode": "distribution", "type": "lognormal", "min_seq_len": 1024, "max_seq_len": 8192, "mean_seq_len": 4096,
     "lognormal_sigma": 1.1}

`data/rows/mock.py` explains the keys.
"""

import json
import math
from typing import Any

from swiftlite.base.errors import UserError

FLAG = "--sft_mock_dataset_config_json"
KEYS = {
    "file": {"mode", "path"},
    "distribution": {"mode", "type", "min_seq_len", "max_seq_len", "mean_seq_len", "lognormal_sigma"},
}
EXAMPLES = {
    "file": """'{"mode": "file", "path": "lengths.csv"}'""",
    "distribution": """'{"mode": "distribution", "type": "lognormal", "min_seq_len": 1024, "max_seq_len": 8192, """
    """"mean_seq_len": 4096, "lognormal_sigma": 1.1}'""",
}


def check_mock_config(config: dict[str, Any]) -> None:
    """Check a value of the option.

    Raises:
        UserError: a key is invalid; the error names it.
    """
    mode = config.get("mode")
    if mode not in ("file", "distribution"):
        problem = f'{FLAG}: "mode" must be "file" or "distribution", not {json.dumps(mode)}'
        raise UserError(problem, f"for example {FLAG} {EXAMPLES['file']}")
    if unknown := sorted(config.keys() - KEYS[mode]):
        raise UserError(f'{FLAG}: unknown key "{unknown[0]}" for mode {mode}', f"for example {EXAMPLES[mode]}")
    if missing := sorted(KEYS[mode] - config.keys()):
        raise UserError(f'{FLAG}: mode {mode} requires the key "{missing[0]}"', f"for example {EXAMPLES[mode]}")
    if mode == "file":
        if not isinstance(config["path"], str):
            raise _wrong(config, "path", "expected text")
        return
    if config["type"] != "lognormal":
        raise _wrong(config, "type", 'expected "lognormal"')
    for key in ("min_seq_len", "max_seq_len"):
        if type(config[key]) is not int or config[key] < 1:
            raise _wrong(config, key, "expected an integer of at least 1")
    for key in ("mean_seq_len", "lognormal_sigma"):
        value = config[key]
        if type(value) not in (int, float) or not math.isfinite(value) or value < 0:
            raise _wrong(config, key, "expected a number of at least 0")
    if config["lognormal_sigma"] > 10:  # two thirds of the lengths would span a factor of e^20
        raise _wrong(config, "lognormal_sigma", "must be at most 10")
    low = config["min_seq_len"]
    mean = config["mean_seq_len"]
    high = config["max_seq_len"]
    if low > high:
        raise _wrong(config, "min_seq_len", f"must be at most max_seq_len, {high}")
    if not low <= mean <= high:
        raise _wrong(config, "mean_seq_len", f"must be from min_seq_len to max_seq_len, {low} to {high}")


def _wrong(config: dict[str, Any], key: str, problem: str) -> UserError:
    return UserError(
        f'{FLAG}: invalid value for "{key}": {json.dumps(config[key])}: {problem}',
        f"for example {EXAMPLES[config['mode']]}",
    )
