"""What each engine does with a family's MTP heads: one table, read by training, serving, tests and docs/en/serving.md.

Measured, every line: the running engine's counts of accepted drafts equal those of an independent reference.

Nothing here is a choice of ours. Engines differ from training in which state they feed a head and in how many heads
they run, and none of them says so: the text stays right, only the acceptance falls.
"""

from dataclasses import dataclass
from typing import Literal

State = Literal["before norm", "after norm"]


@dataclass(frozen=True)
class Convention:
    """How one engine drafts with one family's heads.

    Args:
        draft: the class that runs the heads, as the engine prints it.
        heads: which of several heads draft. each: every head its own step. first: the first one every step, the others
            never. last: all are loaded into one place, so the last one stays and drafts every step. one: a checkpoint
            with more is refused.
        takes: the trunk's state that the first draft step is fed, by the trunk's final norm.
        recycles: a head's own state that it is fed when it goes on alone, by its output norm.
        zeroes_first_embedding: whether a head sees zeros for the embedding of the token at position 0.
        projection: what the head's projection takes, in the order of its columns in the family's files.
    """

    draft: str
    heads: Literal["each", "first", "last", "one"] = "each"
    takes: State = "after norm"
    recycles: State = "after norm"
    zeroes_first_embedding: bool = False
    projection: Literal["embedding, hidden", "hidden, embedding"] = "embedding, hidden"

    def num_heads(self, depth: int) -> int:
        """Distinct heads that draft, of a checkpoint's `depth`."""
        return depth if self.heads == "each" else min(depth, 1)


# engine -> HF model_type -> convention. transformers: our heads around its trunk, as trained
# (engines/transformers/mtp_heads.py). vllm: 0.32, where the classes of Llama and the Qwens are our plugin's, which run
# each head on a GPU alone (engines/vllm/plugin.py). sglang: 0.5.23, where those of Llama, Qwen2 and Qwen3 are ours
# (engines/sglang/plugin.py).
CONVENTIONS: dict[str, dict[str, Convention]] = {
    "transformers": {
        "llama": Convention("MtpHead"),
        "qwen2": Convention("MtpHead"),
        "qwen3": Convention("MtpHead"),
        "mimo": Convention("MtpHead", takes="before norm", zeroes_first_embedding=True, projection="hidden, embedding"),
        "qwen3_moe": Convention("MtpHead"),
        "glm4_moe": Convention("MtpHead", recycles="before norm", zeroes_first_embedding=True),
        "deepseek_v3": Convention("MtpHead", zeroes_first_embedding=True),
    },
    "vllm": {
        "llama": Convention("LlamaMTPModel"),
        "qwen2": Convention("Qwen2MTPModel"),
        "qwen3": Convention("Qwen3MTPModel"),
        "mimo": Convention(
            "MiMoMTP",
            "first",  # asserts that the draft step is 0
            takes="before norm",
            zeroes_first_embedding=True,
            projection="hidden, embedding",
        ),
        "qwen3_moe": Convention("Qwen3MoeMTPModel"),
        # The classes of GLM-4.5 and DeepSeek-V3 could run more; they were published with one head, and nobody has
        # measured two.
        "glm4_moe": Convention("Glm4MoeMTP", "first", recycles="before norm", zeroes_first_embedding=True),
        "deepseek_v3": Convention("DeepSeekMTP", "first", zeroes_first_embedding=True),
    },
    "sglang": {
        "llama": Convention("LlamaForCausalLMMTP", "one"),
        "qwen2": Convention("Qwen2ForCausalLMMTP", "one"),
        "qwen3": Convention("Qwen3ForCausalLMMTP", "one"),
        "mimo": Convention("MiMoMTP", "last", zeroes_first_embedding=True, projection="hidden, embedding"),
        "qwen3_moe": Convention("Qwen3MoeForCausalLMMTP", "first"),
        "glm4_moe": Convention("Glm4MoeForCausalLMNextN", "one"),
        "deepseek_v3": Convention("DeepseekV3ForCausalLMNextN", "one"),
    },
}


def convention(engine: str, model_type: str) -> Convention:
    """How an engine that --infer_backend takes drafts with the heads of a family."""
    return CONVENTIONS[engine][model_type]
