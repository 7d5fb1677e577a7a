"""Test the output of `swiftlite doctor --plan`."""

import json
import re
import shlex
from pathlib import Path

import pytest

from swiftlite import rules
from swiftlite.args.commands import DoctorArgs, DpoArgs, GkdArgs, GrpoArgs, PtArgs, RmArgs, SftArgs
from swiftlite.base.errors import OptionError, UserError
from swiftlite.cli import doctor
from tests.messages import mention_each, mentions, naming
from tests.planned import QWEN3_8B, parsed, plan, planned

VISION = {
    "depth": 24,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_heads": 16,
    "out_hidden_size": 2560,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "in_channels": 3,
    "deepstack_visual_indexes": [5, 11, 17],
    "num_position_embeddings": 2304,
}
ROPE = {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20]}
TOWER = 415_347_712
"""Parameters of the tower."""


@pytest.fixture
def vision_model(tmp_path) -> str:
    """Return a directory with a config.json of the sizes of Qwen3-VL 4B."""
    text = QWEN3_8B | {"hidden_size": 2560, "intermediate_size": 9728, "tie_word_embeddings": True}
    text |= {"model_type": "qwen3_vl_text", "rope_parameters": ROPE}
    config = {"model_type": "qwen3_vl", "image_token_id": 5, "text_config": text, "vision_config": VISION}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return str(tmp_path)


def gigabytes(capsys, **options) -> dict[str, float]:
    """Return the first stage of a plan by column."""
    _, lines = plan(capsys, **options)
    names, first = (re.split(r"\s{2,}", line.strip()) for line in lines[4:6])
    return {name: float(value.split()[0].replace(",", "")) for name, value in zip(names[:-1], first, strict=False)}


IMAGES = {"images_per_row": 2, "max_pixels": 1003520, "max_length": 4096}


def test_a_plan_of_images_counts_the_tower(vision_model, capsys):
    text = gigabytes(capsys, model=vision_model, max_length=4096)
    frozen = gigabytes(capsys, model=vision_model, **IMAGES)
    whole = gigabytes(capsys, model=vision_model, freeze_vit=False, freeze_aligner=False, **IMAGES)
    assert frozen["parameters"] - text["parameters"] == TOWER
    assert whole["parameters"] == frozen["parameters"]
    rounding = pytest.approx
    assert frozen["weights"] - text["weights"] == rounding(2 * TOWER / 1e9, abs=0.01)
    for name in ("gradients", "optimizer", "activations"):
        assert frozen[name] == text[name]
    assert whole["gradients"] - frozen["gradients"] == rounding(4 * TOWER / 1e9, abs=0.01)
    assert whole["optimizer"] - frozen["optimizer"] == rounding(12 * TOWER / 1e9, abs=0.02)
    # 2 images of 980 items of 4 patches: the inputs of 24 blocks, and more.
    assert whole["activations"] - frozen["activations"] > 2 * 980 * 4 * 24 * 1024 * 2 / 1e9


def test_a_frozen_trunk_has_neither_gradients_nor_optimizer(vision_model, capsys):
    part = gigabytes(capsys, model=vision_model, freeze_aligner=False, freeze_llm=True, **IMAGES)
    assert 0 < part["gradients"] < 4 * TOWER / 1e9


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"images_per_row": 1}, "--images_per_row 1 --max_pixels"),
        ({"images_per_row": 3, "max_pixels": 1003520}, "--images_per_row 3 2940 --max_length 2048"),
        ({"images_per_row": 1, "max_pixels": 100}, "--max_pixels 100"),
        ({"images_per_row": 1, "max_pixels": 4096, "freeze_llm": True}, "--freeze_llm --freeze_vit"),
        ({"images_per_row": 1, "max_pixels": 4096, "loss_type": "sigmoid"}, "--images_per_row 1 megatron dpo"),
        (
            {"images_per_row": 1, "max_pixels": 4096, "gpu_type": "H100", "num_gpus": 8},
            "--images_per_row 1 --gpu_type",
        ),
    ],
)
def test_images_that_cannot_be_planned(vision_model, options, problem):
    with pytest.raises(OptionError, match=naming(problem)):
        rules.check(planned(model=vision_model, **options))


