"""Test every published configuration: logits against transformers, conversion to Megatron and back, and doctor."""

from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from swiftlite.args.commands import DoctorArgs, ExportArgs
from swiftlite.base.heads import Heads
from swiftlite.bridge.hf_config import read_config
from swiftlite.cli import doctor
from swiftlite.export.run import convert
from swiftlite.families import index
from swiftlite.model.inputs import ModelInputs
from tests.messages import has_line
from tests.model.test_logits import load_megatron, reference_mtp
from tests.published import library
from tests.tiers import some_of
from tests.tiny import DSA, HYBRID, WITH_OWN_OUTPUT, logits_of, mtp_names, output_name

LENGTH = 20
SPARSE_LENGTH = 40  # more tokens than the indexers of these configurations select
PLAIN = tuple("exaone4 gemma3_text granite mistral olmo2 olmo3 phi3 qwen2 qwen2_moe seed_oss smollm3".split())
"""Families whose files have neither heads nor tensors of several dtypes, like those of Llama. tests/bridge and
tests/parallel/test_bridge.py convert tiny models of every family."""


@pytest.fixture
def published(shared):
    """Return published(model), which returns the model's directory. It must not be changed."""
    return lambda model: shared(f"published-{model}", lambda directory: library.build(directory, model))


def assert_close(ours: torch.Tensor, theirs: torch.Tensor, family: str) -> None:
    """Check that logits are equal up to the order of sums, which differs for fused q, k and v and for experts.

    The largest measured differences are 6 roundings of the largest logit, and 41 after linear attention
    (tests/model/test_logits.py). A token with another expert would differ by 1e5 roundings.
    """
    rounding = torch.finfo(torch.float32).eps * theirs.abs().max().item()
    torch.testing.assert_close(ours, theirs, rtol=0, atol=(64 if family in HYBRID else 16) * rounding)


@pytest.mark.parametrize("model", some_of(library.MODELS, *library.CHOSEN))
def test_logits_of_trunk_and_heads_are_those_of_transformers(published, mesh, model):
    directory, family = published(model), library.family(model)
    drafting = index.FAMILIES[family].mtp.drafting
    generator = torch.Generator().manual_seed(1)
    length = SPARSE_LENGTH if family in DSA else LENGTH
    ids = torch.randint(331, (2, length), generator=generator)
    positions = torch.arange(length).expand(2, length)
    with torch.no_grad():
        ours = load_megatron(directory, mesh, torch.float32, drafting=drafting)(ModelInputs(ids, positions))
        hf = library.transformers_model(directory)
        before: list[torch.Tensor] = []
        decoder: Any = getattr(hf.model, "language_model", hf.model)
        norm: Any = decoder.norm_f if family == "nemotron_h" else decoder.norm
        norm.register_forward_pre_hook(lambda _, args: before.append(args[0]))
        states = hf.model(ids).last_hidden_state
        assert_close(ours.main, logits_of(hf, states), family)
        assert len(ours.mtp) == library.is_published_with_heads(model)
        if ours.mtp:
            tensors = {name: tensor.float() for name, tensor in library.numbers(directory).items()}
            fed = before[0] if drafting.takes_before_norm else states
            _, head = reference_mtp(hf, tensors, family, 0, fed, ids, positions, drafting)
            theirs = logits_of(hf, head)
            if family in WITH_OWN_OUTPUT:
                _, block = mtp_names(family, 0, hf.config.num_hidden_layers)
                theirs = head @ tensors[output_name(block)].T
            assert_close(ours.mtp[0][:, :-1], theirs[:, :-1], family)  # the last has no token to see


@pytest.mark.parametrize(
    "model", some_of(library.MODELS, *(model for model in library.CHOSEN if library.family(model) not in PLAIN))
)
def test_there_and_back_changes_no_number(published, mesh, tmp_path, model):
    """FP8 tensors are exported in bfloat16, rounded to the nearest; config.json declares this dtype and the number of
    heads.
    """
    directory = published(model)
    run, out = tmp_path / "run", tmp_path / "out"
    convert(ExportArgs(model=str(directory), output_dir=str(run), to_mcore=True), mesh)
    convert(ExportArgs(model=str(run), output_dir=str(out), to_hf=True), mesh)
    found, expected = load_file(out / "model.safetensors"), library.numbers(directory)
    assert found.keys() == expected.keys()
    stored = load_file(directory / "model.safetensors")
    for name, tensor in expected.items():
        written = tensor.bfloat16() if f"{name}_scale_inv" in stored else tensor
        assert found[name].dtype is written.dtype, name
        assert torch.equal(found[name], written), name
    assert Heads.from_config(read_config(out)).layers == library.is_published_with_heads(model)


def test_settings_of_every_model_are_supported(tmp_path):
    for model in library.MODELS:
        (tmp_path / "config.json").write_bytes(library.CONFIGS[model].read_bytes())
        assert index.get(read_config(tmp_path)).name == library.family(model)


@pytest.mark.parametrize(
    "model", some_of(library.MODELS, *(model for model in library.CHOSEN if library.is_published_with_heads(model)))
)
def test_doctor_finds_it_whole(published, capsys, model):
    assert doctor.run(DoctorArgs(model=str(published(model)))) == 0
    depth = int(library.is_published_with_heads(model))
    assert has_line(capsys.readouterr().out, f"MTP config.json {depth} {depth}")
