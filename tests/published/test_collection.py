"""Test the list of accepted and refused models of a collection."""

import json

from swiftlite.bridge.hf_config import MODELOPT_FILE
from tests.messages import has_line
from tests.published import library
from tests.published.collection import report

FORMAT = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "W4A8", "exclude_modules": ["lm_head"]}}


def test_refused_models_are_named_with_the_reason(tmp_path, capsys):
    configs = {
        "ORG--Accepted": library.content("Qwen3-0.6B"),
        "ORG--Unknown": {"model_type": "unknown"},
        "ORG--Quantized": library.content("Qwen3-0.6B"),
    }
    for name, content in configs.items():
        (tmp_path / f"{name}_config.json").write_text(json.dumps(content))
    (tmp_path / f"ORG--Quantized_{MODELOPT_FILE}").write_text(json.dumps(FORMAT))
    assert report(tmp_path) == (1, 2)
    printed = capsys.readouterr().out
    assert has_line(printed, "accepted ORG--Accepted")
    assert has_line(printed, "refused ORG--Unknown model_type 'unknown'")
    assert has_line(printed, "refused ORG--Quantized W4A8")
