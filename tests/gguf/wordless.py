"""Write tokenizers of models whose tokens are only compared as numbers."""

import json
from pathlib import Path


def write_tokenizer(directory: Path, vocab_size: int, end: int | None = None) -> None:
    """Write the files of a tokenizer without meaning, which a GGUF file can contain.

    Args:
        end: token that ends an answer; by default, no token does.
    """
    content = {
        "added_tokens": [],
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True},
        "model": {
            "type": "BPE",
            "vocab": {f"w{number}": number for number in range(vocab_size)},
            "merges": [["w1", "w2"]],
        },
    }
    (directory / "tokenizer.json").write_text(json.dumps(content))
    config = {} if end is None else {"bos_token": f"w{end}", "eos_token": f"w{end}"}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
