"""DeepSeek-V3.2: DeepSeek-V3 with sparse attention (DSA), whose indexer selects the tokens that each token sees."""

from swiftlite.families import dense, moe
from swiftlite.families.attention import Indexer
from swiftlite.families.family import HfConfig
from swiftlite.families.layer import Layer
from swiftlite.families.models import deepseek_v3
from swiftlite.families.serving import sglang, vllm
from swiftlite.families.serving.convention import Convention, Serving

_REQUIRED = ("first_k_dense_replace", "q_lora_rank", "index_topk", "index_n_heads", "index_head_dim")


def _check(hf_config: HfConfig) -> None:
    problems = problems_of(hf_config)
    if not problems and set(indexer_types(hf_config)) != {"full"}:
        # transformers has an indexer in every layer, whatever these keys say.
        problems.append("index_topk_freq above 1 is not supported; it can only be 1")
    dense.refuse(hf_config, problems)


def problems_of(hf_config: HfConfig, *, rope_interleave: bool = False) -> list[str]:
    """Return a problem (one line) for every setting that is invalid or would be ignored.

    Args:
        rope_interleave: as for `layer`.
    """
    problems = dense.missing_numbers(hf_config, _REQUIRED)
    if not problems:
        # head_dim is not read: it is qk_rope_head_dim in GLM-5, and qk_nope_head_dim in GLM-5.2.
        read = {key: value for key, value in hf_config.items() if key != "head_dim"}
        problems = deepseek_v3.problems_of(
            read,
            layer_types=("indexed_attention", "deepseek_sparse_attention"),  # transformers 5.11 wrote the second
            mlp_bias=(False, None),
            rope_interleave=(True, None),  # transformers does not read it
            index_topk_pattern=(None,),
            indexer_rope_interleave=(rope_interleave, None),  # vLLM reads it, and transformers does not
        )
    if not problems:
        problems = _layer_problems(hf_config)
    return problems


def _layer_problems(hf_config: HfConfig) -> list[str]:
    """Return a problem (one line) for each list whose layers differ from those that other keys describe."""
    layers, num_dense = hf_config["num_hidden_layers"], hf_config["first_k_dense_replace"]
    problems = []
    if hf_config.get("mlp_layer_types") not in (None, ["dense"] * num_dense + ["sparse"] * (layers - num_dense)):
        problems.append(
            f"mlp_layer_types must list 'dense' {num_dense} times (first_k_dense_replace), then 'sparse', for "
            f"{layers} layers"
        )
    if hf_config.get("indexer_types") not in (None, indexer_types(hf_config)):
        problems.append(
            f"indexer_types must list {layers} layers as index_topk_freq and index_skip_topk_offset do, which engines "
            f"read: {' '.join(indexer_types(hf_config))}"
        )
    return problems


def indexer_types(hf_config: HfConfig) -> list[str]:
    """Return for each layer whether it has an indexer ("full"), or uses the selection of an earlier layer
    ("shared").
    """
    frequency, offset = hf_config.get("index_topk_freq") or 1, hf_config.get("index_skip_topk_offset") or 2
    kinds = []
    for number in range(hf_config["num_hidden_layers"]):
        is_shared = max(number - offset + 1, 0) % frequency != 0
        kinds.append("shared" if is_shared else "full")
    return kinds


def layer(hf_config: HfConfig, number: int, *, rope_interleave: bool = False) -> Layer:
    """Return decoder layer `number`, from 0.

    Args:
        rope_interleave: `Indexer.rope_interleave`.
    """
    indexer = Indexer(
        heads=hf_config["index_n_heads"],
        head_dim=hf_config["index_head_dim"],
        topk=hf_config["index_topk"],
        rope_interleave=rope_interleave,
        is_shared=indexer_types(hf_config)[number] == "shared",
    )
    return Layer(deepseek_v3.attention(hf_config, indexer), moe.mlp(hf_config, number))


DEEPSEEK_V32 = dense.family(
    name="deepseek_v32",
    check=_check,
    layer=layer,
    mtp=moe.NEXT_LAYER_HEADS,
    serving=Serving(
        # On GPUs; vLLM does not support sparse attention on CPUs, so this was read from its code.
        vllm=vllm.next_layer("DeepseekV32MTP"),
        sglang=Convention("DeepseekV3ForCausalLMNextN", "one", block=sglang.DECODER),
    ),
    tiny={**deepseek_v3.DEEPSEEK_V3.tiny, "index_topk": 2048, "index_n_heads": 3, "index_head_dim": 16},
)
