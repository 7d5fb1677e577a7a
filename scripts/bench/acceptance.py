"""Compare the acceptance measurement of a training run with `transformers.generate` in time and memory.

Before its first step, a run of `sft` continues prompts greedily and predicts drafts with its heads. This script
compares it with `generate` without heads and with all prompts in one batch; model, prompts, precision and threads are
the same. Both programs run in alternating subprocesses, each once to warm up and once measured. Memory is the growth of
the process after loading the model.

    python scripts/bench/acceptance.py --model DIR
    python scripts/bench/acceptance.py --model DIR --num_prompts 4 --max_new_tokens 16 --torch_dtype bfloat16
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from contest import race, timed

SCRIPTS = Path(__file__).resolve().parents[1]
MAX_PROMPT_WORDS = 80
Texts = list[list[int]]
GetTexts = Callable[[], Texts]


def make_prompts(args: argparse.Namespace) -> Texts:
    """Return questions about Python's standard library with different lengths, as token ids."""
    sys.path.insert(0, str(SCRIPTS))
    from make_docstring_dataset import stdlib_entries
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    entries = list(stdlib_entries())
    prompts = []
    for entry in entries[:: len(entries) // args.num_prompts][: args.num_prompts]:
        text = " ".join(entry.docstring.split()[:MAX_PROMPT_WORDS])
        messages = [{"role": "user", "content": f"Say in other words: {text}"}]
        encoded = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
        prompts.append(list(encoded["input_ids"]))
    return prompts


def generate(args: argparse.Namespace, prompts: Texts) -> tuple[GetTexts, GetTexts]:
    """Return functions that generate with transformers, in one batch with left padding."""
    import torch
    from transformers import AutoModelForCausalLM

    dtype = getattr(torch, args.torch_dtype)
    loaded: Any = AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype, attn_implementation="sdpa")
    model = loaded.eval()
    longest = max(map(len, prompts))
    tokens_BS = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask_BS = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])

    def run() -> Texts:
        rows_BS = model.generate(
            tokens_BS,
            attention_mask=mask_BS,
            max_new_tokens=args.max_new_tokens,
            do_sample=False,
            repetition_penalty=1.0,
            pad_token_id=0,
        )
        return rows_BS[:, longest:].tolist()

    return run, run


def measure(args: argparse.Namespace, prompts: Texts) -> tuple[GetTexts, GetTexts]:
    """Return functions that generate with swiftlite.

    A model without heads gets a head that is a copy of the last layer.
    """
    import torch

    from swiftlite.acceptance.greedy import GreedyRow, GreedyRows
    from swiftlite.acceptance.held_out import HeldOut, Prompt
    from swiftlite.base.heads import Heads
    from swiftlite.data.template import ChatTemplate, load_tokenizer, stop_token_ids
    from swiftlite.families.resolved import resolve
    from swiftlite.model.open import open_model
    from swiftlite.runtime.distributed import session

    hf_model = resolve(args.model)
    has_heads = bool(hf_model.heads.drafts)
    mesh = args.stack.enter_context(session())
    (model,), _ = open_model(
        hf_model,
        mesh,
        dtype=getattr(torch, args.torch_dtype),
        heads=hf_model.heads if has_heads else Heads(1),
        mtp_init="checkpoint" if has_heads else "copy_last_layer",
    )
    model.eval()
    held_out = HeldOut(
        path=args.directory / "acceptance.json",
        mesh=mesh,
        num_drafts=model.heads.drafts,
        prompts=[Prompt(prompt) for prompt in prompts],
        eos_token_ids=stop_token_ids(ChatTemplate(load_tokenizer(args.model)), args.model),
        max_new_tokens=args.max_new_tokens,
        max_length=hf_model.config["max_position_embeddings"],
    )

    @torch.no_grad()
    def texts() -> Texts:
        rows = [GreedyRow.of(prompt, args.max_new_tokens, held_out.max_length) for prompt in prompts]
        greedy = GreedyRows([model], mesh, rows, held_out.eos_token_ids)
        while greedy.num_unfinished:
            greedy.step()
        return [row.tokens[row.first :] for row in rows]

    def run() -> Texts:
        held_out.measure("before", [model], {f"eval_mtp_{k + 1}_acceptance": 0.0 for k in range(model.heads.drafts)})
        return []

    return texts, run


CONTESTANTS = {"generate": generate, "acceptance": measure}


def compete(args: argparse.Namespace) -> dict[str, Any]:
    """Run one of the two programs in this process. Return its texts, and the seconds and bytes of the second run."""
    prompts = json.loads(args.prompts.read_text())
    with ExitStack() as args.stack, tempfile.TemporaryDirectory() as directory:
        args.directory = Path(directory)
        warm_up, run = CONTESTANTS[args.contestant](args, prompts)
        before = memory("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak of loading the model
        texts = warm_up()
        seconds, _ = timed(run)
        return {"texts": texts, "seconds": seconds, "bytes": memory("VmHWM") - before}


def memory(name: str) -> int:
    """Return the memory of this process in bytes: current (VmRSS) or peak (VmHWM)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face model directory, with a tokenizer")
    parser.add_argument("--torch_dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--num_prompts", type=int, default=16)
    parser.add_argument("--max_new_tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--contestant", choices=CONTESTANTS, help=argparse.SUPPRESS)
    parser.add_argument("--prompts", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.contestant:
        print(json.dumps(compete(args)))
        return
    with tempfile.TemporaryDirectory() as directory:
        args.prompts = Path(directory) / "prompts.json"
        prompts = make_prompts(args)
        args.prompts.write_text(json.dumps(prompts))
        results = race(CONTESTANTS, args.rounds, args.threads, "--prompts", args.prompts)
    lengths = sorted(map(len, prompts))
    print(f"{len(prompts)} prompts of {lengths[0]} to {lengths[-1]} tokens, {args.max_new_tokens} new ones each")
    theirs, ours = results["generate"], results["acceptance"]
    same = sum(is_same(*pair) for pair in zip(theirs[0]["texts"], ours[0]["texts"], strict=True))
    print(f"same text: {same} of {len(prompts)}")
    rival = statistics.median(one["seconds"] for one in theirs)
    for name, found in results.items():
        seconds = statistics.median(one["seconds"] for one in found)
        fastest = min(one["seconds"] for one in found)
        growth = max(one["bytes"] for one in found) / 2**20
        print(f"{name:<12}{seconds:7.1f} s (fastest {fastest:.1f})  {seconds / rival:5.2f}x  grew {growth:6.0f} MiB")


def is_same(theirs: Sequence[int], ours: Sequence[int]) -> bool:
    """Return whether two texts are equal, ignoring padding at the end."""
    return list(theirs[: len(ours)]) == list(ours) and not any(theirs[len(ours) :])


if __name__ == "__main__":
    main()
