"""Test what is read of the machine."""

import pytest

from swiftlite.engines.index import ENGINES
from swiftlite.runtime.environment import has_bfloat16_instructions


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("model name\t: Xeon\nflags\t\t: fpu avx512f avx512bw\n", False),
        ("flags\t\t: fpu avx512f avx512_bf16\n", True),
        ("flags\t\t: fpu amx_bf16 amx_tile\n", True),
        ("Features\t: fp asimd bf16\n", True),
        ("Features\t: fp asimd\n", False),
        ("processor\t: 0\n", True),
    ],
)
def test_instructions_for_bfloat16(tmp_path, content, expected):
    path = tmp_path / "cpuinfo"
    path.write_text(content)
    assert has_bfloat16_instructions(path) is expected
    assert has_bfloat16_instructions(tmp_path / "none")


def test_the_dtype_of_vllm_follows_the_processor(monkeypatch):
    monkeypatch.setattr("swiftlite.engines.info.sees_gpu", lambda: False)
    for has_them, expected in ((True, "bfloat16"), (False, "float32")):
        monkeypatch.setattr("swiftlite.engines.info.has_bfloat16_instructions", lambda has_them=has_them: has_them)
        assert ENGINES["vllm"].fastest_dtype == expected
        assert ENGINES["llamacpp"].fastest_dtype == "bfloat16"
    monkeypatch.setattr("swiftlite.engines.info.sees_gpu", lambda: True)
    assert ENGINES["vllm"].fastest_dtype == "bfloat16"
