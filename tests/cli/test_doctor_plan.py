"""`swiftlite doctor --plan` as a user reads it."""

import json

import pytest

from swiftlite import rules
from swiftlite.args.commands import DoctorArgs
from swiftlite.cli import doctor
from swiftlite.errors import OptionError, UserError

QWEN3_8B = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
}


@pytest.fixture
def model(tmp_path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_8B))
    return str(tmp_path)


def plan(capsys, **options) -> tuple[int, list[str]]:
    args = DoctorArgs(plan=True, **options)
    rules.check(args)
    return doctor.run(args), capsys.readouterr().out.splitlines()


def test_one_gpu_is_too_small_and_says_what_fits(model, capsys):
    code, lines = plan(capsys, model=model)
    assert code == 1
    assert lines[1] == "1 GPU = data parallel 1; micro-batches of 1 x 2048 tokens, recompute none, fused kernels"
    assert lines[5].split()[:5] == ["0", "8,190,735,360", "16.38", "32.76", "98.29"]
    assert lines[-2].startswith("does not fit: ")
    assert lines[-1].strip() == (
        "fits with 55.0 GB, on 4 GPUs: "
        "--tensor_model_parallel_size 2 --sequence_parallel true --use_distributed_optimizer true"
    )


def test_the_suggestion_fits_when_it_is_typed(model, capsys):
    _, lines = plan(capsys, model=model)
    code, lines = plan(
        capsys,
        model=model,
        num_gpus=4,
        tensor_model_parallel_size=2,
        sequence_parallel=True,
        use_distributed_optimizer=True,
    )
    assert code == 0
    assert lines[-1].startswith("fits: 55.0 GB on stage 0, of 73.6 GB; 8% of 80 GB is left")


def test_a_line_for_every_stage(model, capsys):
    code, lines = plan(
        capsys,
        model=model,
        tensor_model_parallel_size=4,
        pipeline_model_parallel_size=3,
        pipeline_model_parallel_layout="Et*12|t*12|t*12mL",
        mtp_num_layers=1,
    )
    assert code == 0
    assert lines[1].startswith("12 GPUs = tensor parallel 4 x pipeline parallel 3 x data parallel 1; ")
    assert lines[1].endswith("MTP depth 1 (joint)")
    stages = [line.split() for line in lines[5:8]]
    assert [stage[0] for stage in stages] == ["0", "1", "2"]
    assert [" ".join(stage[9 if "(x" in line else 8 :]) for stage, line in zip(stages, lines[5:8], strict=True)] == [
        "E t*12",
        "t*12",
        "t*12 m L",
    ]
    assert "(x3)" in lines[5]
    assert "(x2)" in lines[6]


def problems(**options) -> str:
    with pytest.raises(OptionError) as error:
        rules.check(DoctorArgs(**options))
    return str(error.value)


def test_heads_alone(model, capsys):
    code, lines = plan(capsys, model=model, mtp_num_layers=1, mtp_mode="heads_only", draft_vocab=32768)
    assert code == 0
    assert lines[1].endswith("MTP depth 1 (heads_only) drafting 32768 tokens")
    # 4,096 channels of 2 bytes. Per token a trunk of 6.9e9 parameters forward, and the heads' part three times: a layer
    # and a projection, 2.3e8, and twice 32,768 words, 1.3e8.
    assert lines[-1] == (
        "--cache_trunk_states: 8.19 GB on disk for a million tokens; an epoch that reads them computes 11% of one that "
        "does not"
    )
    with pytest.raises(OptionError, match=r"--draft_vocab 32768, .* a trunk that stays"):
        plan(capsys, model=model, mtp_num_layers=1, draft_vocab=32768)
    with pytest.raises(OptionError, match="the model's whole vocabulary is 151936"):
        plan(capsys, model=model, mtp_num_layers=1, mtp_mode="heads_only", draft_vocab=151936)


def test_what_cannot_be_planned(model, tmp_path):
    assert "--plan needs a model" in problems(plan=True)
    (tmp_path / "empty").mkdir()
    assert "has no config.json" in problems(plan=True, model=str(tmp_path / "empty"))
    assert "does not divide the model's num_attention_heads, 32" in problems(
        plan=True, model=model, tensor_model_parallel_size=3
    )
    assert "--num_gpus 3: --tensor_model_parallel_size 2 does not divide the number of processes, 3" in problems(
        plan=True, model=model, num_gpus=3, tensor_model_parallel_size=2
    )
    assert "--num_gpus 0 must be at least 1" in problems(plan=True, model=model, num_gpus=0)


