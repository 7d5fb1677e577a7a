"""Test that the program of the page python.md runs as shown, and that its logits equal those of transformers."""

import contextlib
import io
import json
import os
import re
from pathlib import Path

from tests.forked import Host
from tests.tiny import make_tiny_hf

ROOT = Path(__file__).resolve().parents[2]
COMPARISON = """
from transformers import AutoModelForCausalLM

expected = AutoModelForCausalLM.from_pretrained("HF", dtype=torch.float32)(input_ids).logits
torch.testing.assert_close(logits.main, expected, rtol=0, atol=1e-5)  # sums in another order
assert len(logits.mtp) == 1
assert exit_code == 0
assert len(losses) == 2
assert counts.drafted > 0
"""


def test_the_program_runs(tmp_path):
    page = (ROOT / "docs/en/python.md").read_text()  # the Chinese page has the same code, see test_docs.py
    blocks = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    assert len(blocks) == 5
    model = make_tiny_hf(tmp_path / "model", "qwen3", with_tokenizer=True)
    messages = [{"role": "user", "content": "one plus one?"}, {"role": "assistant", "content": "two, of course"}]
    (tmp_path / "train.jsonl").write_text((json.dumps({"messages": messages}) + "\n") * 24)
    names = f"MODEL, DATASET = {str(model)!r}, 'train.jsonl'\n"
    program = names + "".join(blocks) + COMPARISON
    host = Host([], {})
    printed = host.call(run_program, program, tmp_path)
    host.close()
    assert re.search(r"\d+ of \d+ drafts accepted", printed)


def run_program(program: str, directory: Path) -> str:
    """Run a program in a directory, and return its output."""
    os.chdir(directory)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(program, {"__name__": "__main__"})
    return printed.getvalue()
