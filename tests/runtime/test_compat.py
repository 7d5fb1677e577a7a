"""Test the differences between releases of megatron-core on the installed release."""

import logging

import torch

from swiftlite import families
from swiftlite.base.heads import Heads
from swiftlite.bridge.hf_config import read_config
from swiftlite.model.build import build_model
from swiftlite.runtime.compat import MTP_INNER_LAYER
from tests.tiny import make_tiny_hf


def test_a_model_is_built_under_the_names_of_this_release_and_in_silence(tmp_path, mesh, caplog):
    hf_config = read_config(make_tiny_hf(tmp_path, "qwen3", depth=1))
    architecture = families.get(hf_config).architecture(hf_config)
    with caplog.at_level(logging.WARNING):
        (model,) = build_model(architecture, hf_config, mesh=mesh, dtype=torch.float32, heads=Heads(1))
    assert [name for name, _ in model.mtp.layers[0].named_children() if "layernorm" not in name] == [
        *("enorm", "hnorm", "eh_proj"),
        MTP_INNER_LAYER,
    ]
    assert not [record for record in caplog.records if record.name.startswith("megatron")]
