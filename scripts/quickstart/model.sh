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
served=$faster/$best/hf run=$faster/$best/run
if [ "$best" = model ]; then # the heads of $MODEL were better than the trained ones
    served=$MODEL run=$faster/round-1/run
fi

step "2/2 done"
cat <<TEXT
    source $venv/bin/activate
  start a server: the command above, after "Serve it"
  chat
    swiftlite infer --model $served --speculative mtp,ngram
  pages for a browser: the training and the measured speed
    $run/run_report.html
    $faster/$best/bench/bench.html
  continue from these heads (this script would replace the directory), or use your own prompts or another model
    swiftlite speedup --model $MODEL --output_dir $faster --budget 1h --concurrency 1
    swiftlite speedup --model $MODEL --output_dir mine --budget 1h --dataset FILE
    swiftlite speedup --model org/name --output_dir faster --budget 1h
  write a GGUF file with the heads for llama.cpp
    swiftlite export --to_gguf --model $served --output_dir $faster/gguf --gguf_type q8_0
TEXT
