"""Test adapters in training against PEFT: initial values, training, and checkpoints."""

import json
import re
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from swiftlite.args.commands import ExportArgs
from swiftlite.base.errors import UserError
from swiftlite.base.lora import is_adapter
from swiftlite.bridge.adapters.files import digest_of
from swiftlite.bridge.hf_config import read_config
from swiftlite.export.run import convert
from swiftlite.families.resolved import resolve
from swiftlite.model.inputs import ModelInputs
from swiftlite.model.layers.lora import Adapter, gather_adapters, merged
from swiftlite.plan.kernels import Machine
from swiftlite.serve.adapters import with_adapters
from swiftlite.train import phases
from swiftlite.train import run as training
from tests.messages import naming
from tests.tiers import some_of
from tests.tiny import make_tiny_hf
from tests.train.conftest import options_in
from tests.train.prepared import prepare
from tests.train.test_sft import metrics, train

STEPS = 10
LORA = {"tuner_type": "lora", "lora_rank": 4, "lora_alpha": 6.0, "train_iters": STEPS, "lr_decay_style": "constant"}
LORA |= {"lr_warmup_fraction": 0.0, "lr": 1e-2, "weight_decay": 0.1}


def adapters_of(run) -> dict[str, torch.Tensor]:
    rows = run.hf_model.family.rows(run.hf_model.config, run.plan.heads.layers)
    return {key: tensor.clone() for key, tensor in gather_adapters(run.train_state.chunks, run.plan.lora, rows).items()}


def peft_model(hf_dir, **config):
    peft = pytest.importorskip("peft")
    model = AutoModelForCausalLM.from_pretrained(hf_dir, dtype=torch.float32)
    return peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **config))


def peft_name(key: str) -> str:
    if key.endswith("lora_magnitude_vector"):
        return f"base_model.model.{key}.default.weight"
    return f"base_model.model.{key.removesuffix('.weight')}.default.weight"


def take_steps(model, batches, args) -> list[float]:
    """Train PEFT's model in a simple loop; return the losses."""
    learns = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(
        [
            {"params": [parameter for parameter in learns if parameter.dim() > 1]},
            {"params": [parameter for parameter in learns if parameter.dim() == 1], "weight_decay": 0.0},
        ],
        lr=args.lr,
        betas=(args.adam_beta1, args.adam_beta2),
        eps=args.adam_eps,
        weight_decay=args.weight_decay,
    )
    losses = []
    for step in range(args.train_iters):
        micro_batches = batches(step)
        targets = sum(int((batch.labels_KBS[0] != -100).sum()) for batch in micro_batches)
        optimizer.zero_grad()
        loss = 0.0
        for batch in micro_batches:
            logits = model(input_ids=batch.tokens_KBS[0]).logits
            part = torch.nn.functional.cross_entropy(
                logits.flatten(0, 1), batch.labels_KBS[0].flatten(), reduction="sum"
            )
            (part / targets).backward()
            loss += float(part) / targets
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip_grad)
        optimizer.step()
        losses.append(loss)
    return losses


