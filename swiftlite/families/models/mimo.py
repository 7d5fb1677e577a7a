"""MiMo: a Qwen2 trunk (q, k, v biases) published with MTP heads.

The input of a head's projection is [hidden, embedding], but the input of megatron-core's `eh_proj` is [embedding,
hidden]. The two halves of the projection's columns are therefore swapped. Without the swap, generated text would still
be correct, but drafts would never be accepted.
"""

from functools import partial

from swiftlite.base.drafting import Drafting
from swiftlite.bridge.join import SwapHalves
from swiftlite.bridge.rows import Row
from swiftlite.families import dense
from swiftlite.families.family import HfConfig, MtpLayout
from swiftlite.families.serving import vllm
from swiftlite.families.serving.convention import Convention, Serving


def _frame_rows(hf_config: HfConfig, head: int) -> list[Row]:
    names = ("input_proj", "token_layernorm", "hidden_layernorm", "final_layernorm")
    return dense.frame_rows(hf_config, head, f"model.mtp_layers.{head}.", names, SwapHalves(axis=1))


MIMO = dense.family(
    name="mimo",
    check=dense.check,
    layer=partial(dense.layer, qkv_bias=True),
    mtp=MtpLayout(
        dense.numbered(r"model\.mtp_layers\.(\d*)"),
        lambda hf_config, head: f"model.mtp_layers.{head}.",
        _frame_rows,
        drafting=Drafting(takes_before_norm=True, zeroes_first_embedding=True),
    ),
    serving=Serving(
        vllm=vllm.next_layer("MiMoMTP", has_own_names=True),
        sglang=Convention("MiMoMTP", "last", Drafting(zeroes_first_embedding=True), block=""),
        llamacpp="glm4moe",
        transformers="swiftlite.engines.transformers.language_models:mimo",
    ),
)