@pytest.mark.parametrize("form", [{"size": {"longest_edge": 1003520}}, {"max_pixels": 1003520}])
def test_images_have_the_size_of_the_preprocessor(vision_model, capsys, form):
    given = gigabytes(capsys, model=vision_model, freeze_vit=False, **IMAGES)
    (Path(vision_model) / "preprocessor_config.json").write_text(json.dumps(form))
    found = gigabytes(capsys, model=vision_model, freeze_vit=False, **(IMAGES | {"max_pixels": None}))
    assert found == given
    with pytest.raises(OptionError, match=naming("--images_per_row 2 1003520 1960 --max_length 1024")):
        plan(capsys, model=vision_model, images_per_row=2, max_length=1024)


def test_images_require_a_tower(model):
    with pytest.raises(OptionError, match=naming("--images_per_row 1")):
        rules.check(planned(model=model, images_per_row=1, max_pixels=4096))


@pytest.fixture
def model(tmp_path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_8B))
    return str(tmp_path)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"num_gpus": 8}, "3 8"),
        ({"num_gpus": 8, "use_distributed_optimizer": False}, "3 --use_distributed_optimizer"),
        ({}, "3 --use_distributed_optimizer"),
    ],
)
def test_instances_that_cannot_be_planned(model, options, problem):
    with pytest.raises(OptionError, match=naming(f"--num_distributed_optimizer_instances {problem}")):
        rules.check(planned(model=model, num_distributed_optimizer_instances=3, **options))


def test_moments_on_the_host(model, capsys):
    """8.2e9 parameters, with 8 bytes of moments each; the host also has copies of weights and gradients."""
    _, lines = plan(capsys, model=model, optimizer_cpu_offload=True)
    assert any(mentions(line, "65.53 131.05") for line in lines), lines
    _, lines = plan(capsys, model=model, optimizer_cpu_offload=True, optimizer_offload_fraction=0.5)
    assert any(mentions(line, "32.76 65.53") for line in lines), lines


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"gpu_type": "H100", "num_gpus": 8, "optimizer_cpu_offload": True}, "--gpu_type H100 --optimizer_cpu_offload"),
        ({"optimizer": "adamw_8bit", "optimizer_cpu_offload": True}, "--optimizer_cpu_offload --optimizer adamw_8bit"),
        ({"optimizer_offload_fraction": 0.5}, "--optimizer_offload_fraction 0.5 --optimizer_cpu_offload"),
    ],
)
def test_moments_that_cannot_be_planned_on_the_host(model, options, problem):
    with pytest.raises(OptionError, match=naming(problem)):
        rules.check(planned(model=model, **options))


def test_one_gpu_is_too_small_and_says_what_fits(model, capsys):
    code, lines = plan(capsys, model=model)
    assert code == 1
    assert mentions(lines[1], "1 2048")
    assert lines[5].split()[:5] == ["0", "8,190,735,360", "16.38", "32.76", "98.29"]
    assert mentions(lines[-2], "158.8 0 73.6 8% 80")
    assert mentions(
        lines[-1], "55.5 GB 4 --tensor_model_parallel_size 2 --sequence_parallel true --use_distributed_optimizer true"
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
    assert mentions(lines[-1], "55.5 GB 0 73.6 8% 80")


def test_a_suggestion_names_the_options_to_remove(model, capsys):
    _, lines = plan(
        capsys,
        model=model,
        num_gpus=2,
        pipeline_model_parallel_size=2,
        decoder_first_pipeline_num_layers=20,
        recompute_granularity="selective",
        recompute_modules=["core_attn", "mlp"],
        gpu_memory_gb=30.0,
    )
    (line,) = (line for line in lines if line.lstrip().startswith("fits with"))
    flags, _, removed = line.partition(", without ")
    assert mentions(flags, "--decoder_first_pipeline_num_layers 20 --recompute_granularity full")
    assert removed == "--recompute_modules"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"micro_batch_size": 2}, {"--max_length", "--micro_batch_size", "--mtp_mode", "--tuner_type"}),
        ({"loss_type": "sigmoid"}, {"--max_length", "--tuner_type"}),
        ({"tuner_type": "lora"}, {"--max_length", "--mtp_mode"}),
        ({"mtp_mode": "heads_only"}, {"--max_length"}),
    ],
)
def test_a_run_that_fits_nowhere_can_be_smaller(model, capsys, options, expected):
    _, lines = plan(capsys, model=model, gpu_memory_gb=0.02, **options)
    (line,) = (line for line in lines if "1024 GPUs" in line)
    flags = {word.strip(",") for word in line.split() if word.startswith("--")}
    assert flags == expected


