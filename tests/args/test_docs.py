"""Test that help texts come from the strings in the classes."""

import dataclasses

import pytest

from swiftlite.args import data_fields, fields
from swiftlite.args.commands import (
    ConversionArgs,
    DoctorArgs,
    ExportArgs,
    InferArgs,
    QuantizationArgs,
    RegenerateArgs,
    SftArgs,
)
from swiftlite.args.docs import groups, options, title

COMMANDS = [SftArgs, ExportArgs, InferArgs, RegenerateArgs, DoctorArgs]


@pytest.mark.parametrize("args_class", COMMANDS)
def test_every_field_is_documented(args_class):
    found = options(args_class)
    assert list(found) == [field.name for field in dataclasses.fields(args_class)]
    assert [name for name, option in found.items() if not option.doc.endswith(".")] == []
    assert title(args_class).endswith(".")


@pytest.mark.parametrize("args_class", COMMANDS)
def test_every_default_is_what_the_class_gives(args_class):
    assert {name: option.default for name, option in options(args_class).items()} == dataclasses.asdict(args_class())


def test_a_docstring_may_span_lines():
    doc = options(SftArgs)["acceptance_samples"].doc
    assert "\n" not in doc
    assert len(doc) > 120  # more than a line of the source holds


def test_groups_are_the_declaring_classes_in_order():
    first = (fields.ModelArgs, fields.MtpArgs, fields.LoraArgs, data_fields.DataArgs)
    assert [*groups(SftArgs)][:4] == [title(kind) for kind in first]
    assert [option.name for option in groups(SftArgs)[title(fields.ModelArgs)]] == [
        "model",
        "torch_dtype",
        "trust_remote_code",
        "chat_template_kwargs",
    ]
    assert [*groups(ExportArgs)] == [
        title(each)
        for each in (ConversionArgs, QuantizationArgs, data_fields.ImageArgs, fields.ParallelLayout, fields.TimeoutArgs)
    ]


def test_the_same_name_has_each_command_s_own_words():
    assert options(ExportArgs)["model"].doc != options(SftArgs)["model"].doc
    assert options(SftArgs)["seed"].owner == "OptimArgs"
    assert options(InferArgs)["seed"].owner == "GenerationArgs"
