"""Define MTP heads with features: the projection of the first draft also reads inputs of decoder layers.

At position s, with h the trunk's state before its final norm, and u_n the input of the trunk's decoder layer n, for the
layers in `Heads.features`:

    draft 1    x = A enorm(embedding of token s + 1) + B [hnorm_0(h); hnorm_1(u_a); hnorm_2(u_b); ...]
    draft k    x = A enorm(embedding of token s + k) + C hnorm_0(y)
    y = decoder layer like that of the family's MTP heads (x)
    logits = output layer of the trunk (norm(y))

In draft k, y is that of the previous draft, before the norm, because the trunk has not read token s + k yet, so it has
no state and no features there. Both projections share A: vLLM passes one state of H numbers to each draft, without its
number. This state is B [...] or C hnorm_0(y), to which the draft model adds the embedding
(`engines/vllm/mtp_features.py`).

Names of tensors are those of Qwen3-Next's heads, as far as it has them.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from swiftlite.base.drafting import Drafting
from swiftlite.base.heads import DRAFTER_KEY, FEATURES_KEY, MTP_FEATURES, Heads
from swiftlite.bridge.rows import HfConfig, Row, lift
from swiftlite.families import eagle3
from swiftlite.families.absent import NoAttention
from swiftlite.families.drafter import Drafter, feature_problems, layer_problems, sources_of_head

if TYPE_CHECKING:
    from swiftlite.families.family import Family

KIND = MTP_FEATURES
DRAFTING = Drafting(takes_before_norm=True, recycles_before_norm=True)
CLASS_ENDING = "MtpFeaturesEagle3"
"""Ending of the names of the plugin's draft classes for vLLM, after the architecture of the trunk. vLLM's method
"eagle3" keeps names that end in Eagle3."""
BLOCK = "mtp.layers.0."
"""Prefix of the decoder layer's HF keys."""
_PREFIX = "mtp."


def declaration(features: Sequence[int]) -> dict[str, Any]:
    """Return what config.json declares for a new head, which has no layer yet."""
    return {"kind": KIND, "layers": 0, FEATURES_KEY: [*features]}


def why_not(family: "Family", hf_config: HfConfig) -> str:
    """Return why a model cannot have this drafter; empty if it can."""
    if family.vision is not None or family.language_model:
        return "it is a vision-language model"
    if any(isinstance(layer.attention, NoAttention) for layer in family.architecture(hf_config).layers):
        return "its layers have attention or an MLP, not both"
    return ""


def own_config(family: "Family", hf_config: HfConfig) -> dict[str, Any]:
    """Return the config.json of the head in a directory of its own, for the draft class of swiftlite's plugin.

    The number of all layers means the output of the last one, before the final norm.
    """
    features = Heads.from_config(hf_config).features
    return {
        **hf_config,
        "architectures": [architecture + CLASS_ENDING for architecture in hf_config["architectures"]],
        "eagle_aux_hidden_state_layer_ids": [*features, hf_config["num_hidden_layers"]],
    }


def _rows(family: "Family", hf_config: HfConfig, layer: int) -> list[Row]:
    hidden, num_states = hf_config["hidden_size"], 1 + len(hf_config[DRAFTER_KEY][FEATURES_KEY])
    shapes = {
        "enorm": ("pre_fc_norm_embedding", (hidden,)),
        "final_layernorm": ("norm", (hidden,)),
        "eh_proj.embedding": ("fc_embedding", (hidden, hidden)),
        "eh_proj.first": ("fc_first", (hidden, num_states * hidden)),
        "eh_proj.later": ("fc_later", (hidden, hidden)),
    }
    shapes |= {f"hnorm.{number}": (f"pre_fc_norm_hidden.{number}", (hidden,)) for number in range(num_states)}
    rows = [Row(f"{mcore}.weight", {f"{_PREFIX}{hf}.weight": shape}) for mcore, (hf, shape) in shapes.items()]
    rows += lift(family.block_rows(hf_config), "transformer_layer.", BLOCK)
    return lift(rows, f"mtp.layers.{layer}.", "")


FEATURE_HEAD = Drafter(
    rows=_rows,
    sources=sources_of_head,
    layer_of=lambda family, hf_config, hf_key: 0 if hf_key.startswith(_PREFIX) else None,
    drafting=lambda family, hf_config: DRAFTING,
    problems=lambda hf_config: feature_problems(hf_config) + layer_problems(hf_config),
    why_not=why_not,
    own_config=own_config,
    vllm_trunks=eagle3.VLLM_TRUNKS,
    vllm_method=eagle3.KIND,
    is_fitted=True,
    needs_plugin=True,
)