def test_options_of_a_plan_without_one():
    assert "--num_gpus 8 without a plan\n      add --plan" in problems(num_gpus=8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": None}, "lacks a size, so its memory is not known"),
        ({"num_hidden_layers": "four"}, r"config\.json: num_hidden_layers 'four' is not a whole number from 1 to 1000"),
    ],
)
def test_a_size_that_cannot_be_counted_with(tmp_path, capsys, change, message):
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_8B | change))
    with pytest.raises(UserError, match=message):
        plan(capsys, model=str(tmp_path))


def test_an_unknown_model_type(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_8B | {"model_type": "gpt2"}))
    with pytest.raises(UserError, match="gpt2"):
        doctor.run(DoctorArgs(plan=True, model=str(tmp_path)))


def test_layouts_by_their_estimated_speed(model, capsys):
    options = {"num_gpus": 8, "max_length": 4096, "global_batch_size": 64}
    code, lines = plan(capsys, model=model, gpu_type="H100", **options)
    assert code == 0
    assert lines[1].startswith("ESTIMATED, not measured: steps of 64 rows of 4096 tokens on 8 x H100; ")
    assert lines[3].split()[:3] == ["tokens/s", "MFU", "GB"]
    shown = lines[4 : lines.index("", 4)]
    speeds = [int(line.split()[0].replace(",", "")) for line in shown]
    assert speeds == sorted(speeds, reverse=True)
    assert len(speeds) == 6
    start = lines.index("of each 100 seconds, in the same order") + 2
    for line in lines[start : start + 6]:
        assert sum(float(share.rstrip("%")) for share in line.split()) == pytest.approx(100, abs=0.5)  # rounded
    whole = float(next(line for line in lines if line.startswith("the first: 262144 tokens in ")).split()[-2])
    parts = lines[lines.index(next(line for line in lines if line.startswith("the first: "))) + 1 : -2]
    seconds = [float(line.split(" s ")[0].split()[-1]) for line in parts]
    assert sum(seconds) == pytest.approx(whole, abs=0.01)
    assert speeds[0] == pytest.approx(262144 / whole, rel=0.001)
    assert lines[-1].endswith(
        "--max_length 4096 --tensor_model_parallel_size 2 --sequence_parallel true --global_batch_size 64"
    )


def test_the_flags_of_the_fastest_need_the_memory_that_is_shown(model, capsys):
    _, lines = plan(capsys, model=model, gpu_type="H100", num_gpus=8, max_length=8192, tuner_type="lora")
    words = lines[-1].split(" ... ")[1].split()
    flags = dict(zip(words[::2], words[1::2], strict=True))
    assert flags["--tuner_type"] == "lora"
    typed = {name.removeprefix("--"): int(value) for name, value in flags.items() if value.isdigit()}
    del typed["global_batch_size"]
    is_shared = flags.get("--sequence_parallel") == "true"
    options = {"sequence_parallel": is_shared, "recompute_granularity": flags.get("--recompute_granularity", "none")}
    _, alone = plan(capsys, model=model, num_gpus=8, tuner_type="lora", **typed, **options)
    memory = next(line for line in alone if line.startswith("fits: ")).split()[1]
    assert memory == lines[4].split()[2]


def test_no_layout_fits_and_says_how_many_gpus_do(model, capsys):
    code, lines = plan(capsys, model=model, gpu_type="H100", num_gpus=1)
    assert code == 1
    assert lines == [
        "does not fit: no layout of 1 x H100 needs less than 73.6 GB of each",
        "    one of 4 does: --num_gpus 4 --global_batch_size 64",
    ]
    code, lines = plan(capsys, model=model, gpu_type="H100", num_gpus=1, gpu_memory_gb=0.1)
    assert lines[1].startswith("    nor of up to 128 times as many; lower --max_length")
    with pytest.raises(UserError, match="no layout of 7 x H100 divides --global_batch_size 3 evenly"):
        plan(capsys, model=model, gpu_type="H100", num_gpus=7, global_batch_size=3)


FP8 = {"transformer_impl": "transformer_engine", "fp8_format": "hybrid"}
FP4 = {"transformer_impl": "transformer_engine", "fp4_format": "e2m1"}


