"""GLM-5 and GLM-5.2: the layers and MTP heads of DeepSeek-V3.2.

In GLM-5.2, only every fourth layer has an indexer; the layers after it use its selection. All heads have one.
"""

from functools import partial

from swiftlite.families import dense, moe
from swiftlite.families.family import HfConfig
from swiftlite.families.models import deepseek_v32
from swiftlite.families.serving import sglang, vllm
from swiftlite.families.serving.convention import Convention, Serving


def _check(hf_config: HfConfig) -> None:
    dense.refuse(hf_config, deepseek_v32.problems_of(hf_config, rope_interleave=True))


GLM_MOE_DSA = dense.family(
    name="glm_moe_dsa",
    check=_check,
    layer=partial(deepseek_v32.layer, rope_interleave=True),  # in indexers, as in transformers
    mtp=moe.NEXT_LAYER_HEADS,
    serving=Serving(
        # On GPUs; vLLM does not support sparse attention on CPUs, so this was read from its code.
        vllm=vllm.next_layer("DeepseekV32MTP"),
        sglang=Convention("GlmMoeDsaForCausalLMNextN", "one", block=sglang.DECODER),
    ),
    tiny={
        **deepseek_v32.DEEPSEEK_V32.tiny,
        "n_routed_experts": 4,
        "n_group": 1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
)
