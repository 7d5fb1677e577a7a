"""Test `speedup` before its first step."""

import shutil

import pytest

from swiftlite.args.commands import SpeedupArgs
from swiftlite.errors import UserError
from swiftlite.speedup.command import run
from tests.data.templates import ALPACA
from tests.messages import mentions
from tests.tiny import make_tiny_hf


@pytest.mark.parametrize(
    ("template", "hint"),
    [
        (None, "chat_template.jinja"),
        (ALPACA, "--dataset --self_prompts_share 0"),  # nothing ends a user turn
    ],
)
def test_a_model_without_a_usable_template_is_refused_first(tmp_path, template, hint):
    model = make_tiny_hf(tmp_path / "tiny", "qwen3", with_tokenizer=True)
    model = shutil.copytree(model, tmp_path / "model")
    (model / "chat_template.jinja").unlink()
    if template:
        (model / "chat_template.jinja").write_text(template)
    with pytest.raises(UserError) as raised:
        run(SpeedupArgs(model=str(model), output_dir=str(tmp_path / "out")))
    assert mentions(raised.value.problem, f"--model {model} chat template")
    assert mentions(raised.value.hint, hint)
    assert not (tmp_path / "out").exists()
