# Sourced by quickstart.sh: a pretrained model, $MODEL, gets a head that vLLM drafts with. Everything goes to $out.

questions=${QUESTIONS:-320}
held_out=24

step "1/5 questions about the standard library, as its documentation has them"
mkdir -p "$out"
rm -rf "$out/questions.jsonl" "$out/answers" "$out/run" "$out/hf" "$out/served.jsonl" "$out/served.jsonl.args.json"
python "$root/scripts/make_question_dataset.py" --output "$out/questions.jsonl" --max_rows "$questions"

step "2/5 the model answers them"
say "A head is to say what the model itself would say; so it learns from the model's own answers." \
    "Expect one to three minutes; vLLM needs half a minute to start."
show_and_run swiftlite regenerate --model "$MODEL" --dataset "$out/questions.jsonl" --output_dir "$out/answers" \
    --infer_backend vllm --max_batch_size 64 --max_new_tokens 128
head -n "$held_out" "$out/answers/dataset.jsonl" >"$out/answers/val.jsonl"
tail -n +"$((held_out + 1))" "$out/answers/dataset.jsonl" >"$out/answers/train.jsonl"

step "3/5 a head from nothing, on the answers; the model itself stays bit for bit"
say "The head begins as a copy of the last layer behind a projection that is fitted to the answers, and then trains." \
    "Expect two to four minutes; drafts accepted on held-out questions rise from about 40 % to about 50 %."
show_and_run swiftlite megatron sft --model "$MODEL" --dataset "$out/answers/train.jsonl" \
    --val_dataset "$out/answers/val.jsonl" --output_dir "$out/run" --mtp_mode heads_only \
    --packing true --max_length 1024 --global_batch_size 1 --train_iters 60 \
    --acceptance_samples 8 --acceptance_max_new_tokens 32

step "4/5 export to Hugging Face format"
show_and_run swiftlite export --to_hf --model "$out/run" --output_dir "$out/hf"

step "5/5 vLLM without and with the head, one question at a time, questions held out from training"
say "Expect two to three minutes. float32, so that the answers must be equal to the last token."
show_and_run swiftlite infer --model "$out/hf" --infer_backend vllm --speculative mtp --compare \
    --val_dataset "$out/answers/val.jsonl" --max_new_tokens 96 --max_batch_size 1 --torch_dtype float32 \
    --result_path "$out/served.jsonl" --acceptance_json "$out/run/acceptance.json" 2>&1 | tee "$out/served.log"

swiftlite report "$out/run" # now with what vLLM counted
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


def said(beginning: str) -> list[str]:
    lines = [line.removeprefix("swiftlite: ") for line in log.splitlines()]
    return [line for line in lines if beginning in line]


print("three answers, each written with the head's drafts")
rows = [json.loads(line) for line in (out / "served.jsonl").read_text().splitlines()]
rows.sort(key=lambda row: row["finish_reason"] != "stop")  # those first that are not cut
for row in rows[:3]:
    question, answer = row["messages"][-2:]
    print(f"\n    > {shorten(question['content'], 200, placeholder=' …')}")
    for paragraph in answer["content"][:500].splitlines():
        print(f"    {paragraph}")
print(f"""
drafts accepted on held-out questions
    before training    {generated(report["before"]["generated"])}
    after training     {generated(report["after"]["generated"])}
    in vLLM            {generated(report["engines"]["vllm"])}
""")
for line in said("tokens/s") + said("answers equal"):
    print(f"    {line}")
print(f"""
everything is in {out}
    questions.jsonl    what was asked
    answers/           what the model answered: the training data, and the questions held out
    run/               checkpoints, acceptance.json, run_report.html: open it in a browser
    hf/                the export: the same model with a head; opens in transformers, vLLM and SGLang
""")
PYTHON
cat <<TEXT
what to try next
    source $venv/bin/activate
  chat with it, on transformers; faster, after a longer start, with --infer_backend vllm
    swiftlite infer --model $out/hf --speculative mtp
  serve it
    swiftlite deploy --model $out/hf
  train the head for longer: more questions, better drafts
    QUESTIONS=2000 bash $root/scripts/quickstart.sh
  your own model and data
    swiftlite regenerate --model org/name --dataset your.jsonl --infer_backend vllm --output_dir answers
    swiftlite megatron sft --model org/name --dataset answers/dataset.jsonl --mtp_mode heads_only --output_dir run
TEXT