def test_memory_in_low_precision(model, capsys):
    """34 of 36 layers have 192,937,984 weights in linear layers each; blocks of 128 x 128 have a scale of 4 bytes."""
    code, lines = plan(capsys, model=model, gpu_memory_gb=200, **FP8)
    assert code == 0
    assert ", Transformer Engine, FP8 hybrid, blockwise" in lines[1]
    weights = 34 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 12288)
    copies = weights * (2 + 8 / 128**2) / 1e9
    assert lines[6] == f"  weights: with {copies:.2f} GB of copies in low precision"
    assert float(lines[5].split()[2]) == pytest.approx(2 * 8.190735360 + copies, abs=0.01)
    _, plain = plan(capsys, model=model, gpu_memory_gb=200, transformer_impl="transformer_engine")
    # What qkv, fc1 and fc2 take in is a byte and a 32nd of a number instead of two: 2 x 4,096 and 12,288 numbers.
    saved = 34 * 2048 * (2 * 4096 + 12288) * (2 - 1 - 1 / 32) / 1e9
    assert float(plain[5].split()[5]) - float(lines[5].split()[5]) == pytest.approx(saved, abs=0.011)


def test_layouts_in_low_precision(model, capsys):
    options = {"num_gpus": 8, "max_length": 4096, "global_batch_size": 64, "gpu_type": "B200"}
    speeds = []
    for low in ({}, FP8 | {"fp8_recipe": "mxfp8"}, FP4):
        code, lines = plan(capsys, model=model, **options, **low)
        assert code == 0
        speeds.append(int(lines[4].split()[0].replace(",", "")))
    assert 1.2 * speeds[0] < speeds[1] < speeds[2]
    assert "62% of 2250 TFLOP/s, 9000 in FP4, in tiles" in "\n".join(lines)
    assert "--transformer_impl transformer_engine --fp4_format e2m1" in lines[-1]


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (FP8 | {"gpu_type": "A100"}, "from compute capability 9.0 on, A100 has 8.0"),
        (FP8 | {"gpu_type": "H100", "fp8_recipe": "mxfp8"}, "from compute capability 10.0 on, H100 has 9.0"),
        (FP4 | {"gpu_type": "H200"}, "--fp4_format e2m1: Transformer Engine has it from compute capability 10.0 on"),
        ({"fp8_format": "hybrid"}, "but --transformer_impl is local"),
        (FP8 | FP4, "--fp4_format e2m1 with --fp8_format hybrid"),
        (FP8 | {"torch_dtype": "float32"}, "--fp8_format hybrid with --torch_dtype float32"),
        (FP8 | {"num_layers_at_start_in_bf16": 36}, "of 36 decoder layers the first 36 and last 1 stay in bfloat16"),
    ],
)
def test_what_low_precision_cannot_be_planned(model, options, problem):
    assert problem in problems(plan=True, model=model, num_gpus=8, **options)


def test_what_has_no_speed(model):
    given = {"plan": True, "model": model}
    unknown = problems(**given, num_gpus=8, gpu_type="H10")
    assert "--gpu_type H10 is none that is known here" in unknown
    assert "use one of A100, " in unknown
    assert "add --num_gpus 8" in problems(**given, gpu_type="H100")
    assert "add --gpu_type H100" in problems(**given, global_batch_size=64)
    assert "for megatron sft alone" in problems(**given, num_gpus=8, gpu_type="H100", loss_type="sigmoid")
    assert "estimated for bfloat16" in problems(**given, num_gpus=8, gpu_type="H100", torch_dtype="float32")
    assert "--gpu_type H100 without a plan" in problems(model=model, gpu_type="H100")


def total_of(lines: list[str]) -> float:
    """GB of the only stage."""
    return float(lines[5].split()[7])


def test_heads_alone_are_planned_as_they_are_trained(model, capsys):
    """At least one, as sft makes one where the checkpoint has none; and each draft keeps what a layer keeps."""
    options = {"model": model, "mtp_mode": "heads_only", "max_length": 8192, "num_gpus": 1}
    _, one = plan(capsys, **options)
    assert one[1].endswith("MTP depth 1 (heads_only)")
    _, stated = plan(capsys, **options, mtp_num_layers=1)
    assert stated == one
    _, three = plan(capsys, **options, mtp_unroll=3)
    assert three[5].split()[:5] == one[5].split()[:5]  # parameters, their gradients and moments are those of one layer
    activations = [float(lines[5].split()[5]) for lines in (one, three)]
    assert activations[1] == pytest.approx(3 * activations[0], rel=0.05)
    assert total_of(three) > total_of(one)


@pytest.mark.parametrize(
    ("options", "flag"),
    [
        ({"mtp_mode": "heads_only", "mtp_num_layers": 0}, "--mtp_mode heads_only"),
        ({"mtp_unroll": 3}, "--mtp_unroll 3"),
        ({"mtp_unroll": 3, "mtp_num_layers": 2}, "--mtp_unroll 3"),
    ],
)
def test_heads_that_sft_would_refuse_are_not_planned(model, options, flag):
    assert flag in problems(plan=True, model=model, **options)
