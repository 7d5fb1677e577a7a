#!/usr/bin/env bash
# A finished model whose head should draft better, and whose every other tensor must not move. The run report proves that
# by hash; this prints what it says.
#
# Hardware: 2 CPU cores, 3 GB of memory; no GPU
# Time:     @TIME@
# Expect:   @EXPECT@
# Before:   bash scripts/quickstart.sh && source .venv/bin/activate
set -euo pipefail
cd "$(dirname "$0")/.."
MODEL=${MODEL:-out/quickstart/hf} # has a head already: depth and weights are read from it
TRAIN=${TRAIN:-out/quickstart/data/train.jsonl}
VAL=${VAL:-out/quickstart/data/val.jsonl}
OUT=${OUT:-out/heads_only}

swiftlite megatron sft --model "$MODEL" --dataset "$TRAIN" --val_dataset "$VAL" --output_dir "$OUT/run" \
    --torch_dtype float32 --mtp_mode heads_only --micro_batch_size 16 --global_batch_size 16 --max_length 256 \
    --train_iters 200 --lr 1e-3 --acceptance_max_new_tokens 32
python -c "import json, sys; print(json.dumps(json.load(open(sys.argv[1]))['tensors'], indent=2))" "$OUT/run/run_report.json"