def test_a_suggestion_can_be_pasted(model, capsys):
    stages = "Et*9|t*9|t*9|t*9L"
    options = {"num_gpus": 2, "pipeline_model_parallel_size": 2, "pipeline_model_parallel_layout": stages}
    _, lines = plan(capsys, model=model, gpu_memory_gb=40.0, **options)
    (line,) = (line for line in lines if line.lstrip().startswith("fits with"))
    assert stages in shlex.split(line)


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
    assert mentions(lines[1], "12 4 3 1 MTP 1 joint")
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
        rules.check(planned(**options))
    return str(error.value)


def test_cached_states_of_images(vision_model, capsys):
    """2,560 channels of 2 bytes, twice for tokens of images."""
    heads = {"mtp_num_layers": 1, "mtp_mode": "heads_only"}
    _, lines = plan(capsys, model=vision_model, **IMAGES, **heads)
    assert any(mentions(line, "--cache_trunk_states 5.12 GB tokens, 5.12 GB images") for line in lines)
    _, lines = plan(capsys, model=vision_model, max_length=4096, **heads)
    assert not any("images" in line for line in lines if "--cache_trunk_states" in line)


def test_heads_alone(model, capsys):
    code, lines = plan(capsys, model=model, mtp_num_layers=1, mtp_mode="heads_only", draft_vocab=32768)
    assert code == 0
    assert mentions(lines[1], "MTP 1 heads_only 32768")
    # 4,096 channels of 2 bytes. Per token a trunk of 6.9e9 parameters forward, and the heads' part three times: a layer
    # and a projection, 2.3e8, and twice 32,768 words, 1.3e8.
    assert mentions(lines[-2], "--cache_trunk_states 8.19 GB 11%")
    _, drafter = plan(capsys, model=model, drafter="eagle3", mtp_mode="heads_only")
    assert any(mentions(line, "--cache_trunk_states 32.77 GB") for line in drafter)  # it reads three layers more
    # 36 layers of 1.93e8 parameters of 2 bytes; 3 groups of 4 GB and 2 checks; 1.51e10 FLOPs per token at 62 %.
    assert mentions(lines[-1], "--stream_trunk 13.9 5 1.5e+16 25 1")
    _, lines = plan(capsys, model=model, mtp_num_layers=1, mtp_mode="heads_only", stream_trunk_gb=8.2)
    assert mentions(lines[-1], "--stream_trunk 13.9 3")  # one group
    with pytest.raises(OptionError, match=naming("--draft_vocab 32768 --mtp_mode heads_only")):
        plan(capsys, model=model, mtp_num_layers=1, draft_vocab=32768)
    with pytest.raises(OptionError, match=naming("--draft_vocab 151936")):
        plan(capsys, model=model, mtp_num_layers=1, mtp_mode="heads_only", draft_vocab=151936)


