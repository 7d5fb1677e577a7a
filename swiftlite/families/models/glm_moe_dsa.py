"""GLM-5 and GLM-5.2: the layers and MTP heads of DeepSeek-V3.2.

In GLM-5.2, only every fourth layer has an indexer; the layers after it use its selection. All heads have one.
"""

from swiftlite.families import dense, moe
from swiftlite.families.family import Family, HfConfig
from swiftlite.families.models import deepseek_v32


def _check(hf_config: HfConfig) -> None:
    dense.refuse(hf_config, deepseek_v32.problems_of(hf_config))


GLM_MOE_DSA = Family(
    name="glm_moe_dsa",
    check=_check,
    layer=deepseek_v32.layer,
    outside=dense.outside,
    mtp=moe.NEXT_LAYER_HEADS,
)
