"""Test logits against transformers, bitwise except for experts in float32.

MTP logits are compared with a short reference, and with transformers where it has MTP layers.
"""

from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers.modeling_layers import MtpModel

from swiftlite.families import index
from swiftlite.model.inputs import ModelInputs, Target
from tests.model.logits import ids_and_positions, load_megatron, load_transformers
from tests.tiers import once, pairwise
from tests.tiny import (
    CLASSES,
    DSA,
    GEMMA4,
    GEMMA4_E,
    HYBRID,
    KIND_OF_HEADS,
    LATENT,
    OWN_SIZES,
    STEP,
    WINDOWED,
    WINDOWED_HEADS,
    WITH_OWN_OUTPUT,
    TwoLayers,
    embedded,
    final_norm,
    head_layer,
    logits_of,
    make_tiny_hf,
    memory_name,
    mtp_names,
    output_name,
)

ROPES = {
    "none": None,
    "linear": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 10000.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
        "rope_theta": 10000.0,
    },
    "longrope": {
        "rope_type": "longrope",
        "short_factor": [1.0 + 0.01 * i for i in range(16)],
        "long_factor": [1.0 + 0.1 * i for i in range(16)],
        "original_max_position_embeddings": 32,
        "rope_theta": 10000.0,
    },
}


MOE = (
    "ernie4_5_moe",
    "gemma4",
    "gpt_oss",
    "mimo_v2_flash",
    "minimax_m2",
    "mixtral",
    "nemotron_h",
    "qwen2_moe",
    "qwen3_moe",
    "qwen3_vl_moe",
    "glm4_moe",
    "hy_v3",
    *STEP,
    *LATENT,
    *HYBRID,
)


ORDERS = 2
"""How much larger the difference of two orders of summation can be than the change if each product is rounded once. In
a sum of n products, the partial sum after product k is rounded, and its size grows with sqrt(k): 0.35 sqrt(n) times as
much. Processors add up to 128 products in at least 8 separate sums, which gives 0.35 sqrt(16) = 1.4, and both orders
differ from the exact sum, which gives 1.4 sqrt(2) = 2."""


def assert_equal(
    ours: torch.Tensor, compute: Callable[[], torch.Tensor], family: str, *models: torch.nn.Module | Mapping
) -> None:
    """Check that logits are bitwise identical to those of a reference. Only float32 models with experts may differ, by
    rounding errors.

    For the selected experts, megatron-core computes a softmax where transformers divides by the sum, and it adds tokens
    in another order. transformers computes the attention of gpt-oss with all scores in memory, and its experts with
    transposed matrices. How much such differences grow in later layers depends on the model, and the order of sums in a
    product depends on the processor. The bound is therefore measured in the same run: it is `ORDERS` times the change
    of the reference if each of its weights is rounded to a neighboring number, which is 5 to 500 roundings of the
    largest logit. A token with another expert differs by 1e5 roundings.

    Args:
        compute: computes the reference.
        models: modules or tensors that the reference reads; their weights are changed.
    """
    theirs = compute()
    if family not in MOE or ours.dtype is not torch.float32:
        assert torch.equal(ours, theirs), (ours - theirs).abs().max()
        return
    for model in models:
        round_to_neighbors(model.parameters() if isinstance(model, torch.nn.Module) else model.values())
    change = (compute() - theirs).abs().max().item()
    rounding = torch.finfo(ours.dtype).eps * theirs.abs().max().item()
    assert 0 < change < 2000 * rounding  # otherwise the bound would not detect a token with another expert
    torch.testing.assert_close(ours, theirs, rtol=0, atol=ORDERS * change)


def round_to_neighbors(tensors: Iterable[torch.Tensor]) -> None:
    """Change each number of float32 tensors by one rounding, up or down at random."""
    for tensor in tensors:
        up = torch.randint(2, tensor.shape, generator=torch.Generator().manual_seed(0)) * 2 - 1
        tensor.data.mul_(1 + up * torch.finfo(torch.float32).eps)


