"""Test that engines are imported only when needed, and the errors for engines that are not installed."""

import subprocess
import sys

import pytest

from swiftlite.base.errors import UserError
from swiftlite.engines.engine import EngineConfig, start_engine
from swiftlite.engines.index import ENGINES
from swiftlite.engines.served_model import resolve_served
from tests.messages import mentions
from tests.tiny import make_tiny_hf


@pytest.mark.parametrize("name", sorted(ENGINES))
def test_an_engine_that_is_not_installed_names_the_pip_command(name, tmp_path, monkeypatch):
    directory = make_tiny_hf(tmp_path)
    monkeypatch.delitem(sys.modules, ENGINES[name].adapter.partition(":")[0], raising=False)
    for module in [module for module in sys.modules if module.partition(".")[0] == name]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, name, None)  # Python's own way to say that a module cannot be imported
    monkeypatch.setenv("LLAMA_SERVER", "/missing")
    with pytest.raises(UserError) as error:
        start_engine(name, EngineConfig(resolve_served(directory)))
    assert mentions(str(error.value), name)
    assert "pip install" in error.value.hint


def test_nothing_of_an_engine_or_of_megatron_loads_before_its_name_is_said():
    code = (
        "import sys, swiftlite.engines.engine, swiftlite.serve.infer, swiftlite.engines.transformers.engine\n"
        "loaded = {name.partition('.')[0] for name in sys.modules}\n"
        "sys.exit(' '.join(loaded & {'megatron', 'vllm'}) or None)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
