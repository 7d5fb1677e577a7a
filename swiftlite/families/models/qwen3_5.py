"""Qwen3.5 and 3.6, dense and with experts: Qwen3-Next's layers with separate projections in files.

Most of these models are vision-language models. The settings of the language model are under `text_config` in
config.json (see `bridge/hf_config.py`), and the names of its tensors start with `model.language_model.`. The tensors of
the vision tower start with `model.visual.`. All other tensors are copied unchanged.

See also `qwen3_next.py`.
"""

from functools import partial

from swiftlite.families import dense
from swiftlite.families.architecture import Outside
from swiftlite.families.family import HfConfig
from swiftlite.families.layer import Layer
from swiftlite.families.models import qwen2_moe, qwen3_moe, qwen3_next
from swiftlite.families.serving import vllm
from swiftlite.families.serving.convention import Convention, Serving
from swiftlite.families.vision import Qwen3Vision

# In models with experts, all layers are mixtures, and the selected scores are divided by their sum.
_ALL_MIXTURES = {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}


def _check(hf_config: HfConfig) -> None:
    dense.refuse(hf_config, qwen3_next.hybrid_problems(hf_config))


def _check_mixture(hf_config: HfConfig) -> None:
    problems = qwen3_next.hybrid_problems(
        {"intermediate_size": 0, **hf_config},  # there are no dense MLPs
        **{key: (value, None) for key, value in _ALL_MIXTURES.items()},
    )
    problems += qwen2_moe.shared_expert_problems(hf_config)
    dense.refuse(hf_config, problems + qwen3_moe.mixture_problems({**hf_config, **_ALL_MIXTURES}))


def _layer(hf_config: HfConfig, number: int) -> Layer:
    return Layer(qwen3_next.attention(hf_config, number, hf_is_grouped=False), dense.mlp(hf_config))


def _layer_of_mixture(hf_config: HfConfig, number: int) -> Layer:
    mlp = qwen2_moe.mlp({**hf_config, **_ALL_MIXTURES}, number)
    return Layer(qwen3_next.attention(hf_config, number, hf_is_grouped=False), mlp, qwen2_moe.SHARED_EXPERT)


def _outside_wrapped(hf_config: HfConfig) -> Outside:
    return dense.in_wrapper(qwen3_next.outside(hf_config))


_family = partial(dense.family, norm_start=0.0)
_text = partial(_family, outside=qwen3_next.outside)
_wrapped = partial(
    _family,
    outside=_outside_wrapped,
    vision=Qwen3Vision.of,
    language_model=("model.language_model.", "lm_head.", "mtp."),
)


def _serving(draft: str, llamacpp: str) -> Serving:
    return Serving(
        # All heads share one projection and one set of norms.
        vllm=Convention(draft, "first", quantizes=vllm.FUSION, has_own_names=True, needs_torchvision=True),
        sglang=Convention("Qwen3_5ForCausalLMMTP", "one"),
        llamacpp=llamacpp,
    )


_DENSE, _MIXTURE = _serving("Qwen3_5MTP", "qwen35"), _serving("Qwen3_5MoeMTP", "qwen35moe")
_NO_HEADS = {"mtp_num_hidden_layers": 0}
_TINY = {**qwen3_next.TINY_LINEAR, **_NO_HEADS}
_TINY_MIXTURE = {**qwen3_next.QWEN3_NEXT.tiny, **_NO_HEADS}
QWEN3_5_TEXT = _text(name="qwen3_5_text", check=_check, layer=_layer, serving=_DENSE, tiny=_TINY)
QWEN3_5 = _wrapped(name="qwen3_5", check=_check, layer=_layer, serving=_DENSE, tiny=_TINY)
QWEN3_5_MOE_TEXT = _text(
    name="qwen3_5_moe_text", check=_check_mixture, layer=_layer_of_mixture, serving=_MIXTURE, tiny=_TINY_MIXTURE
)
QWEN3_5_MOE = _wrapped(
    name="qwen3_5_moe", check=_check_mixture, layer=_layer_of_mixture, serving=_MIXTURE, tiny=_TINY_MIXTURE
)
