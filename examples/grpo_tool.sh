#!/usr/bin/env bash
# Train a tiny model to call a tool, by rewards alone (GRPO): a key's value is known only to the tool.
#
#   bash examples/grpo_tool.sh OUTPUT_DIR [OPTIONS]     OPTIONS: further options of megatron grpo, such as
#                                                       --infer_backend vllm
#   TOOL=no bash examples/grpo_tool.sh OUTPUT_DIR       the same without the tool: the reward stays near 0
#
# First, SFT teaches a random model to call after a question mark, and otherwise, nearly always, to answer "unknown".
#
# Hardware: 2 CPU cores; no GPU
set -euo pipefail
out=${1:?OUTPUT_DIR}
shift
here=$(cd "$(dirname "$0")/.." && pwd)
mkdir -p "$out"
python "$here/scripts/make_tiny_model.py" --family mimo --hidden_size 128 --num_layers 2 --vocab_size 1024 \
    --output_dir "$out/tiny"

# The template lists tools, renders calls as Qwen's does, and the results of calls as turns of the role "tool".
cat >"$out/tiny/chat_template.jinja" <<'JINJA'
{%- for tool in tools or [] %}{{ '<|im_start|>tool ' + tool.function.name + '<|im_end|>\n' }}{% endfor %}
{%- for m in messages %}
    {{- '<|im_start|>' + m.role + '\n' + m.content }}
    {%- for call in m.tool_calls or [] %}{{ '<tool_call>' + (call.function | tojson) + '</tool_call>' }}{% endfor %}
    {{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
JINJA

# The model sees the name, the arguments and the docstring, but not the code.
cat >"$out/tools.py" <<'PYTHON'
import hashlib


def lookup(key: str) -> str:
    """
    Look up the value of a key.

    Args:
        key: The key.
    """
    return chr(65 + hashlib.sha256(f"secret {key}".encode()).digest()[0] % 26)
PYTHON

# A completion is the text of the whole conversation after the prompt, so only what follows the last header counts.
cat >"$out/rewards.py" <<'PYTHON'
def right(completions, value):
    answers = [text.rpartition("assistant\n")[2] for text in completions]
    return [float(answer.strip() == each) for answer, each in zip(answers, value)]
PYTHON

# Rows of SFT have random values. Without a question mark, one of 26 has a call; the others never name a value.
python - "$out" <<'PYTHON'
import json
import random
import re
import sys
from string import ascii_uppercase

from tokenizers import Tokenizer

out = sys.argv[1]
sys.path.insert(0, out)
from tools import lookup

random.seed(1)
# A key is one token, because two layers learn slowly to copy several.
vocabulary = Tokenizer.from_file(f"{out}/tiny/tokenizer.json").get_vocab()
keys = random.sample(sorted(token for token in vocabulary if re.fullmatch("[a-z]+", token)), 16)
tools = [{"type": "function", "function": {"name": "lookup"}}]
with open(f"{out}/sft.jsonl", "w") as file:
    for number in range(9600):
        key, value = random.choice(keys), random.choice(ascii_uppercase)
        question = f"{key}?" if number % 52 < 26 else key
        turns = [{"role": "user", "content": question}]
        if number % 52 < 27:
            call = {"name": "lookup", "arguments": {"key": key}}
            turns += [{"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": value}]
            turns.append({"role": "assistant", "content": value})
        else:
            turns.append({"role": "assistant", "content": "unknown"})
        print(json.dumps({"messages": turns, "tools": tools}), file=file)
with open(f"{out}/prompts.jsonl", "w") as file:
    for key in keys:
        print(json.dumps({"query": key, "value": lookup(key)}), file=file)
PYTHON

swiftlite megatron sft --model "$out/tiny" --dataset "$out/sft.jsonl" --output_dir "$out/sft" \
    --torch_dtype float32 --micro_batch_size 32 --global_batch_size 32 --train_iters 300 --lr 3e-3 --max_length 128 \
    --acceptance_samples 0
swiftlite export --to_hf --model "$out/sft" --output_dir "$out/called"

tool=(--tools "$out/tools.py" --max_turns 2)
[ "${TOOL:-yes}" = yes ] || tool=()
swiftlite megatron grpo --model "$out/called" --dataset "$out/prompts.jsonl" --output_dir "$out/run" \
    "${tool[@]}" --reward_funcs right --external_plugins "$out/rewards.py" \
    --torch_dtype float32 --num_generations 8 --global_batch_size 32 --micro_batch_size 32 \
    --max_completion_length 128 --max_length 256 --lr 5e-4 --train_iters 40 "$@"
