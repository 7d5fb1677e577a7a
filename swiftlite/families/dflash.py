"""Define DFlash and DSpark, drafters that predict a block of tokens at once.

At position s, the trunk has read the tokens up to s, and token s + 1 is the last known one, the anchor. With u_n the
input of the trunk's decoder layer n, for the layers in `Heads.features`:

    c_i = hidden_norm(fc [u_a; u_b; ...]) at each position i up to s
    x_0 = embeddings of token s + 1 and of one mask token per draft, at the positions s + 1, s + 2, ...
    x_l = decoder layer l of Qwen3 (x_(l - 1)), whose attention sees c_0 to c_s and all of x_(l - 1)
    logits of draft k = output layer of the trunk (norm(x_D)) at position s + 1 + k

Keys and values of c are those of the layer, without its input norm. All states are computed in one pass.

The kinds differ in two settings (`MARKOV_KEY`, `samples_from_anchor`):

    DFlash    The anchor predicts nothing: N drafts have N + 1 queries, and no draft reads another one's token.
    DSpark    N drafts have N queries: the anchor and N - 1 mask tokens. The query at s + 1 + k, from k = 0 on, predicts
              token s + 2 + k. Its logits have W2 W1[token s + 1 + k] added (Markov head, rank r). This token is the
              previous draft in an engine, which selects drafts from left to right, and that of the data in training.

Norms of keys are not trained: vLLM 0.32 on a CPU applies the norm of the first layer to the context of all layers
(`DFlashQwen3Model._normalize_context_k`). With weights of 1, both are the same; the norm of queries can express a
weight that both channels of a rotary pair share.

Names of tensors are those of published drafters (`DFlashDraftModel` and `Qwen3DSparkModel`).
"""

from typing import TYPE_CHECKING, Any

from swiftlite.base.drafting import Drafting
from swiftlite.base.heads import DRAFTER_KEY, FEATURES_KEY, Heads, kind_of
from swiftlite.bridge.join import PadEnd
from swiftlite.bridge.rows import HfConfig, Row, lift
from swiftlite.families import eagle3
from swiftlite.families.architecture import Architecture
from swiftlite.families.attention import GroupedQueryAttention
from swiftlite.families.drafter import Drafter, DrafterSizes, feature_problems, layer_problems
from swiftlite.families.layer import Layer
from swiftlite.families.mlp import Mlp

if TYPE_CHECKING:
    from swiftlite.families.family import Family

KIND, DSPARK = "dflash", "dspark"
KINDS = (KIND, DSPARK)
LAYERS_KEY, MASK_KEY, MARKOV_KEY = "decoder_layers", "mask_token_id", "markov_rank"
"""Keys of the drafter in config.json: its number of decoder layers, the token in place of unknown tokens, and the rank
r of the Markov head."""
SETTINGS = (FEATURES_KEY, LAYERS_KEY, MASK_KEY, MARKOV_KEY)
"""Keys of the drafter that a user can set in config.json before its training."""
MAX_FEATURES = 5
"""Number of features of published drafters."""
MAX_DECODER_LAYERS = 16
MAX_MARKOV_RANK = 1024
MARKOV_RANK = 256
"""Rank of published drafters."""
WEIGHT_OF_NEXT = 0.78
"""Weight of each draft's loss relative to the previous one, exp(-1/4), as for published drafters."""
MARKOV_OUTPUT = "markov_head.markov_w2.weight"
"""Name of W2 in files."""
SGLANG_TRUNKS = ("llama", "mistral", "phi3", "qwen3", "qwen3_moe")
"""Families whose trunk returns the outputs of its decoder layers to these drafters in SGLang."""
_PREFIXES = ("fc.", "hidden_norm.", "layers.", "markov_head.", "norm.")