def test_what_cannot_be_planned(model, tmp_path):
    (tmp_path / "empty").mkdir()
    assert mentions(problems(model=str(tmp_path / "empty")), f"--model {tmp_path / 'empty'} config.json")
    assert mentions(
        problems(model=model, tensor_model_parallel_size=3),
        "--tensor_model_parallel_size 3 num_attention_heads 32",
    )
    assert mentions(
        problems(model=model, num_gpus=3, tensor_model_parallel_size=2),
        "--num_gpus 3 --tensor_model_parallel_size 2",
    )
    assert mentions(problems(model=model, num_gpus=0), "--num_gpus 0 1")


@pytest.mark.parametrize("options", [{"num_gpus": 8}, {"gpu_type": "H100"}])
def test_options_of_a_plan_without_one(options):
    ((name, value),) = options.items()
    with pytest.raises(OptionError, match=naming(f"--{name} {value} --plan")):
        rules.check(DoctorArgs(**options))


@pytest.mark.parametrize(
    ("options", "notes"),
    [
        ({"mtp_unroll": 3}, ["--mtp_unroll 3"]),
        ({"mtp_num_layers": 1, "stream_trunk_gb": 8.2}, ["--stream_trunk_gb 8.2"]),
        ({"mtp_mode": "heads_only", "stream_trunk_gb": 8.2}, []),
        ({"loss_type": "orpo", "ref_tensor_model_parallel_size": 2}, ["--ref_tensor_model_parallel_size 2"]),
    ],
)
def test_settings_without_effect_are_noted(model, options, notes):
    assert mention_each(rules.check(planned(model=model, **options)), notes)


@pytest.mark.parametrize(
    ("given", "of_run"),
    [
        ("--model m --lr 1e-5", SftArgs),
        ("--model m --append_eos false", PtArgs),
        ("--model m --loss_type kto", DpoArgs),
        ("--model m --ref_model r", DpoArgs),
        ("--model m --center_rewards_coefficient 0", RmArgs),
        ("--model m --max_completion_length 64", GrpoArgs),
        ("--model m --max-completion-length=64 --teacher_model t", GrpoArgs),
        ("--model m --reward_funcs format", GrpoArgs),
        ("--model m --teacher_model t", GkdArgs),
        ("--model m --teacher_model t --lmbda 1 --max_completion_length 64", GkdArgs),
        ("run.json --beta 0.1", GrpoArgs),
        ("run.yaml", SftArgs),
    ],
)
def test_options_select_the_planned_command(tmp_path, monkeypatch, given, of_run):
    monkeypatch.chdir(tmp_path)
    Path("run.json").write_text('{"command": "megatron grpo", "model": "m"}')
    Path("run.yaml").write_text("plan: true\nmodel: m\nmax-length: 9\n")
    argv = given.split()
    if argv[0] != "run.yaml":
        argv.append("--plan")
    args = parsed(argv)
    assert type(args.run) is of_run
    assert args.run.model == "m"


@pytest.mark.parametrize("no_plan", [[], ["--plan", "false"], ["--plan", "False"]])
def test_without_plan_options_are_those_of_doctor(no_plan):
    assert type(parsed(["--model", "m", *no_plan])) is DoctorArgs


def test_a_wrong_option_of_a_plan():
    with pytest.raises(OptionError, match=naming("--max_lenght swiftlite megatron sft --max_length")):
        parsed(["--plan", "--max_lenght", "4096"])
    assert parsed(["--plan", "false"]) == DoctorArgs()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": None}, "config.json qwen3"),
        ({"num_hidden_layers": "four"}, "config.json num_hidden_layers 'four' 1 1000"),
    ],
)
def test_a_size_that_cannot_be_counted_with(tmp_path, capsys, change, message):
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_8B | change))
    with pytest.raises(UserError, match=naming(message)):
        plan(capsys, model=str(tmp_path))


def test_an_unknown_model_type(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_8B | {"model_type": "gpt2"}))
    with pytest.raises(UserError, match="gpt2"):
        doctor.run(planned(model=str(tmp_path)))