@pytest.mark.parametrize(
    ("family", "changed", "config"),
    [
        pytest.param("qwen3", {}, {"target_modules": "all-linear"}, marks=pytest.mark.slow),
        pytest.param(
            "qwen2",
            {"target_modules": ["q_proj", "v_proj", "up_proj"]},
            {"target_modules": ["q_proj", "v_proj", "up_proj"]},
            marks=pytest.mark.slow,
        ),
        (
            "qwen3",
            {
                "use_rslora": True,
                "lora_modules_to_save": ["norm", "lm_head"],
                "target_modules": ["k_proj", "down_proj"],
            },
            {
                "use_rslora": True,
                "modules_to_save": ["model.norm", "lm_head"],
                "target_modules": ["k_proj", "down_proj"],
            },
        ),
        pytest.param(
            "qwen3", {"use_dora": True}, {"use_dora": True, "target_modules": "all-linear"}, marks=pytest.mark.slow
        ),
        (
            "qwen2",
            {"use_dora": True, "target_modules": ["q_proj", "up_proj", "o_proj"]},
            {"use_dora": True, "target_modules": ["q_proj", "up_proj", "o_proj"]},
        ),
    ],
    ids=["all-linear", "some", "beside whole modules", "dora", "dora of some, biases"],
)
def test_adapters_learn_what_pefts_learn(options, mesh, tmp_path, family, changed, config):
    base = make_tiny_hf(tmp_path / "base", family, depth=0, with_tokenizer=True)
    args = options(model=str(base), **LORA, **changed)
    model = peft_model(base, r=4, lora_alpha=6.0, **config)

    run = prepare(args, mesh)
    begun = adapters_of(run)
    theirs = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert {peft_name(key) for key in begun} == {name for name in theirs if "lora_" in name}
    for key, tensor in begun.items():
        parameter = theirs[peft_name(key)]
        if "magnitude" in key:
            assert torch.equal(tensor, parameter.data)
            continue
        if "lora_B" in key:
            assert not tensor.any()
            assert not parameter.any()
            continue
        # Both are uniform with the same bound: the largest of some hundred numbers is near it.
        assert tensor.abs().max() == pytest.approx(parameter.abs().max().item(), rel=0.05)
        with torch.no_grad():
            parameter.copy_(tensor)

    trainer = training.make_trainer(run, phases.restore(run))
    batches = trainer.batches.get
    expected = take_steps(model, batches, args)
    phases.fit(run, trainer, 0, training.make_held_out(run))
    losses = [line["loss"] for line in metrics(run.output_dir) if "loss" in line]
    # float32: the order of sums differs (fused products), and AdamW divides small numbers by small ones.
    assert losses == pytest.approx(expected, rel=2e-5)
    assert losses[-1] < losses[0] - 0.1
    for key, tensor in adapters_of(run).items():
        torch.testing.assert_close(tensor, theirs[peft_name(key)].data, rtol=1e-3, atol=1e-4)
    phases.report(run, phases.Outcome(0, 1.0, {}))  # frozen tensors stayed

    # What is merged is what PEFT merges, to the bit, and PEFT opens what is not merged.
    convert(ExportArgs(to_hf=True, model=str(run.output_dir), output_dir=str(tmp_path / "merged")), mesh)
    kept = ExportArgs(to_hf=True, model=str(run.output_dir), output_dir=str(tmp_path / "adapter"), merge_lora=False)
    convert(kept, mesh)
    import peft

    opened = peft.PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), tmp_path / "adapter"
    )
    ours = load_file(tmp_path / "merged/model.safetensors")
    merged = opened.merge_and_unload().state_dict()
    for key, tensor in ours.items():
        assert torch.equal(tensor, merged[key]), key


@pytest.mark.parametrize(
    ("family", "use_dora"),
    some_of(
        [("qwen3", False), ("qwen2", True), ("deepseek_v3", True), ("qwen3_moe", False), ("qwen3_5", True)],
        ("deepseek_v3", True),
        ("qwen3_5", True),
    ),
)
def test_before_the_first_step_every_bit_is_the_base_s(options, mesh, tmp_path, family, use_dora):
    base = make_tiny_hf(tmp_path / "base", family, depth=1, with_tokenizer=True)
    run = prepare(options(model=str(base), tuner_type="lora", use_dora=use_dora), mesh)
    (chunk,) = run.train_state.chunks
    assert any(name.startswith("mtp.") and is_adapter(name) for name, _ in chunk.named_parameters())
    logits = []
    for without in (nullcontext(), merged([chunk])):
        with mesh.active(), torch.no_grad(), without:
            made = chunk.eval()(ModelInputs(torch.arange(5, 45)[None], torch.arange(40)[None]))
        logits.append([made.main, *made.mtp])
    assert all(torch.equal(adapted, plain) for adapted, plain in zip(*logits, strict=True))
    weights = {name: tensor for name, tensor in chunk.state_dict().items() if ".adapter." not in name}
    (other,) = prepare(options(model=str(base)), mesh).train_state.chunks
    assert all(torch.equal(weights[name], parameter) for name, parameter in other.named_parameters())


@pytest.mark.parametrize(
    ("tuner", "learns", "use_dora"),
    some_of(
        [("lora", r"\.adapter\.", True), ("full", r"^mtp\.|\.adapter\.", False), ("frozen", r"\.adapter\.", True)],
        ("full", r"^mtp\.|\.adapter\.", False),
    ),
)
def test_heads_beside_adapters(options, mesh, tmp_path, hf_dir, tuner, learns, use_dora):
    """Heads are trained as the options specify, and the export contains them completely.

    Merging the exported adapters into files later gives the same bits as merging them in the export.
    """
    args = options(tuner_type="lora", mtp_tuner=tuner, lr=1e-2, use_dora=use_dora, train_iters=2)
    run = train(args, mesh)
    report = json.loads((run / "run_report.json").read_text())["tensors"]
    assert report["frozen_but_changed"] == report["trained_but_unchanged"] == []
    chunk = prepare(replace(args, output_dir=str(tmp_path / "other")), mesh).train_state.chunks[0]
    parameters = dict(chunk.named_parameters())
    assert any(name.startswith("mtp.") and ".adapter." in name for name in parameters) == (tuner == "lora")
    for name, parameter in parameters.items():
        assert parameter.requires_grad == bool(re.search(learns, name)), name

    convert(ExportArgs(to_hf=True, model=str(run), output_dir=str(tmp_path / "merged")), mesh)
    convert(ExportArgs(to_hf=True, model=str(run), output_dir=str(tmp_path / "adapter"), merge_lora=False), mesh)
    with with_adapters(resolve(hf_dir), str(tmp_path / "adapter")) as model:
        assert digest_of(model.directory) == digest_of(tmp_path / "merged") != digest_of(hf_dir)
        assert model.config == read_config(tmp_path / "merged")


