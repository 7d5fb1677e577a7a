#!/usr/bin/env bash
# Train a new head for a model whose weights must not change. Only the tensors of the head are trained. The run report shows
# by hash that all other tensors are bitwise identical; this script prints that part of the report.
#
# Hardware: 2 CPU cores, 2 GB of memory; no GPU
# Time:     1 minute
# Expect:   mtp_1_loss about 3.3 on held-out rows; teacher-forced acceptance rises from 0.24 to about 0.75;
#           frozen_but_changed is empty, and the hashes of the trunk before and after training are the same
# Before:   bash scripts/quickstart.sh --tiny && source .venv/bin/activate
set -euo pipefail
cd "$(dirname "$0")/.."
MODEL=${MODEL:-out/tiny/hf}
TRAIN=${TRAIN:-out/tiny/data/train.jsonl}
VAL=${VAL:-out/tiny/data/val.jsonl}
OUT=${OUT:-out/heads_only}

swiftlite megatron sft --model "$MODEL" --dataset "$TRAIN" --val_dataset "$VAL" --output_dir "$OUT/run" \
    --torch_dtype float32 --mtp_num_layers 1 --mtp_init random --mtp_mode heads_only \
    --micro_batch_size 16 --global_batch_size 16 --max_length 256 --train_iters 300 --lr 2e-3 \
    --acceptance_max_new_tokens 32
python - "$OUT/run/run_report.json" <<'PYTHON'
import json
import sys

with open(sys.argv[1]) as file:
    print(json.dumps(json.load(file)["tensors"], indent=2))
PYTHON