def test_layouts_by_their_estimated_speed(model, capsys):
    options = {"num_gpus": 8, "max_length": 4096, "global_batch_size": 64}
    code, lines = plan(capsys, model=model, gpu_type="H100", **options)
    assert code == 0
    assert mentions(lines[1], "64 4096 8 H100")
    assert lines[3].split()[:3] == ["tokens/s", "MFU", "GB"]
    shown = lines[4 : lines.index("", 4)]
    speeds = [int(line.split()[0].replace(",", "")) for line in shown]
    assert speeds == sorted(speeds, reverse=True)
    assert len(speeds) == 6
    start = lines.index("", 4) + 3
    for line in lines[start : start + 6]:
        assert sum(float(share.rstrip("%")) for share in line.split()) == pytest.approx(100, abs=0.5)  # rounded
    first = next(line for line in lines if mentions(line, "262144"))
    whole = float(first.split()[-2])
    parts = lines[lines.index(first) + 1 : -2]
    seconds = [float(line.split(" s ")[0].split()[-1]) for line in parts]
    assert sum(seconds) == pytest.approx(whole, abs=0.01)
    assert speeds[0] == pytest.approx(262144 / whole, rel=0.001)
    assert lines[-1].endswith(
        "--max_length 4096 --pipeline_model_parallel_size 2 --num_virtual_stages_per_pipeline_rank 6"
        " --global_batch_size 64"
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
    memory, *_ = re.findall(r"([\d.]+) GB", alone[-1])
    assert memory == lines[4].split()[2]


def test_no_layout_fits_and_says_how_many_gpus_do(model, capsys):
    code, lines = plan(capsys, model=model, gpu_type="H100", num_gpus=1)
    assert code == 1
    assert mention_each(lines, ["1 H100 73.6 GB", "--num_gpus 4 --global_batch_size 64"])
    small = {"gpu_memory_gb": 0.1, "tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}
    code, lines = plan(capsys, model=model, gpu_type="H100", num_gpus=4, **small)
    assert mentions(" ".join(lines), "128 --max_length")
    with pytest.raises(UserError, match=naming("7 H100 --global_batch_size 3")):
        plan(capsys, model=model, gpu_type="H100", num_gpus=7, global_batch_size=3)


FP8 = {"transformer_impl": "transformer_engine", "fp8_format": "hybrid"}
FP4 = {"transformer_impl": "transformer_engine", "fp4_format": "e2m1"}


def test_memory_in_low_precision(model, capsys):
    """34 of 36 layers have 192,937,984 weights each in linear layers. Blocks of 128 x 128 have a scale of 4 bytes."""
    code, lines = plan(capsys, model=model, gpu_memory_gb=200, **FP8)
    assert code == 0
    assert mentions(lines[1], "FP8 hybrid blockwise")
    weights = 34 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 12288)
    copies = weights * (2 + 8 / 128**2) / 1e9
    assert mentions(lines[6], f"{copies:.2f} GB")
    assert float(lines[5].split()[2]) == pytest.approx(2 * 8.190735360 + copies, abs=0.01)
    _, plain = plan(capsys, model=model, gpu_memory_gb=200, transformer_impl="transformer_engine")
    # What qkv, fc1 and fc2 take in is a byte and a 32nd of a number instead of two: 2 x 4,096 and 12,288 numbers.
    saved = 34 * 2048 * (2 * 4096 + 12288) * (2 - 1 - 1 / 32) / 1e9
    assert float(plain[5].split()[5]) - float(lines[5].split()[5]) == pytest.approx(saved, abs=0.011)


def test_a_quantized_model_is_decoded(tmp_path, model, capsys):
    """Its weights take as much memory as those of a plain model."""
    config = QWEN3_8B | {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    directory = tmp_path / "fp8"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    _, lines = plan(capsys, model=str(directory))
    _, plain = plan(capsys, model=model)
    assert lines[5] == plain[5]
    assert mentions(lines[6], "fp8")
    assert not mentions("\n".join(plain), "fp8")


def test_layouts_in_low_precision(model, capsys):
    options = {"num_gpus": 8, "max_length": 4096, "global_batch_size": 64, "gpu_type": "B200"}
    speeds = []
    for low in ({}, FP8 | {"fp8_recipe": "mxfp8"}, FP4):
        code, lines = plan(capsys, model=model, **options, **low)
        assert code == 0
        speeds.append(int(lines[4].split()[0].replace(",", "")))
    assert 1.2 * speeds[0] < speeds[1] < speeds[2]
    assert mentions("\n".join(lines), "62% 2250 TFLOP/s 9000 FP4")
    assert "--transformer_impl transformer_engine --fp4_format e2m1" in lines[-1]


def test_fp8_by_torch_is_planned_without_copies(model, capsys):
    """Two of three products are faster. Saved inputs are those of bfloat16, and no copy of a weight is stored."""
    options = {"num_gpus": 8, "max_length": 4096, "global_batch_size": 64, "gpu_type": "H100"}
    speeds, sizes = [], []
    for low in ({}, {"fp8_format": "hybrid"}, FP8):
        _, lines = plan(capsys, model=model, **options, **low)
        speeds.append(int(lines[4].split()[0].replace(",", "")))
        _, lines = plan(capsys, model=model, gpu_memory_gb=200, **low)
        sizes.append(lines[5])
    assert 1.1 * speeds[0] < speeds[1] < speeds[2]
    assert sizes[0] == sizes[1] != sizes[2]


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (FP8 | {"gpu_type": "A100"}, "--fp8_format hybrid 9.0 A100 8.0"),
        (FP8 | {"gpu_type": "H100", "fp8_recipe": "mxfp8"}, "--fp8_format hybrid 10.0 H100 9.0"),
        (FP4 | {"gpu_type": "H200"}, "--fp4_format e2m1 10.0"),
        ({"fp8_format": "hybrid", "gpu_type": "A100"}, "--fp8_format hybrid rowwise 8.9 A100 8.0"),
        (FP8 | FP4, "--fp4_format e2m1 --fp8_format hybrid"),
        (FP8 | {"torch_dtype": "float32"}, "--fp8_format hybrid --torch_dtype float32"),
        (FP8 | {"num_layers_at_start_in_bf16": 36}, "--fp8_format hybrid 36 1 bfloat16"),
    ],
)
def test_what_low_precision_cannot_be_planned(model, options, problem):
    assert mentions(problems(model=model, num_gpus=8, **options), problem)