def test_adapters_learn_the_same_beside_fused_kernels(options, mesh, tmp_path, monkeypatch):
    base = make_tiny_hf(tmp_path / "base", "qwen3", depth=1, with_tokenizer=True)
    machines = {"plain": Machine(), "fused": Machine(is_cuda=True)}
    losses = {}
    for name, machine in machines.items():
        monkeypatch.setattr(training, "this_machine", lambda *_, machine=machine: machine)
        run = train(options(model=str(base), output_dir=str(tmp_path / name), **LORA), mesh)
        report = json.loads((run / "run_report.json").read_text())
        assert (report["kernels"]["fused"] == "none") == (name == "plain")
        assert report["tensors"]["frozen_but_changed"] == []
        losses[name] = [line[loss] for line in metrics(run) for loss in ("loss", "mtp_1_loss") if loss in line]
    # float32: the order of sums differs, and AdamW divides small numbers by small ones.
    assert losses["fused"] == pytest.approx(losses["plain"], rel=2e-5)


def test_a_resumed_run_takes_the_steps_of_an_unbroken_one(options, mesh, tmp_path):
    constant = {"lr_decay_style": "constant", "lr_warmup_fraction": 0.0, "tuner_type": "lora", "lora_dropout": 0.1}
    constant |= {"torch_dtype": "bfloat16", "mtp_tuner": "full", "use_dora": True}
    unbroken = train(options(output_dir=str(tmp_path / "unbroken"), **constant), mesh)
    stopped = options(output_dir=str(tmp_path / "stopped"), train_iters=2, **constant)
    train(stopped, mesh)
    resumed = train(replace(stopped, train_iters=4, resume=True), mesh)
    steps = [[line for line in metrics(run) if "loss" in line] for run in (unbroken, resumed)]
    assert steps[0] == steps[1]
    states = [json.loads((run / "checkpoint-4/trainer_state.json").read_text()) for run in (unbroken, resumed)]
    assert states[0]["base"] == states[1]["base"] == {"model": stopped.model, "sha256": digest_of(stopped.model)}


@pytest.mark.slow
def test_recomputed_layers_drop_the_same(options, mesh, tmp_path):
    dropout = {"tuner_type": "lora", "lora_dropout": 0.5, "lr": 1e-2, "train_iters": 2}
    again = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    runs = [
        train(options(output_dir=str(tmp_path / name), **dropout, **more), mesh)
        for name, more in (("kept", {}), ("recomputed", again))
    ]
    kept, recomputed = ([line for line in metrics(run) if "loss" in line] for run in runs)
    assert kept == recomputed
    without = metrics(train(options(output_dir=str(tmp_path / "without"), **dropout | {"lora_dropout": 0.0}), mesh))
    assert [line["loss"] for line in kept] != [line["loss"] for line in without if "loss" in line]


def test_a_mask_takes_one_number_however_many_tokens_there_are(options, mesh):
    """Tensor-parallel ranks have different tokens of experts, but the same tokens of later layers."""
    run = prepare(options(tuner_type="lora", lora_dropout=0.5), mesh)
    (adapter, *_) = (module for module in run.train_state.chunks[0].modules() if isinstance(module, Adapter))
    after = set()
    for num_tokens in (0, 3, 7):
        torch.manual_seed(1)
        adapter.train().drop(torch.ones(num_tokens, 1, 8))
        after.add(float(torch.rand(())))
    assert len(after) == 1


@pytest.fixture(scope="module")
def trained(mesh, tmp_path_factory) -> Path:
    """Return a directory with a base model (`hf`) and a run with adapters of rank 8, which tests must not change."""
    directory = tmp_path_factory.mktemp("trained")
    hf_dir = make_tiny_hf(directory / "hf", "qwen3", depth=1, with_tokenizer=True)
    train(options_in(directory, hf_dir)(tuner_type="lora", train_iters=1, lora_rank=8), mesh)
    return directory