def declaration(hf_config: HfConfig, kind: str = KIND) -> dict[str, Any]:
    """Return what config.json declares for a new drafter of one of KINDS, which has no layer yet.

    Features are spread evenly, from the input of layer 2 to that of the last but one, as in published drafters. The
    mask token is the last one of the vocabulary, which in most models has no text.
    """
    first, last = 2, hf_config["num_hidden_layers"] - 2
    features = range(1, hf_config["num_hidden_layers"])[-MAX_FEATURES:]
    if last - first >= MAX_FEATURES - 1:
        features = (first + round(step * (last - first) / (MAX_FEATURES - 1)) for step in range(MAX_FEATURES))
    declared = {"kind": kind, "layers": 0, FEATURES_KEY: [*features], LAYERS_KEY: 1}
    if kind == DSPARK:
        declared[MARKOV_KEY] = min(MARKOV_RANK, hf_config["vocab_size"])
    return {**declared, MASK_KEY: hf_config["vocab_size"] - 1}


def layer_of(architecture: Architecture, hf_config: HfConfig) -> Layer:
    """Return a decoder layer, with the sizes of the trunk."""
    of_trunk: Any = eagle3.layer_of(architecture, hf_config).attention
    attention = GroupedQueryAttention(
        of_trunk.hidden, of_trunk.heads, of_trunk.groups, of_trunk.head_dim, rotary=of_trunk.head_dim, qk_norm=True
    )
    return Layer(attention, Mlp(of_trunk.hidden, hf_config["intermediate_size"]))


def num_decoder_layers(hf_config: HfConfig) -> int:
    """Return the number of decoder layers of the drafter."""
    return hf_config[DRAFTER_KEY][LAYERS_KEY]


def mask_token(hf_config: HfConfig) -> int:
    """Return the token in place of unknown tokens."""
    return hf_config[DRAFTER_KEY][MASK_KEY]


def samples_from_anchor(hf_config: HfConfig) -> bool:
    """Return whether the anchor's own state predicts the first draft."""
    return kind_of(hf_config) == DSPARK


def markov_rank(hf_config: HfConfig) -> int:
    """Return the rank of the Markov head; 0 without one."""
    return hf_config[DRAFTER_KEY].get(MARKOV_KEY, 0)


def why_not(family: "Family", hf_config: HfConfig) -> str:
    """Return why a model cannot have this drafter; empty if it can."""
    outside = family.outside(hf_config)
    # Engines share both layers without these.
    if outside.embedding_multiplier != 1 or outside.logits_divisor != 1 or outside.logits_cap is not None:
        return "its embeddings or logits have a factor or a cap"
    if hf_config["num_hidden_layers"] < max(2, num_decoder_layers(hf_config)):
        return "its trunk has fewer layers"
    return eagle3.why_not(family, hf_config)


def own_config(family: "Family", hf_config: HfConfig) -> dict[str, Any]:
    """Return the config.json of the drafter in a directory of its own, as engines read it.

    `target_layer_ids` count the outputs of decoder layers: the input of layer n is the output of layer n - 1.
    """
    heads, architecture = Heads.from_config(hf_config), family.architecture(hf_config)
    num_layers = num_decoder_layers(hf_config)
    outputs = {"mask_token_id": mask_token(hf_config), "target_layer_ids": [layer - 1 for layer in heads.features]}
    block = {"architectures": ["DFlashDraftModel"], "block_size": heads.drafts + 1}
    if samples_from_anchor(hf_config):
        head = {"markov_rank": markov_rank(hf_config), "markov_head_type": "vanilla", "enable_confidence_head": False}
        # vLLM's newer model runner reads `outputs` here, the older one in dflash_config.
        block = {"architectures": ["Qwen3DSparkModel"], "block_size": heads.drafts, **outputs, **head}
    return {
        "model_type": "qwen3",
        **eagle3.sizes_of(architecture, hf_config),
        "num_hidden_layers": num_layers,
        "layer_types": ["full_attention"] * num_layers,
        "num_target_layers": hf_config["num_hidden_layers"],
        "dflash_config": outputs,
        **block,
    }


def _rows(family: "Family", hf_config: HfConfig, layer: int) -> list[Row]:
    hidden, num_features = hf_config["hidden_size"], len(hf_config[DRAFTER_KEY][FEATURES_KEY])
    rows = [
        Row("fc.weight", {"fc.weight": (hidden, num_features * hidden)}),
        Row("hidden_norm.weight", {"hidden_norm.weight": (hidden,)}),
        Row("final_layernorm.weight", {"norm.weight": (hidden,)}),
    ]
    if rank := markov_rank(hf_config):
        matrix = (hf_config["vocab_size"], rank)
        rows += [
            Row("markov_embedding.weight", {"markov_head.markov_w1.weight": matrix}),
            Row("markov_output.weight", {MARKOV_OUTPUT: matrix}, PadEnd()),
        ]
    of_layer = layer_of(family.architecture(hf_config), hf_config).rows()
    for number in range(num_decoder_layers(hf_config)):
        rows += lift(of_layer, f"decoder_layer_{number}.", f"layers.{number}.")
    return lift(rows, f"mtp.layers.{layer}.", "")


