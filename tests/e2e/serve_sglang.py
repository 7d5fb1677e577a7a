"""A process that starts SGLang for one job after the other, given as JSON; prints one line of JSON for each.

    python tests/e2e/serve_sglang.py '[{"model": DIR, "num_tokens": 3, "prompts": [[1, 2]], "max_new_tokens": 24}]'

A process of its own, because SGLang kills the one it was started from.
"""

import json
import sys
from pathlib import Path
from typing import Any

from swiftlite.errors import UserError
from swiftlite.infer.engine import EngineConfig, Sampling, start_engine


def serve(job: dict[str, Any]) -> dict[str, Any]:
    """Complete the prompts; the first one again up to its sixth token; and ask for what is refused."""
    config = EngineConfig(
        Path(job["model"]),
        "float32",
        num_speculative_tokens=job["num_tokens"],
        max_model_len=256,
        max_batch_size=4,
        engine_kwargs={"max_total_tokens": 4096, **job.get("engine_kwargs", {})},
    )
    try:
        engine = start_engine("sglang", config)
    except UserError as error:
        return {"refused": [str(error)]}
    try:
        completions = engine.generate(job["prompts"], Sampling(job["max_new_tokens"]))
        counts = engine.draft_counts()
        stop = completions[0].token_ids[5]
        (stopped,) = engine.generate(job["prompts"][:1], Sampling(job["max_new_tokens"], stop_token_ids=(stop,)))
        refused = []
        for prompt, temperature in (([1] * 256, 0.0), ([1], 0.5)):
            try:
                engine.generate([prompt], Sampling(1, temperature=temperature))
            except UserError as error:
                refused.append(str(error))
        return {
            "tokens": [completion.token_ids for completion in completions],
            "reasons": sorted({completion.finish_reason for completion in completions}),
            "counts": [counts.drafts, counts.drafted, list(counts.accepted_per_position)],
            "stopped": [stopped.token_ids, stopped.finish_reason],
            "refused": refused,
        }
    finally:
        engine.close()


if __name__ == "__main__":
    for asked in json.loads(sys.argv[1]):
        print(json.dumps(serve(asked)), flush=True)
