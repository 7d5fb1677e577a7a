# Sourced by quickstart.sh --tiny: trains a randomly initialized model of five million parameters and its head on the
# docstrings of the standard library. Writes to $out.

export HF_HUB_OFFLINE=1 # nothing below is downloaded

step "1/4 model and data: a tiny model, docstrings of the standard library"
mkdir -p "$out"
rm -rf "$out/model" "$out/data" "$out/run" "$out/hf" "$out/answers.jsonl"
python "$root/scripts/make_tiny_model.py" --family qwen3 --output_dir "$out/model"
python "$root/scripts/make_docstring_dataset.py" --output "$out/data/train.jsonl" --val_output "$out/data/val.jsonl" \
    --val_rows 32

step "2/4 training: trunk and MTP head together"
show_and_run swiftlite megatron sft --model "$out/model" --dataset "$out/data/train.jsonl" \
    --val_dataset "$out/data/val.jsonl" --output_dir "$out/run" --torch_dtype float32 \
    --mtp_num_layers 1 --mtp_init random --mtp_loss_scaling_factor 0.3 \
    --micro_batch_size 16 --global_batch_size 16 --max_length 256 --train_iters 400 --lr 2e-3 \
    --logging_steps 10 --acceptance_samples 32 --acceptance_max_new_tokens 48

step "3/4 export to Hugging Face format"
show_and_run swiftlite export --to_hf --model "$out/run" --output_dir "$out/hf"

step "4/4 serving: vLLM without and with the head, on held-out prompts"
show_and_run swiftlite infer --model "$out/hf" --infer_backend vllm --speculative mtp --compare \
    --val_dataset "$out/data/val.jsonl" --max_new_tokens 48 --torch_dtype float32 \
    --result_path "$out/answers.jsonl" --acceptance_json "$out/run/acceptance.json"

step "done"
python - "$out" <<'PYTHON'
import json
import sys
from pathlib import Path

out = Path(sys.argv[1])
report = json.loads((out / "run" / "acceptance.json").read_text())


def generated(of: dict) -> str:
    return f"{of['accepted']} of {of['drafted']} drafted tokens ({of['accepted'] / max(1, of['drafted']):.1%})"


print(f"""
accepted draft tokens on held-out prompts
    before training       {generated(report["before"]["generated"])}
    after training        {generated(report["after"]["generated"])}
    in vLLM               {generated(report["engines"]["vllm"])}

files in {out}
    model/            the untrained model        data/   questions about the standard library and answers
    run/              checkpoints, metrics.jsonl, run_report.json, acceptance.json
    hf/               the export, for transformers and vLLM
    answers.jsonl     the answers of vLLM
""")
PYTHON
cat <<TEXT
next steps
    source $venv/bin/activate
  chat with transformers
    swiftlite infer --model $out/hf --speculative mtp
  check that the tensors match config.json
    swiftlite doctor --model $out/hf
  train the head only; the trunk stays bitwise identical
    swiftlite megatron sft --model $out/hf --dataset $out/data/train.jsonl --mtp_mode heads_only --output_dir $out/heads
  more examples
    ls $root/examples
TEXT