ROTARY = ("llama", "phi3", "glm4_moe", "gemma3_text", "deepseek_v3", "qwen3_next")
"""Families whose kinds of rotary embeddings are all that there are: all dimensions, a part of them, several bases."""
PLAIN = once([*CLASSES], [False, True], ["none"], [torch.float32, torch.bfloat16])
CASES = [*PLAIN, *pairwise(ROTARY, [False, True], [*ROPES][1:], [torch.float32, torch.bfloat16])]


@pytest.mark.parametrize(
    ("family", "tied", "rope", "dtype"),
    [case for case in CASES if case.values[:2] != ("mimo_v2_flash", True)],  # engines have no such
)
def test_trunk_logits_equal_transformers(tmp_path, mesh, family, tied, rope, dtype):
    if family == "phi3" and rope != "none":  # transformers' class has no other
        rope = "longrope"
    if family == "mixtral":  # engines have no other
        rope = "none"
    if family == "gpt_oss":
        rope, dtype = "yarn", torch.float32  # engines have no other rope; bfloat16 below
    if family in ("mimo_v2_flash", "minimax_m2", "mixtral", "nemotron_h", *STEP):
        dtype = torch.float32  # bfloat16 below
    parameters: dict[str, Any] = dict(ROPES[rope] or {"rope_type": "default", "rope_theta": 10000.0})
    if family in ("glm4_moe", "minimax_m2"):
        parameters["partial_rotary_factor"] = 0.5
    if family == "gpt_oss":
        parameters |= {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": tied}
    if family == "mimo_v2_flash":
        parameters = OWN_SIZES["mimo_v2_flash"]["rope_parameters"]
    if family in HYBRID:
        parameters["partial_rotary_factor"] = 0.25
    if family in WINDOWED:
        if family == "olmo3":
            parameters["rope_theta"] = 500_000.0
        if family in STEP:
            parameters["partial_rotary_factor"] = 0.5
        if family in GEMMA4:
            parameters |= {"rope_type": "proportional", "partial_rotary_factor": 0.25}
        base = 500_000.0 if family in ("olmo3", *STEP) else 1e3
        parameters = {"full_attention": parameters, "sliding_attention": {"rope_type": "default", "rope_theta": base}}
    if family in LATENT and rope == "longrope":
        parameters["factor"] = 4.0  # which transformers reads for the scale of the scores, whatever the kind of rope
    rotary_dim = {"glm4_moe": 16, "phi3": 16, "deepseek_v3": 8, "qwen3_next": 8}.get(family, 32)
    for factors in parameters.keys() & {"short_factor", "long_factor"}:
        parameters[factors] = parameters[factors][: rotary_dim // 2]
    directory = make_tiny_hf(
        tmp_path,
        family,
        tied=tied,
        dtype=dtype,
        rope_parameters=parameters,
        max_position_embeddings=32 if rope == "dynamic" else 128,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16 if family == "phi3" else 32,  # of phi3: hidden_size / num_attention_heads
    )
    # 48 is beyond the original 32 positions, where dynamic and longrope change their frequencies.
    input_ids, position_ids = ids_and_positions(48)
    with torch.no_grad():
        ours = load_megatron(directory, mesh, dtype)(ModelInputs(input_ids, position_ids)).main
        hf = load_transformers(directory, family, dtype)
        assert_equal(ours, lambda: hf(input_ids).logits, family, hf)


@pytest.mark.parametrize(("family", "depth", "dtype"), once([*CLASSES], [1, 2], [torch.float32, torch.bfloat16]))
def test_mtp_logits_equal_a_short_reference(tmp_path, mesh, family, depth, dtype):
    """Heads receive the inputs that the family's engine passes to them."""
    if family in ("gpt_oss", "mimo_v2_flash", "minimax_m2", "mixtral", "nemotron_h", *STEP):
        dtype = torch.float32  # see test_bfloat16_logits
    check_heads(make_tiny_hf(tmp_path, family, depth=depth, dtype=dtype), family, depth, dtype, mesh)


@pytest.mark.parametrize(("family", "dtype"), [("gemma4_text", torch.bfloat16), ("gemma4", torch.float32)])
def test_heads_of_a_trunk_with_shared_keys(tmp_path, mesh, family, dtype):
    """Layers of heads have keys and values, and no further input. In E4B, which has no experts, all MLPs are alike."""
    sizes = GEMMA4_E | {"use_double_wide_mlp": family == "gemma4"}
    check_heads(make_tiny_hf(tmp_path, family, depth=2, dtype=dtype, **sizes), family, 2, dtype, mesh)


def check_heads(directory: Path, family: str, depth: int, dtype: torch.dtype, mesh: Any) -> None:
    """Compare logits of heads with those of transformers' layers."""
    drafting = index.FAMILIES[family].mtp.drafting
    hf, tensors = load_transformers(directory, family, dtype), load_file(directory / "model.safetensors")
    input_ids, position_ids = ids_and_positions(20)

    def reference() -> torch.Tensor:
        before: list[torch.Tensor] = []
        hook = final_norm(hf).register_forward_pre_hook(lambda _, args: before.append(args[0]))
        after = hf.model(input_ids).last_hidden_state
        hook.remove()
        hidden = before[0] if drafting.takes_before_norm else after
        logits = []
        for k in range(depth):
            hidden, after = reference_mtp(hf, tensors, family, k, hidden, input_ids, position_ids, drafting)
            logits.append(with_targets(head_logits(hf, tensors, family, k, after), k))
            if not drafting.chains_before_norm:
                hidden = after
        return torch.cat(logits, dim=1)

    with torch.no_grad():
        heads = load_megatron(directory, mesh, dtype, drafting=drafting)(ModelInputs(input_ids, position_ids)).mtp
        ours = torch.cat([with_targets(logits, k) for k, logits in enumerate(heads)], dim=1)
        if family == "mimo":
            # Its projection takes [hidden, embedding]; megatron-core sums the other way round, so the last bits of
            # 128 products differ: 1e-5 in float32; in bfloat16 a flipped rounding is 0.03 for logits of 4 to 8.
            tolerance = {"rtol": 0, "atol": 1e-4 if dtype is torch.float32 else 0.0625}
            torch.testing.assert_close(ours, reference(), **tolerance)
        else:
            assert_equal(ours, reference, family, hf, tensors)


def with_targets(logits_BSV: torch.Tensor, k: int) -> torch.Tensor:
    """Return the logits of depth k that have a target: at the end of the row there is no input token for the depth."""
    return logits_BSV[:, : logits_BSV.size(1) - k - 1]


def head_logits(
    hf: Any, tensors: Mapping[str, torch.Tensor], family: str, k: int, states: torch.Tensor
) -> torch.Tensor:
    """Apply the output layer of depth k to its states after the norm."""
    if family not in WITH_OWN_OUTPUT:
        return logits_of(hf, states)
    _, block = mtp_names(family, k, hf.config.num_hidden_layers)
    return states @ tensors[output_name(block)].T


@pytest.mark.parametrize("in_chunks", [False, True])
@pytest.mark.parametrize("family", ["granite", "gemma4_text"])
def test_losses_of_logits_that_are_divided_or_capped(tmp_path, mesh, family, in_chunks):
    temperature = 0.7
    directory = make_tiny_hf(tmp_path, family, depth=1)
    model = load_megatron(directory, mesh, torch.float32)
    model.loss_in_chunks, model.temperature = in_chunks, temperature
    input_ids, position_ids = ids_and_positions(20)
    with torch.no_grad():
        logits = model(ModelInputs(input_ids, position_ids))
        losses = model(ModelInputs(input_ids, position_ids), Target(input_ids, mtp_labels=[input_ids]))
    for found, expected in ((losses.main, logits.main), (losses.mtp[0], logits.mtp[0])):
        own = F.cross_entropy(expected.flatten(0, 1) / temperature, input_ids.flatten(), reduction="none").view(2, 20)
        torch.testing.assert_close(found.loss_BS, own, rtol=1e-5, atol=1e-5)  # rounding of losses up to 20


def stacked(tensors: dict[str, torch.Tensor], layer: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return a layer's tensors with the names that transformers uses in memory, with experts stacked."""

    def collect(name: str) -> torch.Tensor:
        if name in tensors:
            return tensors[name]
        prefix, kind = name.rsplit(".", 1)
        parts = ("gate_proj", "up_proj") if kind == "gate_up_proj" else (kind,)
        count = layer.get_parameter(name).shape[0]
        return torch.stack([torch.cat([tensors[f"{prefix}.{e}.{p}.weight"] for p in parts]) for e in range(count)])

    return {name: collect(name) for name in layer.state_dict()}


def reference_mtp(hf, tensors, family, k, hidden, input_ids, position_ids, drafting):
    """Compute one MTP depth with transformers' decoder layer: norms of both inputs, projection, decoder layer, norm.

    Returns:
        The states before and after the norm.
    """
    names, block = mtp_names(family, k, hf.config.num_hidden_layers)

    def norm(role: str, states: torch.Tensor) -> torch.Tensor:
        if role not in names:
            return final_norm(hf)(states)
        eps = getattr(hf.config, "rms_norm_eps", None) or hf.config.layer_norm_epsilon
        module = type(final_norm(hf))(states.size(-1), eps)
        module.weight.data = tensors[names[role]]
        return module(states)

    number, config = head_layer(family, hf.config) % hf.config.num_hidden_layers, hf.config
    if family == "mimo_v2_flash":  # the trunk may have no such layer
        config = deepcopy(config)
        config.layer_types[number], config.mlp_layer_types[number] = KIND_OF_HEADS[family], "dense"
    if family in GEMMA4:  # heads have no input of their own
        config = deepcopy(config)
        config.hidden_size_per_layer_input = 0
    layer: Any = (
        TwoLayers(config) if family == "nemotron_h" else type(hf.model.layers[number])(config, layer_idx=number)
    )
    layer = layer.to(hf.dtype)
    for name, buffer in layer.named_buffers():
        if name.endswith("bias"):
            buffer.data = buffer.data.float()  # as from_pretrained leaves that of a router
    if family in GEMMA4:
        layer.self_attn.store_full_length_kv = False  # for layers that share keys
    prefix = len(block)
    inner = {memory_name(family, key[prefix:]): t for key, t in tensors.items() if key.startswith(block)}
    layer.load_state_dict(stacked(inner, layer))
    token = embedded(hf, torch.roll(input_ids, -(k + 1), dims=1))
    if drafting.zeroes_first_embedding:
        token[:, 0] = 0
    halves = [norm("embedding_norm", token), norm("hidden_norm", hidden)]
    if family == "mimo":
        halves.reverse()
    projected = torch.cat(halves, dim=-1) @ tensors[names["projection"]].T
    rotary_of = (KIND_OF_HEADS[family],) if family in KIND_OF_HEADS else ()
    rotary = None
    if family != "nemotron_h":
        rotary = hf.model.rotary_emb(projected, position_ids, *rotary_of)
    mask = None
    if family in ("gpt_oss", *WINDOWED_HEADS, *DSA):  # whose attention is not causal by itself
        length = projected.size(1)
        mask = torch.full((1, 1, length, length), -torch.inf, dtype=projected.dtype).triu(1)
        if family in WINDOWED_HEADS:
            mask += torch.full_like(mask, -torch.inf).tril(-hf.config.sliding_window)
    output = layer(projected, attention_mask=mask, position_embeddings=rotary, position_ids=position_ids)
    if family == "glm_moe_dsa":
        output, _ = output  # and the selected tokens
    return output, norm("output_norm", output)


@pytest.mark.parametrize("family", ["gpt_oss", "mimo_v2_flash", "minimax_m2", "mixtral", "nemotron_h", *STEP])
def test_bfloat16_logits(tmp_path, mesh, family):
    """transformers rounds more to bfloat16, so its logits differ. Ours are closer to exact ones.

    It rounds the scores of attention in gpt-oss. In MiniMax-M2, it rounds the logits of routers, and queries and keys
    before they are multiplied by the weights of their norms; vLLM and SGLang do not. In Mixtral, it rounds
    the logits of routers; in Nemotron-H, the time steps of Mamba-2. It adds the experts of Nemotron-H in float32, so
    these are left out.
    """
    options: dict[str, Any] = {}
    if family == "nemotron_h":
        options["layers_block_type"] = ["linear_attention", "mlp", "full_attention", "mlp"]
    directory = make_tiny_hf(tmp_path, family, dtype=torch.bfloat16, **options)
    input_ids, position_ids = ids_and_positions(48)
    with torch.no_grad():
        exact = load_transformers(directory, family, torch.float32)(input_ids).logits
        ours = load_megatron(directory, mesh, torch.bfloat16)(ModelInputs(input_ids, position_ids)).main
        theirs = load_transformers(directory, family, torch.bfloat16)(input_ids).logits
    # The median, because a token can have another expert.
    error, their_error = ((logits.float() - exact).abs().median() for logits in (ours, theirs))
    assert error <= their_error


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_mtp_logits_equal_those_of_transformers(tmp_path, mesh, depth, tied):
    """transformers drafts with the heads of GLM-4.5. It drafts one token at the end of each row."""
    directory = make_tiny_hf(tmp_path, "glm4_moe", depth=depth, tied=tied)
    hf = load_transformers(directory, "glm4_moe", torch.float32)
    # Which keys are heads is known to it for the hub's numbers of layers only (46 and 92).
    hf._keys_to_ignore_on_load_unexpected = [r"model\.layers\.2\..*", r"model\.layers\.3\..*"]
    heads: Any = MtpModel.from_pretrained(hf).eval()
    input_ids, position_ids = ids_and_positions(20)
    with torch.no_grad():
        ours = load_megatron(directory, mesh, torch.float32)(ModelInputs(input_ids, position_ids)).mtp
        ours = torch.cat([with_targets(logits, k) for k, logits in enumerate(ours)], dim=1)

        def reference() -> torch.Tensor:
            hidden, logits = hf.model(input_ids).last_hidden_state, []
            for k, layer in enumerate(heads.layers):
                token = heads.embed_tokens(torch.roll(input_ids, -(k + 1), dims=1))
                angles = heads.rotary_emb(token, position_ids=position_ids)
                hidden = layer(token, hidden, angles, None, position_ids, None)
                logits.append(with_targets(heads._project_to_logits(hidden), k))
            return torch.cat(logits, dim=1)

        assert_equal(ours, reference, "glm4_moe", hf, heads)


ROUTERS = [
    ("qwen2_moe", {"num_hidden_layers": 4, "decoder_sparse_step": 2}),
    ("qwen2_moe", {"num_hidden_layers": 3, "mlp_only_layers": [2], "norm_topk_prob": True}),
    ("qwen2_moe", {"num_experts_per_tok": 1}),
    ("qwen3_moe", {"norm_topk_prob": False}),
    ("qwen3_moe", {"norm_topk_prob": False, "num_experts_per_tok": 1}),
    ("qwen3_moe", {"num_experts": 8, "num_experts_per_tok": 3}),
    ("qwen3_moe", {"num_hidden_layers": 4, "decoder_sparse_step": 2}),
    ("qwen3_moe", {"num_hidden_layers": 3, "mlp_only_layers": [1]}),
    ("qwen3_moe", {"num_hidden_layers": 2, "mlp_only_layers": [1]}),
    ("ernie4_5_moe", {"moe_num_experts": 8, "moe_k": 3}),
    ("ernie4_5_moe", {"moe_num_shared_experts": 0}),
    ("ernie4_5_moe", {"num_hidden_layers": 5, "moe_layer_start_index": 2, "moe_layer_end_index": 3}),
    ("minimax_m2", {"num_local_experts": 8, "num_experts_per_tok": 3}),
    ("minimax_m2", {"rotary_dim": 8}),
    ("minimax_m2", {"rotary_dim": 32}),
    ("step3p5", {"n_routed_experts": 8, "num_experts_per_tok": 3}),
    ("step3p5", {"swiglu_limits": [0.0, 0.5], "swiglu_limits_shared": [0.0, 0.5]}),
    ("step3p5", {"num_hidden_layers": 5}),
    ("glm4_moe", {"n_routed_experts": 8, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2}),
    ("glm4_moe", {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1}),
    ("glm4_moe", {"n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 4}),
    ("glm4_moe", {"num_experts_per_tok": 1, "norm_topk_prob": False}),
    ("glm4_moe", {"n_shared_experts": 2}),
    ("glm4_moe", {"num_hidden_layers": 4, "first_k_dense_replace": 3}),
    ("glm4_moe", {"first_k_dense_replace": 0}),
    ("glm4_moe", {"routed_scaling_factor": 1.0}),
    ("glm4_moe", {"attention_bias": False}),
    ("glm4_moe", {"use_qk_norm": False}),
    ("glm4_moe", {"partial_rotary_factor": 1.0, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}),
    ("glm4_moe", {"partial_rotary_factor": 0.25, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}),
]


@pytest.mark.parametrize(("family", "options"), ROUTERS, ids=lambda value: str(value))
def test_every_setting_of_a_mixture(tmp_path, mesh, family, options):
    directory = make_tiny_hf(tmp_path, family, depth=1, **options)
    input_ids, position_ids = ids_and_positions(48)
    with torch.no_grad():
        ours = load_megatron(directory, mesh, torch.float32)(ModelInputs(input_ids, position_ids)).main
        hf = load_transformers(directory, family, torch.float32)
        assert_equal(ours, lambda: hf(input_ids).logits, family, hf)


def test_experts_are_chosen_by_exact_scores(tmp_path, mesh):
    """Rounded to bfloat16, the scores of the second and the third expert are equal."""
    model = load_megatron(make_tiny_hf(tmp_path, "qwen2_moe", dtype=torch.bfloat16), mesh, torch.bfloat16)
    router: Any = model.decoder.layers[0].get_submodule("mlp.router")
    logits = torch.tensor([[[4.0, 0.0, 0.001, -4.0]], [[4.0, 0.001, 0.0, -4.0]]], dtype=torch.bfloat16)
    with torch.no_grad():
        probs, chosen = router.routing(logits)
    assert chosen.nonzero()[:, 1].tolist() == [0, 2, 0, 1]
    assert probs.dtype is torch.bfloat16


def test_experts_are_chosen_with_the_bias(tmp_path, mesh):
    """With a bias of 10, exactly two experts are selected. The bias does not change their weights."""
    directory = make_tiny_hf(tmp_path, "glm4_moe")
    tensors = load_file(directory / "model.safetensors")
    tensors["model.layers.1.mlp.gate.e_score_correction_bias"] = torch.tensor([0.0, 10.0, 0.0, 10.0])
    save_file(tensors, directory / "model.safetensors")
    model = load_megatron(directory, mesh, torch.float32)
    router = model.decoder.layers[1].get_submodule("mlp.router")
    with torch.no_grad():
        probs, chosen = router(torch.randn(5, 2, 64))
    assert chosen.tolist() == [[False, True, False, True]] * 10
    torch.testing.assert_close(probs.sum(1), torch.full((10,), 1.5))  # routed_scaling_factor