def _sizes(family: "Family", hf_config: HfConfig, drafts: int) -> DrafterSizes:
    hidden, num_features = hf_config["hidden_size"], len(hf_config[DRAFTER_KEY][FEATURES_KEY])
    queries, rank = drafts + (not samples_from_anchor(hf_config)), markov_rank(hf_config)
    return DrafterSizes(
        rows=_rows(family, hf_config, 0),
        layers=[layer_of(family.architecture(hf_config), hf_config)] * num_decoder_layers(hf_config),
        passes=1,
        queries=queries,
        # Keys and values of the context are computed with the whole matrix of queries, keys and values.
        exceptions={"fc.weight": 1, **dict.fromkeys(("q_proj.", "k_proj.", "v_proj."), queries + 1), "markov_head.": 0},
        # Features, context before and after its norm, and the inputs of the output norm.
        stored=(num_features + 2 + queries) * hidden,
        output=hidden,
        own_output=rank,
    )


def _sources(family: "Family", hf_config: HfConfig, layer: int) -> dict[str, str]:
    """Return the parameters of the trunk's last decoder layers, except for norms of keys."""
    num_layers, prefix = num_decoder_layers(hf_config), f"mtp.layers.{layer}."
    first = hf_config["num_hidden_layers"] - num_layers
    sources = {
        f"{prefix}final_layernorm.weight": "decoder.final_layernorm.weight",
        f"{prefix}hidden_norm.weight": f"decoder.layers.{first + num_layers - 1}.input_layernorm.weight",
    }
    for number in range(num_layers):
        for row in layer_of(family.architecture(hf_config), hf_config).rows():
            if not row.mcore.endswith("k_layernorm.weight"):
                sources[f"{prefix}decoder_layer_{number}.{row.mcore}"] = f"decoder.layers.{first + number}.{row.mcore}"
    return sources


def _problems(hf_config: HfConfig) -> list[str]:
    declared = hf_config[DRAFTER_KEY]
    layers, mask = (declared.get(key) for key in (LAYERS_KEY, MASK_KEY))
    problems = feature_problems(hf_config)
    if hf_config.get("num_hidden_layers") == 1:
        problems = ["it requires a model with two decoder layers or more"]
    problems += layer_problems(hf_config)
    if type(layers) is not int or not 1 <= layers <= MAX_DECODER_LAYERS:
        problems.append(f"{LAYERS_KEY} is not an integer from 1 to {MAX_DECODER_LAYERS}")
    vocab = hf_config.get("vocab_size")
    if type(mask) is not int or mask < 0 or (isinstance(vocab, int) and mask >= vocab):
        problems.append(f"{MASK_KEY} is not a token")
    rank, has_head = declared.get(MARKOV_KEY), declared["kind"] == DSPARK
    if has_head and (type(rank) is not int or not 1 <= rank <= MAX_MARKOV_RANK):
        problems.append(f"{MARKOV_KEY} is not an integer from 1 to {MAX_MARKOV_RANK}")
    elif not has_head and MARKOV_KEY in declared:
        problems.append(f"{MARKOV_KEY} is a setting of {DSPARK}")
    return problems


DFLASH = Drafter(
    rows=_rows,
    layer_of=lambda family, hf_config, hf_key: 0 if hf_key.startswith(_PREFIXES) else None,
    sources=_sources,
    drafting=lambda family, hf_config: Drafting(),
    problems=_problems,
    why_not=why_not,
    own_config=own_config,
    sizes=_sizes,
    is_block=True,
    vllm_trunks=eagle3.VLLM_TRUNKS,
    sglang_trunks=SGLANG_TRUNKS,
    llamacpp_trunks=eagle3.LLAMACPP_TRUNKS,
)
