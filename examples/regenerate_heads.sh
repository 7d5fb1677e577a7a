#!/usr/bin/env bash
# Train heads on the model's own answers, the recommended data. An engine accepts a draft if the trunk would generate the
# same token, whatever the answers in a dataset are. The model therefore answers the questions of a dataset, and the heads
# are trained on these answers. The trunk is frozen.
#
# Hardware: 2 CPU cores, 3 GB of memory; no GPU
# Time:     5 to 10 minutes
# Expect:   two lines with the acceptance at each draft position, before and after training; the second line is higher at
#           each position
# Before:   bash scripts/quickstart.sh --tiny && source .venv/bin/activate
set -euo pipefail
cd "$(dirname "$0")/.."
MODEL=${MODEL:-out/tiny/hf}
QUESTIONS=${QUESTIONS:-out/tiny/data/train.jsonl#1000}
VAL=${VAL:-out/tiny/data/val.jsonl}
OUT=${OUT:-out/regenerate_heads}
ENGINE=${ENGINE:-vllm}
ITERS=${ITERS:-200}

swiftlite regenerate --model "$MODEL" --infer_backend "$ENGINE" --dataset "$QUESTIONS" --torch_dtype float32 \
    --max_new_tokens 64 --output_dir "$OUT/answers"
swiftlite megatron sft --model "$MODEL" --dataset "$OUT/answers/dataset.jsonl" --val_dataset "$VAL" --output_dir "$OUT/run" \
    --torch_dtype float32 --mtp_mode heads_only --mtp_loss kl --mtp_unroll 3 \
    --micro_batch_size 16 --global_batch_size 16 --max_length 256 --train_iters "$ITERS" --lr 1e-3 \
    --acceptance_max_new_tokens 32
python - "$OUT/run/acceptance.json" <<'PYTHON'
import json
import sys

with open(sys.argv[1]) as file:
    acceptance = json.load(file)
for when in ("before", "after"):
    print(f"{when:6}", acceptance[when]["generated"]["acceptance_per_position"])
PYTHON
