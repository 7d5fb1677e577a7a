#!/usr/bin/env bash
# Train a model to answer sums by rewards (GRPO). Its MTP heads draft the completions and learn from them.
#
#   bash examples/grpo.sh MODEL OUTPUT_DIR     MODEL: a Hugging Face model with MTP heads; without heads nothing is
#                                              drafted
#
# Hardware: 2 CPU cores; 6 GB of memory for the trainer, in addition to that of vLLM; no GPU
# Time:     28 s per step with SmolLM2-135M-Instruct and one head, in bfloat16
# Expect:   within 12 steps the mean reward rises from 0.1 to 0.4 or 0.5; the share of completions that end rises from 0.14
#           to 0.47, that of right ones from 0.02 to between 0.1 and 0.3; rollout/acceptance_1 stays at 0.30
set -euo pipefail
model=${1:?MODEL OUTPUT_DIR} out=${2:?MODEL OUTPUT_DIR}
mkdir -p "$out"

# Half of the sums have one-digit numbers, half two-digit ones.
python - "$out/sums.jsonl" <<'PYTHON'
import json
import random
import sys

random.seed(1)
with open(sys.argv[1], "w") as file:
    for number in range(400):
        low, high = ((1, 9), (10, 49))[number % 2]
        a, b = random.randint(low, high), random.randint(low, high)
        print(json.dumps({"query": f"What is {a} + {b}?", "answer": a + b}), file=file)
PYTHON

# A reward function gets the columns of the rows by name, and returns one number for each completion.
cat >"$out/rewards.py" <<'PYTHON'
import re


def right(completions, answer):
    return [float(re.findall(r"\d+", text)[-1:] == [str(n)]) for text, n in zip(completions, answer)]


def ended(completion_ids):
    return [float(len(ids) < 24) for ids in completion_ids]
PYTHON

swiftlite megatron grpo --model "$model" --dataset "$out/sums.jsonl" --output_dir "$out/run" \
    --reward_funcs right ended --reward_weights 1 0.5 --external_plugins "$out/rewards.py" \
    --num_generations 8 --global_batch_size 64 --micro_batch_size 8 --padding_free true \
    --max_completion_length 24 --max_length 128 --lr 1e-5 --mtp_lr 1e-4 --train_iters 20 \
    --infer_backend vllm

swiftlite export --to_hf --model "$out/run" --output_dir "$out/hf"