def test_adapters_of_another_model_are_refused(trained, mesh, tmp_path):
    run = trained / "run"
    convert(ExportArgs(to_hf=True, model=str(run), output_dir=str(tmp_path / "adapter"), merge_lora=False), mesh)
    other = make_tiny_hf(tmp_path / "other", "qwen3", depth=1, with_tokenizer=True, seed=1)
    refused = pytest.raises(UserError, match=naming(f"--adapters {other} config.json"))
    with refused, with_adapters(resolve(other), str(tmp_path / "adapter")):
        pass
    smaller = make_tiny_hf(tmp_path / "smaller", "qwen3", depth=1, with_tokenizer=True, num_hidden_layers=1)
    tensors = load_file(tmp_path / "adapter/adapter_model.safetensors")
    save_file(tensors, tmp_path / "adapter/adapter_model.safetensors")  # as others write it: without a digest
    (tmp_path / "adapter/mtp_heads.safetensors").unlink()
    refused = pytest.raises(UserError, match=r"--adapters .*\n.* model\.layers\.1\.")
    with refused, with_adapters(resolve(smaller), str(tmp_path / "adapter")):
        pass


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        (lambda files: files["config"].update(r=0), "ValueError: r 0"),
        (lambda files: files["config"].update(r=4), "A (8, B 8) r 4"),
        (lambda files: files["tensors"].clear(), "adapter_model.safetensors"),
        (lambda files: files["tensors"].update(wide(files["tensors"])), "9)"),
        (
            lambda files: files["tensors"].update({"base_model.model.lm_head.weight": torch.zeros(3, 4)}),
            "lm_head.weight",
        ),
    ],
)
def test_adapters_that_do_not_fit_are_refused(trained, mesh, tmp_path, changed, why):
    """PEFT does not write a digest of the base model, so names and shapes are checked."""
    directory, run = tmp_path / "adapter", trained / "run"
    convert(ExportArgs(to_hf=True, model=str(run), output_dir=str(directory), merge_lora=False, mtp="strip"), mesh)
    config = json.loads((directory / "adapter_config.json").read_text())
    files = {"config": config, "tensors": load_file(directory / "adapter_model.safetensors")}
    changed(files)
    (directory / "adapter_config.json").write_text(json.dumps(files["config"]))
    save_file(files["tensors"], directory / "adapter_model.safetensors")
    with pytest.raises(UserError, match=naming(why)), with_adapters(resolve(trained / "hf"), str(directory)):
        pass


def wide(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Replace an A by one with 9 inputs."""
    key = next(key for key in tensors if key.endswith("lora_A.weight"))
    return {key: torch.zeros(len(tensors[key]), 9)}


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        pytest.param({"tuner_type": "full"}, "--merge_lora checkpoint-1", marks=pytest.mark.slow),
        ({"mtp_mode": "heads_only"}, "--merge_lora PEFT MTP"),
    ],
)
def test_what_peft_has_no_place_for_is_refused(options, mesh, tmp_path, changed, why):
    run = train(options(**{"tuner_type": "lora", "train_iters": 1} | changed), mesh)
    with pytest.raises(UserError, match=naming(why)):
        convert(ExportArgs(to_hf=True, model=str(run), output_dir=str(tmp_path / "adapter"), merge_lora=False), mesh)
    assert not (tmp_path / "adapter").exists()
    convert(ExportArgs(to_hf=True, model=str(run), output_dir=str(tmp_path / "merged")), mesh)


def test_adapters_of_experts_are_merged(options, mesh, tmp_path):
    base = make_tiny_hf(tmp_path / "base", "qwen3_moe", depth=1, with_tokenizer=True)
    run = train(options(model=str(base), tuner_type="lora", lr=1e-2, train_iters=2), mesh)
    convert(ExportArgs(to_hf=True, model=str(run), output_dir=str(tmp_path / "merged")), mesh)
    before, after = (load_file(place / "model.safetensors") for place in (base, tmp_path / "merged"))
    changed = {key for key in before if not torch.equal(before[key], after[key])}
    assert changed == {key for key in before if re.search(r"_proj(\.weight)?$|mtp\.fc\.", key)}
    with pytest.raises(UserError, match=naming("--merge_lora PEFT transformers")):
        convert(ExportArgs(to_hf=True, model=str(run), output_dir=str(tmp_path / "adapter"), merge_lora=False), mesh)
