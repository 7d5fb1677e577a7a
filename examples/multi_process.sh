#!/usr/bin/env bash
# Run the same training three times: in one process, in two processes with tensor parallelism (each holds half of every
# matrix), and in two processes with data parallelism (each trains on half of every batch). The losses of the three runs
# differ only by rounding.
#
# Hardware: 2 CPU cores, 2 GB of memory; no GPU
# Time:     2 minutes
# Expect:   the loss falls from 3.63 to 3.58 in all three runs; the values are equal in at least 6 digits
# Before:   bash scripts/quickstart.sh --tiny && source .venv/bin/activate
set -euo pipefail
cd "$(dirname "$0")/.."
MODEL=${MODEL:-out/tiny/hf}
TRAIN=${TRAIN:-out/tiny/data/train.jsonl}
OUT=${OUT:-out/multi_process}

train() { # NAME OPTION...
    local name=$1
    shift
    swiftlite megatron sft --model "$MODEL" --dataset "$TRAIN#400" --split_dataset_ratio 0 --acceptance_samples 0 \
        --torch_dtype float32 --micro_batch_size 8 --global_batch_size 16 --max_length 256 --train_iters 20 --lr 1e-4 \
        --output_dir "$OUT/$name" "$@"
}
train one_process
NPROC_PER_NODE=2 train tensor_parallel --tensor_model_parallel_size 2
NPROC_PER_NODE=2 train data_parallel
for name in one_process tensor_parallel data_parallel; do
    echo "$name: $(tail -n 1 "$OUT/$name/metrics.jsonl")"
done
