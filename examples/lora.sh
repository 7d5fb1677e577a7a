#!/usr/bin/env bash
# Train LoRA adapters for the linear layers of trunk and head, with frozen model weights. Export the adapters twice: merged
# into the weights, and as a PEFT directory that `infer --adapters` loads.
#
# Hardware: 2 CPU cores, 2 GB of memory; no GPU
# Time:     1 minute
# Expect:   a decreasing loss; frozen_but_changed is empty; the same answers from both exports
# Before:   bash scripts/quickstart.sh --tiny && source .venv/bin/activate
set -euo pipefail
cd "$(dirname "$0")/.."
MODEL=${MODEL:-out/tiny/hf}
TRAIN=${TRAIN:-out/tiny/data/train.jsonl}
VAL=${VAL:-out/tiny/data/val.jsonl}
OUT=${OUT:-out/lora}

swiftlite megatron sft --model "$MODEL" --dataset "$TRAIN" --val_dataset "$VAL" --output_dir "$OUT/run" \
    --torch_dtype float32 --mtp_num_layers 1 --mtp_init fit_last_layer --tuner_type lora --lora_rank 8 \
    --micro_batch_size 16 --global_batch_size 16 --max_length 256 --train_iters 100 --lr 2e-3 --acceptance_samples 0
swiftlite export --to_hf --model "$OUT/run" --output_dir "$OUT/hf"
swiftlite export --to_hf --model "$OUT/run" --merge_lora false --output_dir "$OUT/adapter"
swiftlite infer --model "$OUT/hf" --val_dataset "$VAL#4" --max_new_tokens 32 --result_path "$OUT/merged.jsonl"
swiftlite infer --model "$MODEL" --adapters "$OUT/adapter" --val_dataset "$VAL#4" --max_new_tokens 32 \
    --result_path "$OUT/adapters.jsonl"
cmp "$OUT/merged.jsonl" "$OUT/adapters.jsonl"
