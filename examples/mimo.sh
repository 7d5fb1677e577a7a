#!/usr/bin/env bash
# Fine-tune MiMo-7B on your rows, and keep its published MTP head: trunk and head are trained together, exported with the
# names of the published checkpoint, and served by vLLM with drafts.
#
# Hardware: 8 x H100 (80 GB), 57 GB used on each; estimated by the first command
# Time:     54 minutes for 1000 steps of 64 rows of 4096 tokens; estimated by the first command
# Expect:   mtp_1_loss falls with the loss; acceptance.json compares the acceptance before and after training
# Before:   pip install -e . vllm; rows in TRAIN and VAL; the model is downloaded from the hub
set -euo pipefail
MODEL=${MODEL:-XiaomiMiMo/MiMo-7B-RL}
TRAIN=${TRAIN:-train.jsonl}
VAL=${VAL:-val.jsonl}
OUT=${OUT:-out/mimo}

swiftlite doctor --plan --model "$MODEL" --num_gpus 8 --gpu_type H100 --tensor_model_parallel_size 2 \
    --micro_batch_size 2 --global_batch_size 64 --max_length 4096 --train_iters 1000
NPROC_PER_NODE=8 swiftlite megatron sft --model "$MODEL" --dataset "$TRAIN" --val_dataset "$VAL" --output_dir "$OUT/run" \
    --tensor_model_parallel_size 2 --micro_batch_size 2 --global_batch_size 64 --max_length 4096 --train_iters 1000 \
    --lr 1e-5 --mtp_loss_scaling_factor 0.3
swiftlite export --to_hf --model "$OUT/run" --output_dir "$OUT/hf"
swiftlite deploy --model "$OUT/hf" --infer_backend vllm
