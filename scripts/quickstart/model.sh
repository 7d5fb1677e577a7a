# Sourced by quickstart.sh: trains a head for the pretrained model $MODEL and serves both with vLLM. Writes to $out.

questions=${QUESTIONS:-320}
held_out=24

step "1/5 prompts: questions about the standard library, from its documentation"
mkdir -p "$out"
rm -rf "$out/questions.jsonl" "$out/answers" "$out/run" "$out/hf" "$out/served.jsonl" "$out/served.jsonl.args.json"
python "$root/scripts/make_question_dataset.py" --output "$out/questions.jsonl" --max_rows "$questions"

step "2/5 training data: the model answers the questions"
say "A head predicts the tokens of its own model, so it trains on the answers of that model." \
    "This takes one to three minutes; vLLM starts in half a minute."
show_and_run swiftlite regenerate --model "$MODEL" --dataset "$out/questions.jsonl" --output_dir "$out/answers" \
    --infer_backend vllm --max_batch_size 64 --max_new_tokens 128
head -n "$held_out" "$out/answers/dataset.jsonl" >"$out/answers/val.jsonl"
tail -n +"$((held_out + 1))" "$out/answers/dataset.jsonl" >"$out/answers/train.jsonl"

step "3/5 training: a new head on the answers, with a frozen trunk"
say "The head starts as a copy of the last layer, after a projection that is fitted to the answers." \
    "This takes two to four minutes; acceptance on held-out questions rises from about 40 % to about 50 %."
show_and_run swiftlite megatron sft --model "$MODEL" --dataset "$out/answers/train.jsonl" \
    --val_dataset "$out/answers/val.jsonl" --output_dir "$out/run" --mtp_mode heads_only \
    --packing true --max_length 1024 --global_batch_size 1 --train_iters 60 \
    --acceptance_samples 8 --acceptance_max_new_tokens 32

step "4/5 export to Hugging Face format"
show_and_run swiftlite export --to_hf --model "$out/run" --output_dir "$out/hf"

step "5/5 serving: vLLM without and with the head, one held-out question at a time"
say "This takes two to three minutes. In float32 the answers with and without drafts are equal."
show_and_run swiftlite infer --model "$out/hf" --infer_backend vllm --speculative mtp --compare \
    --val_dataset "$out/answers/val.jsonl" --max_new_tokens 96 --max_batch_size 1 --torch_dtype float32 \
    --result_path "$out/served.jsonl" --acceptance_json "$out/run/acceptance.json" 2>&1 | tee "$out/served.log"

swiftlite report "$out/run" # again, with the counts of vLLM
step "done"
python - "$out" <<'PYTHON'
import json
import sys
from pathlib import Path
from textwrap import shorten

out = Path(sys.argv[1])
report = json.loads((out / "run" / "acceptance.json").read_text())
log = (out / "served.log").read_text()


def generated(of: dict) -> str:
    share = of["accepted"] / max(1, of["drafted"])
    return f"{of['accepted']} of {of['drafted']} drafted tokens ({share:.1%}), {of['prompts']} questions"


def lines_with(text: str) -> list[str]:
    lines = [line.removeprefix("swiftlite: ") for line in log.splitlines()]
    return [line for line in lines if text in line]


print("three answers, generated with drafts")
rows = [json.loads(line) for line in (out / "served.jsonl").read_text().splitlines()]
rows.sort(key=lambda row: row["finish_reason"] != "stop")  # complete answers first
for row in rows[:3]:
    question, answer = row["messages"][-2:]
    print(f"\n    > {shorten(question['content'], 200, placeholder=' …')}")
    for paragraph in answer["content"][:500].splitlines():
        print(f"    {paragraph}")
print(f"""
accepted draft tokens on held-out questions
    before training    {generated(report["before"]["generated"])}
    after training     {generated(report["after"]["generated"])}
    in vLLM            {generated(report["engines"]["vllm"])}
""")
for line in lines_with("tokens/s") + lines_with("answers equal"):
    print(f"    {line}")
print(f"""
files in {out}
    questions.jsonl    the prompts
    answers/           the answers of the model: training data and held-out questions
    run/               checkpoints, acceptance.json, run_report.html (open it in a browser)
    hf/                the export: model and head, for transformers, vLLM and SGLang
""")
PYTHON
cat <<TEXT
next steps
    source $venv/bin/activate
  chat with transformers (--infer_backend vllm is faster but starts more slowly)
    swiftlite infer --model $out/hf --speculative mtp
  start a server
    swiftlite deploy --model $out/hf
  train longer on more questions, for a higher acceptance
    QUESTIONS=2000 bash $root/scripts/quickstart.sh
  use your own model and data
    swiftlite regenerate --model org/name --dataset your.jsonl --infer_backend vllm --output_dir answers
    swiftlite megatron sft --model org/name --dataset answers/dataset.jsonl --mtp_mode heads_only --output_dir run
TEXT
