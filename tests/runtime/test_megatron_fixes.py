"""Every mended part of megatron-core is broken without its fix."""

import pytest
import torch
from megatron.core.transformer.moe import moe_utils

from swiftlite.runtime import megatron_fixes


def route() -> torch.Tensor:
    return moe_utils.router_gating_linear(torch.ones(3, 2), torch.ones(4, 2), None, torch.float32)


@pytest.mark.skipif(moe_utils.HAVE_TE, reason="Transformer Engine brings the function")
def test_te_general_gemm(monkeypatch):
    monkeypatch.delattr(moe_utils, "te_general_gemm", raising=False)
    with pytest.raises(NameError, match="te_general_gemm"):
        route()
    megatron_fixes.install()
    assert torch.equal(route(), torch.full((3, 4), 2.0))
    megatron_fixes.install()
    assert moe_utils.te_general_gemm is None
