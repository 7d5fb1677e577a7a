"""Test resolving a model's name to its directory, config.json and family."""

import subprocess
import sys

import pytest

from swiftlite.args.commands import DpoArgs
from swiftlite.base.errors import UserError
from swiftlite.bridge.hf_config import read_config
from swiftlite.families import FAMILIES
from swiftlite.families.resolved import resolve, resolve_options
from tests.messages import naming
from tests.tiny import make_tiny_hf


def test_a_directory(tmp_path):
    directory = make_tiny_hf(tmp_path, "qwen3", depth=1)
    model = resolve(directory)
    assert (model.name, model.directory, model.config) == (str(directory), directory, read_config(directory))
    assert (model.family, model.heads.layers, model.identity) == (FAMILIES["qwen3"], 1, "")


def test_every_model_of_the_options(tmp_path):
    model, reference = (make_tiny_hf(tmp_path / name, "qwen3") for name in ("model", "reference"))
    found = resolve_options(DpoArgs(model=str(model), ref_model=str(reference)))
    assert {option: found[option].directory for option in found} == {"model": model, "ref_model": reference}


def test_there_is_no_config_json(tmp_path):
    with pytest.raises(UserError, match=naming(f"{tmp_path} config.json")):
        resolve(tmp_path)


def test_torch_is_not_loaded(tmp_path):
    directory = make_tiny_hf(tmp_path, "qwen3")
    code = "import sys, swiftlite.families.resolved as m; m.resolve(sys.argv[1]); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code, str(directory)], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
