# Sourced by quickstart.sh: makes the pretrained model $MODEL faster with `swiftlite speedup`. Writes to $out.

faster=$out/faster

step "1/2 speedup: the model writes prompts, answers them, and a head learns to draft the answers"
say "Every command is shown before it runs; you can run each of them by hand." \
    "The time is limited to ${BUDGET:=8m}; a larger budget gives better heads: BUDGET=1h bash scripts/quickstart.sh"
rm -rf "$faster"
mkdir -p "$out"
show_and_run swiftlite speedup --model "$MODEL" --output_dir "$faster" --budget "$BUDGET" --concurrency 1

best=$(python - "$faster" <<'PYTHON'
import json
import sys
from pathlib import Path

acceptance = json.loads((Path(sys.argv[1]) / "speedup.json").read_text())["acceptance"]
print(max(acceptance, key=lambda name: sum(acceptance[name])))
PYTHON
)

step "2/2 done"
cat <<TEXT

files in $faster
    speedup.json       seconds and acceptance of each step
    $best/run       the training run, with run_report.html (open it in a browser)
    $best/bench     the measured speed, with bench.html
    $best/hf        the export: model and head, for transformers, vLLM and SGLang

next steps
    source $venv/bin/activate
  start a server: the command above, after "Serve it"
  continue from these heads
    swiftlite speedup --model $MODEL --output_dir $faster --budget 1h --concurrency 1
  chat with transformers
    swiftlite infer --model $faster/$best/hf --speculative mtp
  write a GGUF file for llama.cpp, and count the drafts that it accepts on the held-out prompts
    swiftlite export --to_gguf --model $faster/$best/hf --output_dir $faster/gguf --gguf_type q8_0 \\
        --val_dataset $faster/held_out.jsonl
    llama-server -m $faster/gguf/gguf-q8_0.gguf --spec-type draft-mtp --spec-draft-n-max 3
  specialize the heads in questions about Python's standard library
    python $root/scripts/make_question_dataset.py --output $out/questions.jsonl
    swiftlite speedup --model $MODEL --dataset $out/questions.jsonl --output_dir $out/python --budget 1h
  use another model
    swiftlite speedup --model org/name --output_dir faster --budget 1h
TEXT
