#!/usr/bin/env bash
# Fine-tune Qwen3-Next-80B-A3B with LoRA adapters on trunk and published MTP head. Export merges them into the weights, under
# the published names, and vLLM serves the result with drafts.
#
# Hardware: 8 x H100 (80 GB), 53 GB used on each; estimated by the first command
# Time:     63 minutes for 1000 steps of 64 rows of 4096 tokens; estimated by the first command
# Expect:   mtp_1_loss falls with the loss; acceptance.json compares the acceptance before and after training
# Before:   pip install -e . vllm; rows in TRAIN and VAL; the model is downloaded from the hub
set -euo pipefail
MODEL=${MODEL:-Qwen/Qwen3-Next-80B-A3B-Instruct}
TRAIN=${TRAIN:-train.jsonl}
VAL=${VAL:-val.jsonl}
OUT=${OUT:-out/qwen3_next}

swiftlite doctor --plan --model "$MODEL" --num_gpus 8 --gpu_type H100 --tuner_type lora \
    --expert_model_parallel_size 8 --micro_batch_size 8 --global_batch_size 64 --max_length 4096 --train_iters 1000 \
    --recompute_granularity full --recompute_method uniform --recompute_num_layers 1
NPROC_PER_NODE=8 swiftlite megatron sft --model "$MODEL" --dataset "$TRAIN" --val_dataset "$VAL" --output_dir "$OUT/run" \
    --tuner_type lora --lora_rank 8 --expert_model_parallel_size 8 --micro_batch_size 8 --global_batch_size 64 \
    --max_length 4096 --train_iters 1000 --lr 1e-4 \
    --recompute_granularity full --recompute_method uniform --recompute_num_layers 1
NPROC_PER_NODE=8 swiftlite export --to_hf --model "$OUT/run" --output_dir "$OUT/hf" --expert_model_parallel_size 8
swiftlite deploy --model "$OUT/hf" --infer_backend vllm --vllm_engine_kwargs '{"tensor_parallel_size": 4}'