def test_what_has_no_speed(model):
    given = {"model": model}
    unknown = problems(**given, num_gpus=8, gpu_type="H10")
    assert mentions(unknown, "--gpu_type H10 A100")
    assert mentions(problems(**given, gpu_type="H100"), "--num_gpus 8")
    assert mentions(problems(**given, num_gpus=8, gpu_type="H100", loss_type="sigmoid"), "--gpu_type H100 megatron dpo")
    assert mentions(
        problems(**given, num_gpus=8, gpu_type="H100", torch_dtype="float32"), "--gpu_type H100 --torch_dtype float32"
    )


def total_of(lines: list[str]) -> float:
    """Return the GB of the only stage."""
    return float(lines[5].split()[7])


def test_heads_alone_are_planned_as_they_are_trained(model, capsys):
    """There is at least one head, as in sft for a checkpoint without heads.

    Each draft stores the activations of a layer.
    """
    options = {"model": model, "mtp_mode": "heads_only", "max_length": 8192, "num_gpus": 1}
    _, one = plan(capsys, **options)
    assert mentions(one[1], "MTP 1 heads_only")
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
        ({"mtp_unroll": 3, "mtp_num_layers": 2}, "--mtp_unroll 3"),
    ],
)
def test_heads_that_sft_would_refuse_are_not_planned(model, options, flag):
    assert flag in problems(model=model, **options)
