"""Each rule with the options that break it: problem and hint in the user's words; and that good options pass."""

import dataclasses
import json
import math
import sys
from pathlib import Path

import pytest

from swiftlite import rules
from swiftlite.args.commands import BenchArgs, DeployArgs, DoctorArgs, ExportArgs, InferArgs, SftArgs
from swiftlite.errors import OptionError

SIZES = {
    "vocab_size": 120,
    "hidden_size": 48,
    "num_attention_heads": 6,
    "intermediate_size": 12,
    "num_hidden_layers": 4,
}


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A working directory with a model without heads, one with MTP depth 2, rows, and a run."""
    monkeypatch.chdir(tmp_path)
    config = {"model_type": "qwen3", "num_key_value_heads": 2, "head_dim": 8, **SIZES}
    for name, depth in (("plain", {}), ("mtp2", {"num_nextn_predict_layers": 2})):
        Path(name).mkdir()
        Path(name, "config.json").write_text(json.dumps(config | depth))
        Path(name, "model.safetensors").write_bytes(b"weights")
    Path("train.jsonl").write_text('{"query": "q", "response": "r"}\n' * 3)
    Path("val.jsonl").write_text('{"query": "q", "response": "r"}\n')
    for folder in ("run/source", "run/checkpoint-5", "run/checkpoint-20", "run/checkpoint-tmp"):
        Path(folder).mkdir(parents=True)
    Path("run/args.json").write_text("{}")
    Path("run/source/config.json").write_text(json.dumps(config))
    return tmp_path


SFT = SftArgs(model="plain", dataset=["train.jsonl"], output_dir="out")
EXPORT = ExportArgs(model="run", output_dir="hf", to_hf=True)
INFER = InferArgs(model="mtp2", val_dataset=["val.jsonl"], speculative="mtp")
BENCH = BenchArgs(model="mtp2", val_dataset=["val.jsonl"], output_dir="out")
DEPLOY = DeployArgs(model="mtp2", infer_backend="sglang", dry_run=True)
CHAIN = {
    "sglang_speculative_num_steps": 2,
    "sglang_speculative_eagle_topk": 1,
    "sglang_speculative_num_draft_tokens": 3,
}
TREE = CHAIN | {"sglang_speculative_eagle_topk": 3, "sglang_speculative_num_draft_tokens": 13}


def change_config(**changes) -> None:
    """Of the model without heads."""
    path = Path("plain/config.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def problems_of(args, world_size=1):
    with pytest.raises(OptionError) as raised:
        rules.check(args, world_size)
    assert raised.value.exit_code == 2
    return raised.value.problems


@pytest.mark.parametrize(
    "args",
    [
        SFT,
        dataclasses.replace(SFT, dataset=["train.jsonl#2"], val_dataset=["val.jsonl"]),
        dataclasses.replace(SFT, mtp_num_layers=1, mtp_init="copy_last_layer"),
        dataclasses.replace(SFT, model="mtp2"),
        dataclasses.replace(SFT, mtp_num_layers=1, mtp_init="random", mtp_unroll=3, mtp_loss="kl"),
        dataclasses.replace(SFT, mtp_num_layers=2, mtp_init="graft", mtp_graft_from="mtp2"),
        dataclasses.replace(EXPORT, mtp_graft_from="mtp2"),
        dataclasses.replace(SFT, model="mtp2", mtp_num_layers=2, mtp_mode="heads_only"),
        dataclasses.replace(SFT, model="mtp2", mtp_num_layers=1, mtp_init="random"),
        dataclasses.replace(SFT, model="mtp2", mtp_num_layers=0),
        dataclasses.replace(SFT, output_dir="run", resume=True),
        EXPORT,
        dataclasses.replace(EXPORT, model="run/checkpoint-5"),
        ExportArgs(model="plain", output_dir="new", to_mcore=True),
        INFER,
        dataclasses.replace(INFER, speculative="none"),
        InferArgs(model="plain"),
        DoctorArgs(),
        DoctorArgs(model="plain"),
        DEPLOY,
        dataclasses.replace(DEPLOY, model="plain"),
        dataclasses.replace(DEPLOY, **TREE),
        dataclasses.replace(DEPLOY, num_speculative_tokens=2, sglang_engine_kwargs={"page_size": 1}),
    ],
)
def test_good_options_pass_without_a_note(here, args):
    assert rules.check(args) == []


def test_an_empty_directory_may_be_written(here):
    Path("out").mkdir()
    Path("hf").mkdir()
    assert rules.check(SFT) == []
    assert rules.check(EXPORT) == []


@pytest.mark.parametrize(
    ("change", "problem", "hint"),
    [
        ({"model": ""}, "--model is required", "config.json, safetensors, tokenizer"),
        ({"model": "plian"}, "--model plian does not exist", "did you mean plain?"),
        ({"model": "no/such/dir"}, "--model no/such/dir does not exist", "the directory no/such does not exist either"),
        (
            {"model": "Qwen/Qwen3-0.6B"},
            "--model Qwen/Qwen3-0.6B is no directory here",
            "hf download Qwen/Qwen3-0.6B --local-dir Qwen3-0.6B",
        ),
        ({"model": "plain/config.json"}, "--model plain/config.json is a file", "--model plain"),
        (
            {"model": "run"},
            "--model run holds megatron-core checkpoints, not a Hugging Face model",
            "swiftlite export --to_hf --model run",
        ),
        ({"model": "run/checkpoint-5"}, "--model run/checkpoint-5 holds megatron-core checkpoints", "export --to_hf"),
        ({"model": "run/source"}, "--model run/source has no *.safetensors file", "download the weights"),
        ({"model": "."}, "--model . has no config.json", "Hugging Face model"),
        ({"dataset": []}, "--dataset is required", "--dataset train.jsonl"),
        ({"dataset": ["trian.jsonl"]}, "--dataset trian.jsonl does not exist", "did you mean train.jsonl?"),
        ({"dataset": ["train.jsonl#many"]}, "--dataset train.jsonl#many: after # comes", "train.jsonl#500"),
        ({"dataset": ["train.jsonl#0"]}, "--dataset train.jsonl#0: after # comes", "train.jsonl#500"),
        ({"dataset": ["train.jsonl#"]}, "--dataset train.jsonl#: after # comes", "train.jsonl#500"),
        ({"dataset": ["."]}, "--dataset . is a directory", "name the files: train.jsonl val.jsonl"),
        ({"dataset": ["plain"]}, "--dataset plain is a directory", "config.json"),
        ({"dataset": ["plain/model.safetensors"]}, "ends in none of .jsonl, .json, .parquet, .csv", "JSON lines"),
        (
            {"dataset": ["AI-ModelScope/alpaca"]},
            "does not exist",
            "hf download --repo-type dataset AI-ModelScope/alpaca",
        ),
        ({"val_dataset": ["vla.jsonl"]}, "--val_dataset vla.jsonl does not exist", "did you mean val.jsonl?"),
        ({"output_dir": ""}, "--output_dir is required", "name the directory to write"),
        ({"output_dir": "train.jsonl"}, "--output_dir train.jsonl is a file", "name a directory"),
        ({"output_dir": "run"}, "--output_dir run already holds a run (newest: checkpoint-20)", "add --resume"),
        ({"resume": True}, "--resume, but --output_dir out holds no checkpoint-N", "leave --resume out"),
        ({"min_lr": 1e-3}, "--min_lr 0.001 is above --lr 1e-05", "decays from --lr to --min_lr"),
        (
            {"mtp_num_layers": 1},
            "--mtp_num_layers 1, but the checkpoint has no MTP weights",
            "add --mtp_init copy_last_layer to start from its last block",
        ),
        (
            {"model": "mtp2", "mtp_num_layers": 1},
            "--mtp_num_layers 1, but the checkpoint has MTP depth 2",
            "leave --mtp_num_layers out to train its 2",
        ),
        (
            {"model": "mtp2", "mtp_num_layers": 3},
            "--mtp_num_layers 3, but the checkpoint has MTP depth 2",
            "make all 3 anew",
        ),
        (
            {"mtp_mode": "heads_only"},
            "--mtp_mode heads_only trains MTP heads alone, but the checkpoint has none",
            "add --mtp_num_layers 1 --mtp_init copy_last_layer",
        ),
        (
            {"model": "mtp2", "mtp_num_layers": 0, "mtp_mode": "heads_only"},
            "--mtp_mode heads_only trains MTP heads alone, but --mtp_num_layers is 0",
            "add --mtp_num_layers 1",
        ),
        (
            {"model": "mtp2", "mtp_unroll": 3},
            "--mtp_unroll 3 applies one MTP layer again and again, but there are 2",
            "--mtp_num_layers 1 --mtp_init copy_last_layer",
        ),
        (
            {"mtp_num_layers": 1, "mtp_init": "graft"},
            "--mtp_init graft does not say whose heads to take",
            "add --mtp_graft_from DIR",
        ),
        (
            {"model": "mtp2", "mtp_graft_from": "mtp2"},
            "--mtp_graft_from without --mtp_init graft: heads come from checkpoint",
            "add --mtp_init graft",
        ),
        (
            {"mtp_num_layers": 1, "mtp_init": "graft", "mtp_graft_from": "mtp2"},
            "--mtp_graft_from mtp2 has MTP depth 2, this run 1",
            "--mtp_num_layers 2",
        ),
        (
            {"mtp_num_layers": 1, "mtp_init": "graft", "mtp_graft_from": "plain"},
            "--mtp_graft_from plain: its config.json promises no MTP layer",
            "give a model that has heads",
        ),
        (
            {"mtp_num_layers": 1, "mtp_init": "graft", "mtp_graft_from": "nowhere"},
            "--mtp_graft_from nowhere is not a directory",
            "",
        ),
        (
            {"mtp_init": "random"},
            "--mtp_init random has no head to fill: the checkpoint has none",
            "add --mtp_num_layers 1 --mtp_init random",
        ),
    ],
)
def test_sft(here, change, problem, hint):
    problems = problems_of(dataclasses.replace(SFT, **change))
    assert len(problems) == 1
    assert problem in problems[0][0]
    assert hint in problems[0][1]


@pytest.mark.parametrize(
    ("text", "message"), [("{", "holds no JSON object"), ("[]", "holds no JSON object"), (None, "has no config.json")]
)
def test_broken_config_json(here, text, message):
    path = Path("plain/config.json")
    path.unlink() if text is None else path.write_text(text)
    ((problem, _),) = problems_of(SFT)
    assert message in problem


def test_weights_in_another_format(here):
    Path("plain/model.safetensors").rename("plain/pytorch_model.bin")
    ((problem, hint),) = problems_of(SFT)
    assert problem == "--model plain has no *.safetensors file"
    assert "save_pretrained" in hint


def test_an_empty_file_is_no_dataset(here):
    Path("train.jsonl").write_text("")
    ((problem, _),) = problems_of(SFT)
    assert problem == "--dataset train.jsonl is empty"


def test_a_run_without_a_checkpoint_can_neither_resume_nor_mix(here):
    Path("out").mkdir()
    Path("out/args.json").write_text("{}")
    ((problem, hint),) = problems_of(SFT)
    assert problem == "--output_dir out already holds a run that wrote no checkpoint; two would mix"
    assert "delete it" in hint
    ((problem, hint),) = problems_of(dataclasses.replace(SFT, resume=True))
    assert "holds no checkpoint-N" in problem
    assert "ended before its first checkpoint" in hint


@pytest.mark.parametrize(
    ("batch", "micro", "world_size", "hint"),
    [
        (16, 1, 6, "use 12, 18 or 24"),
        (4, 1, 6, "use 6, 12 or 18"),
        (5, 2, 1, "use 4, 6 or 8"),
        (13, 4, 2, "use 8, 16 or 24"),
    ],
)
def test_global_batch_size_names_near_sizes(here, batch, micro, world_size, hint):
    args = dataclasses.replace(SFT, global_batch_size=batch, micro_batch_size=micro)
    ((problem, told),) = problems_of(args, world_size)
    assert problem.startswith(f"--global_batch_size {batch} does not divide into micro_batch_size x data parallel")
    assert problem.endswith(f" = {micro} x {world_size}")
    assert told == hint
    sizes = [int(word.strip(",")) for word in hint.split() if word.strip(",").isdigit()]
    for size in sizes:
        rules.check(dataclasses.replace(args, global_batch_size=size), world_size)


def test_data_parallel_is_what_tensor_parallel_leaves(here):
    args = dataclasses.replace(SFT, tensor_model_parallel_size=2, global_batch_size=3)
    assert rules.check(args, world_size=6) == []  # 6 / 2 = 3 data-parallel ranks


def test_tensor_parallel_needs_its_processes(here):
    args = dataclasses.replace(SFT, tensor_model_parallel_size=2)
    ((problem, hint),) = problems_of(args, world_size=1)
    assert problem == "--tensor_model_parallel_size 2 does not divide the number of processes, 1"
    assert "NPROC_PER_NODE=2 swiftlite" in hint


def test_tensor_parallel_divides_heads_groups_and_ffn(here):
    args = dataclasses.replace(SFT, tensor_model_parallel_size=4)
    assert problems_of(args, world_size=4) == [
        ("--tensor_model_parallel_size 4 does not divide the model's num_attention_heads, 6", "use 1, 2 or 3"),
        ("--tensor_model_parallel_size 4 does not divide the model's num_key_value_heads, 2", "use 1 or 2"),
    ]


@pytest.mark.parametrize(
    ("family", "key"),
    [("qwen3_moe", "num_experts"), ("qwen3_moe", "num_local_experts"), ("glm4_moe", "n_routed_experts")],
)
def test_experts_have_a_key_of_each_family(here, family, key):
    """Qwen3's on the hub, Qwen3's as transformers 5 writes it, GLM-4.5's and DeepSeek-V3's."""
    sizes = {"model_type": family, key: 4, "num_experts_per_tok": 2, "moe_intermediate_size": 6}
    change_config(**sizes)
    args = dataclasses.replace(SFT, expert_model_parallel_size=3)
    assert problems_of(args, world_size=3)[0] == (
        "--expert_model_parallel_size 3 does not divide the model's 4 experts",
        "use 1 or 2",
    )


@pytest.mark.parametrize(
    "change",
    [{"model_type": "gpt2"}, {"model_type": None}, *({key: None} for key in SIZES)],
    ids=lambda change: next(iter(change)),
)
def test_a_model_that_is_not_known_is_not_looked_at(here, change):
    """What its config.json lacks is said by its family, when the model is read."""
    change_config(**change)
    parallel = {"tensor_model_parallel_size": 4, "expert_model_parallel_size": 2, "pipeline_model_parallel_size": 3}
    args = dataclasses.replace(SFT, **parallel, recompute_modules=["moe", "mla_up_proj"], moe_aux_loss_coeff=0.5)
    assert not [problem for problem, _ in problems_of(args, world_size=5) if "number of processes" not in problem]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"lr": 0.0}, "--lr 0.0 must be above 0"),
        ({"lr": -1e-5}, "--lr -1e-05 must be above 0"),
        ({"lr": math.nan}, "--lr nan must be above 0"),
        ({"lr": math.inf}, "--lr inf must be above 0"),
        ({"split_dataset_ratio": 1.0}, "--split_dataset_ratio 1.0 must be at least 0 and below 1"),
        ({"lr_warmup_fraction": 1.5}, "--lr_warmup_fraction 1.5 must be at least 0 and at most 1"),
        ({"micro_batch_size": 0}, "--micro_batch_size 0 must be at least 1"),
        ({"tensor_model_parallel_size": 0}, "--tensor_model_parallel_size 0 must be at least 1"),
        ({"mtp_num_layers": -1}, "--mtp_num_layers -1 must be at least 0"),
        ({"mtp_unroll": 0}, "--mtp_unroll 0 must be at least 1"),
        ({"mtp_unroll_beta": 0.0}, "--mtp_unroll_beta 0.0 must be above 0 and at most 1"),
        ({"mtp_loss_scaling_factor": 0.0}, "--mtp_loss_scaling_factor 0.0 must be above 0"),
        ({"seed": -1}, "--seed -1 must be at least 0 and below 4294967296"),
    ],
)
def test_numbers_out_of_range(here, change, problem):
    assert problems_of(dataclasses.replace(SFT, **change)) == [(problem, "")]


@pytest.mark.parametrize("name", ["seed", "lr_warmup_fraction", "acceptance_samples", "clip_grad", "weight_decay"])
def test_zero_is_in_range(here, name):
    rules.check(dataclasses.replace(SFT, **{name: 0}))


def test_all_problems_come_together(here):
    args = SftArgs(dataset=["nowhere.jsonl"], lr=-1.0, global_batch_size=3, mtp_mode="heads_only")
    problems = [problem for problem, _ in problems_of(args, world_size=2)]
    assert len(problems) == 5  # heads_only waits for a model to look at
    assert {problem.split()[0] for problem in problems} == {
        "--model",
        "--dataset",
        "--output_dir",
        "--lr",
        "--global_batch_size",
    }


@pytest.mark.parametrize(
    ("change", "problem", "hint"),
    [
        ({"to_hf": False}, "neither --to_hf nor --to_mcore", "give one"),
        ({"to_mcore": True}, "both --to_hf and --to_mcore", "give one"),
        ({"model": ""}, "--model is required", "output_dir"),
        ({"model": "rum"}, "--model rum does not exist", "did you mean run?"),
        ({"model": "run/args.json"}, "--model run/args.json is a file", "--model run"),
        ({"model": "plain"}, "--model plain is no run", "it is a Hugging Face model already"),
        ({"model": "."}, "--model . is no run", "give an sft run's --output_dir"),
        ({"output_dir": ""}, "--output_dir is required", "name the directory"),
        ({"output_dir": "plain"}, "--output_dir plain is not empty", "name a new directory"),
        ({"max_shard_size_gb": 0.0}, "--max_shard_size_gb 0.0 must be above 0", ""),
        ({"tensor_model_parallel_size": 2}, "does not divide the number of processes, 1", "NPROC_PER_NODE=2"),
    ],
)
def test_export(here, change, problem, hint):
    problems = problems_of(dataclasses.replace(EXPORT, **change))
    assert len(problems) == 1
    assert problem in problems[0][0]
    assert hint in problems[0][1]


def test_export_of_a_run_without_checkpoint(here):
    Path("run/checkpoint-5").rmdir()
    Path("run/checkpoint-20").rmdir()
    ((problem, hint),) = problems_of(EXPORT)
    assert problem == "--model run is a run without any checkpoint-N"
    assert "--save_steps" in hint


def test_export_reads_what_to_mcore_wrote(here):
    Path("run/args.json").unlink()  # --to_mcore writes source/ and checkpoint-0, and has no options of a run
    assert rules.check(EXPORT) == []


def test_export_to_mcore_wants_a_hugging_face_model(here):
    ((problem, _),) = problems_of(ExportArgs(model="run", output_dir="new", to_mcore=True))
    assert problem == "--model run holds megatron-core checkpoints, not a Hugging Face model"


def test_export_reads_the_run_s_model_for_tensor_parallel(here):
    ((problem, _),) = problems_of(dataclasses.replace(EXPORT, tensor_model_parallel_size=3), world_size=3)
    assert problem == "--tensor_model_parallel_size 3 does not divide the model's num_key_value_heads, 2"


@pytest.mark.parametrize(
    ("change", "problem", "hint"),
    [
        ({"model": "Qwen/Qwen3-0.6B"}, "is no directory here", "hf download"),
        ({"model": "run"}, "holds megatron-core checkpoints", "export --to_hf"),
        ({"model": "plain"}, "--speculative mtp, but plain/config.json promises no MTP layer", "megatron sft"),
        ({"val_dataset": ["vall.jsonl"]}, "--val_dataset vall.jsonl does not exist", "did you mean val.jsonl?"),
        (
            {"speculative": "none", "num_speculative_tokens": 2},
            "--num_speculative_tokens 2 without speculation",
            "add --speculative mtp",
        ),
        ({"speculative": "none", "compare": True}, "--compare has nothing to compare", "add --speculative mtp"),
        ({"compare": True, "val_dataset": []}, "a chat on stdin has none to repeat", "add --val_dataset FILE"),
        ({"num_speculative_tokens": 0}, "--num_speculative_tokens 0 must be at least 1", ""),
        ({"top_p": 0.0}, "--top_p 0.0 must be above 0 and at most 1", ""),
        (
            {"vllm_engine_kwargs": {"a": 1}},
            "--vllm_engine_kwargs with --infer_backend transformers",
            "add --infer_backend vllm",
        ),
        (
            {"vllm_speculative_config": {}},
            "--vllm_speculative_config with --infer_backend transformers",
            "add --infer_backend vllm",
        ),
        ({"sglang_engine_kwargs": {}}, "--sglang_engine_kwargs with --infer_backend transformers", "backend sglang"),
        ({"acceptance_json": "no.json"}, "--acceptance_json no.json does not exist", "acceptance.json of an sft run"),
    ],
)
def test_infer(here, change, problem, hint):
    problems = problems_of(dataclasses.replace(INFER, **change))
    assert len(problems) == 1
    assert problem in problems[0][0]
    assert hint in problems[0][1]


def test_infer_acceptance_json_needs_speculation_and_prompts(here):
    Path("acceptance.json").write_text("{}")
    problems = problems_of(InferArgs(model="plain", acceptance_json="acceptance.json"))
    assert [hint for _, hint in problems] == ["add --speculative mtp", "add --val_dataset FILE"]


def test_infer_with_vllm_needs_vllm(here, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)  # what Python itself calls a module that cannot be imported
    ((problem, hint),) = problems_of(dataclasses.replace(INFER, infer_backend="vllm"))
    assert problem == "--infer_backend vllm, but it is not installed"
    assert "pip install vllm" in hint


@pytest.mark.parametrize(
    ("change", "problem", "hint"),
    [
        (
            {"sglang_speculative_algorithm": "EAGLE", "speculative": "none"},
            "--sglang_speculative_algorithm EAGLE without speculation",
            "add --speculative mtp",
        ),
        (
            {"sglang_speculative_num_steps": 2},
            "2 without --sglang_speculative_eagle_topk and --sglang_spec",
            "give all three, or none",
        ),
        (
            CHAIN | {"sglang_speculative_num_draft_tokens": 4},
            "--sglang_speculative_num_draft_tokens 4 with 2 steps of topk 1",
            "--sglang_speculative_num_draft_tokens 3",
        ),
    ],
)
def test_infer_with_sglang(here, monkeypatch, change, problem, hint):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert problems_of(dataclasses.replace(INFER, infer_backend="sglang"))[0][1].startswith("pip install sglang")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    ((found, advice),) = problems_of(dataclasses.replace(INFER, infer_backend="sglang", **change))
    assert problem in found
    assert hint in advice


def test_infer_two_answers_for_the_draft_length(here):
    args = dataclasses.replace(
        INFER, infer_backend="vllm", num_speculative_tokens=1, vllm_speculative_config={"num_speculative_tokens": 2}
    )
    assert "--num_speculative_tokens and --vllm_speculative_config both say" in problems_of(args)[0][0]


@pytest.mark.parametrize(
    ("change", "problem", "hint"),
    [
        ({"model": "run"}, "holds megatron-core checkpoints", "export --to_hf"),
        ({"port": 0}, "--port 0 must be at least 1 and at most 65535", ""),
        ({"vllm_engine_kwargs": {}}, "--vllm_engine_kwargs with --infer_backend sglang", "add --infer_backend vllm"),
        (
            {"model": "plain", "speculative": "mtp"},
            "--speculative mtp, but plain/config.json promises no",
            "train heads",
        ),
        (
            {"model": "plain", "num_speculative_tokens": 1},
            "--num_speculative_tokens, but plain/config.json",
            "leave it",
        ),
        ({"speculative": "none", "num_speculative_tokens": 1}, "--num_speculative_tokens with --speculative none", ""),
        (
            {"sglang_speculative_num_steps": 2},
            "2 without --sglang_speculative_eagle_topk and --sglang_spec",
            "all three",
        ),
        (CHAIN | {"num_speculative_tokens": 2}, "both say how many tokens to draft", "leave the first out"),
        (
            CHAIN | {"sglang_speculative_num_draft_tokens": 4},
            "4 with 2 steps of topk 1: SGLang would take 3",
            "tokens 3",
        ),
        (TREE | {"sglang_speculative_num_draft_tokens": 14}, "draft 12 tokens, one more is verified", "at most 13"),
        (
            {"sglang_engine_kwargs": {"speculative_num_steps": 2}},
            "--sglang_engine_kwargs has 'speculative_num_steps', which is checked nowhere",
            "--sglang_speculative_num_steps 2",
        ),
    ],
)
def test_deploy(here, change, problem, hint):
    ((found, advice),) = problems_of(dataclasses.replace(DEPLOY, **change))
    assert problem in found
    assert hint in advice


def test_deploy_with_vllm(here, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    vllm = dataclasses.replace(DEPLOY, infer_backend="vllm", vllm_engine_kwargs={"speculative_config": {"a": 1}})
    ((problem, hint),) = problems_of(vllm)
    assert "which is checked nowhere" in problem
    assert hint == """--vllm_speculative_config '{"a": 1}'"""
    problems = problems_of(dataclasses.replace(DEPLOY, infer_backend="vllm", **CHAIN))
    assert [hint for _, hint in problems] == ["add --infer_backend sglang"] * 3
    twice = {"num_speculative_tokens": 1, "vllm_speculative_config": {"method": "mtp", "num_speculative_tokens": 2}}
    ((problem, _),) = problems_of(dataclasses.replace(DEPLOY, infer_backend="vllm", **twice))
    assert problem.startswith("--num_speculative_tokens and --vllm_speculative_config both say")


def test_deploy_needs_the_engine_but_to_print_a_command_for_sglang(here, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert rules.check(DEPLOY) == []
    ((problem, hint),) = problems_of(dataclasses.replace(DEPLOY, dry_run=False))
    assert problem == "--infer_backend sglang, but it is not installed"
    assert hint.endswith("or add --dry_run")
    ((problem, _),) = problems_of(dataclasses.replace(DEPLOY, infer_backend="vllm"))
    assert problem == "--infer_backend vllm, but it is not installed"


@pytest.mark.parametrize(
    ("change", "problem", "hint"),
    [
        ({"val_dataset": []}, "--val_dataset is required", "give files with prompts"),
        ({"output_dir": ""}, "--output_dir is required", "name the directory"),
        ({"num_speculative_tokens": [1, 2]}, "--num_speculative_tokens 1,2: drafting is compared with not", "give 0"),
        ({"num_speculative_tokens": [0]}, "--num_speculative_tokens 0: drafting is compared with not", "tokens 0,1"),
        ({"num_speculative_tokens": [0, 1, 1]}, "--num_speculative_tokens 0,1,1 names a number twice", "--rounds"),
        ({"num_speculative_tokens": [0, 1, -1]}, "one cannot draft -1 tokens", ""),
        ({"concurrency": [1, 0]}, "--concurrency 1,0: at least one request", "1,8"),
        ({"concurrency": []}, "--concurrency : at least one request", "1,8"),
        ({"concurrency": [8, 8]}, "--concurrency 8,8 names a number twice", "--rounds"),
        ({"max_prompts": 8}, "--concurrency 32 with --max_prompts 8: so many are never under way", "128"),
        ({"rounds": 0}, "--rounds 0 must be at least 1", ""),
        ({"model": "plain"}, "plain/config.json promises no MTP layer", "train heads"),
        ({"vllm_speculative_config": {"num_speculative_tokens": 2}}, "of which bench tries several", "leave it out"),
        ({"sglang_engine_kwargs": {}}, "--sglang_engine_kwargs with --infer_backend vllm", "--infer_backend sglang"),
        (
            {"vllm_engine_kwargs": {"speculative_config": {}}},
            "--vllm_engine_kwargs has 'speculative_config'",
            "--vllm_speculative_config",
        ),
    ],
)
def test_bench(here, monkeypatch, change, problem, hint):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    ((found, advice),) = problems_of(dataclasses.replace(BENCH, **change))
    assert problem in found
    assert hint in advice


def test_bench_needs_the_engine(here, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for backend in ("vllm", "sglang"):
        ((problem, _),) = problems_of(dataclasses.replace(BENCH, infer_backend=backend))
        assert problem == f"--infer_backend {backend}, but it is not installed"


def test_doctor(here):
    assert problems_of(DoctorArgs(model="plian")) == [("--model plian is no directory", "did you mean plain?")]
    assert problems_of(DoctorArgs(model="train.jsonl")) == [("--model train.jsonl is no directory", "")]


@pytest.mark.parametrize(
    ("args", "problem", "hint"),
    [
        (DoctorArgs(engine="sglang"), "--engine sglang needs a model", "add --model DIRECTORY"),
        (DoctorArgs(engine="sglang", model="plain", plan=True), "--engine and --plan are two", "ask one at a time"),
        (DoctorArgs(num_speculative_tokens=2), "--num_speculative_tokens 2 without an engine", "add --engine vllm"),
        (DoctorArgs(torch_dtype="float32"), "--torch_dtype float32 without an engine", "add --engine vllm"),
        (
            DoctorArgs(engine="sglang", model="plain", vllm_engine_kwargs={}),
            "--vllm_engine_kwargs {} with --engine sglang",
            "it is for --engine vllm",
        ),
    ],
)
def test_doctor_of_an_engine(here, args, problem, hint):
    ((found, advice),) = problems_of(args)
    assert found.startswith(problem)
    assert advice.startswith(hint)


def test_doctor_of_vllm_needs_vllm(here, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    ((problem, _),) = problems_of(DoctorArgs(model="plain", engine="vllm"))
    assert problem == "--engine vllm, but it is not installed"


@pytest.mark.parametrize(
    ("args", "note"),
    [
        (
            dataclasses.replace(SFT, val_dataset=["val.jsonl"], split_dataset_ratio=0.1),
            "--split_dataset_ratio 0.1 has no effect: --val_dataset is given",
        ),
        (
            dataclasses.replace(SFT, train_iters=3, num_train_epochs=2.0),
            "--num_train_epochs 2.0 has no effect: --train_iters is given",
        ),
        (
            dataclasses.replace(SFT, lr_decay_style="constant", min_lr=0.0),
            "--min_lr 0.0 has no effect: --lr_decay_style is constant",
        ),
        (
            dataclasses.replace(SFT, mtp_loss_scaling_factor=0.3),
            "--mtp_loss_scaling_factor 0.3 has no effect: the model has no MTP layers",
        ),
        (
            dataclasses.replace(SFT, mtp_unroll=3),
            "--mtp_unroll 3 has no effect: the model has no MTP layers",
        ),
        (
            dataclasses.replace(SFT, model="mtp2", mtp_unroll_beta=0.5),
            "--mtp_unroll_beta 0.5 has no effect: --mtp_unroll is 1",
        ),
        (
            dataclasses.replace(SFT, mtp_loss="tv"),
            "--mtp_loss tv has no effect: the model has no MTP layers",
        ),
        (
            dataclasses.replace(SFT, model="mtp2", mtp_num_layers=0, mtp_init="random"),
            "--mtp_init random has no effect: --mtp_num_layers is 0",
        ),
        (
            dataclasses.replace(SFT, split_dataset_ratio=0, eval_steps=5),
            "--eval_steps 5 has no effect: nothing is held out: --split_dataset_ratio is 0",
        ),
        (
            dataclasses.replace(SFT, model="mtp2", acceptance_samples=0, acceptance_max_new_tokens=5),
            "--acceptance_max_new_tokens 5 has no effect: --acceptance_samples is 0",
        ),
        (
            dataclasses.replace(SFT, val_dataset=["./train.jsonl#1"]),
            "./train.jsonl#1 is in --dataset and in --val_dataset: its evaluation measures memory",
        ),
        (
            dataclasses.replace(INFER, max_batch_size=4),
            "--max_batch_size 4 has no effect: transformers answers one prompt at a time",
        ),
        (dataclasses.replace(INFER, top_p=0.5), "--top_p 0.5 has no effect: --temperature 0 is greedy"),
    ],
)
def test_a_setting_without_effect_is_noted(here, args, note):
    assert note in rules.check(args)


def test_resume_keeps_what_makes_the_run(here):
    """Other heads, data or schedule would be another run; how often it saves, or how work is cut up, may change."""
    began = dataclasses.replace(SFT, model="mtp2", output_dir="run", train_iters=30)
    Path("run/args.json").write_text(json.dumps(dataclasses.asdict(began)))
    again = dataclasses.replace(began, resume=True)
    assert rules.check(again) == []
    same = dataclasses.replace(
        again, model=str(Path("mtp2").resolve()), mtp_num_layers=2, save_steps=7, micro_batch_size=2
    )
    assert rules.check(same) == []
    other = dataclasses.replace(again, mtp_num_layers=0, lr=1e-3, dataset=["train.jsonl", "val.jsonl"])
    assert [problem for problem, _ in problems_of(other)] == [
        "--resume with --mtp_num_layers 0, but this run began with 2",
        "--resume with --dataset train.jsonl val.jsonl, but this run began with train.jsonl",
        "--resume with --lr 0.001, but this run began with 1e-05",
    ]
    (note,) = rules.check(dataclasses.replace(again, train_iters=40))
    assert note.startswith("--train_iters was 30 and is 40")


@pytest.mark.parametrize(("content", "state"), [("{", "damaged"), ("[]", "damaged"), (None, "not there")])
def test_resume_needs_what_the_run_began_with(here, content, state):
    path = Path("run/args.json")
    path.unlink()
    if content is not None:
        path.write_text(content)
    ((problem, _),) = problems_of(dataclasses.replace(SFT, output_dir="run", resume=True))
    assert problem == f"--resume: run/args.json, what this run began with, is {state}"


def test_resume_has_steps_left(here):
    resumed = dataclasses.replace(SFT, output_dir="run", resume=True, train_iters=10)
    assert problems_of(resumed) == [("--train_iters 10, but run/checkpoint-20 is past it", "--train_iters 20 or more")]


def test_a_place_that_cannot_be_made(here):
    ((problem, hint),) = problems_of(dataclasses.replace(SFT, output_dir="train.jsonl/run"))
    assert problem.startswith("--output_dir train.jsonl/run cannot be made: ")
    assert problem.endswith("train.jsonl is a file")
    assert hint == "name a place you may write"


def test_stages_need_a_pipeline(here):
    Path("plain/config.json").write_text(json.dumps({"num_hidden_layers": 4}))
    staged = dataclasses.replace(SFT, pipeline_model_parallel_layout="Et*2|t*2L")
    assert problems_of(staged) == [
        (
            "--pipeline_model_parallel_layout Et*2|t*2L has 2 stages, but --pipeline_model_parallel_size is 1",
            "add --pipeline_model_parallel_size 2",
        )
    ]
    ((problem, _),) = problems_of(dataclasses.replace(SFT, pipeline_model_parallel_layout="Et*99999999999|tL"))
    assert "99999999999 repetitions are more than any model has layers" in problem
