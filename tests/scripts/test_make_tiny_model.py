import argparse
import json

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from swiftlite.base.heads import Heads
from swiftlite.bridge.audit import audit_hf
from swiftlite.bridge.hf_config import read_config
from swiftlite.families import FAMILIES, index
from tests.tiers import some_of
from tests.tiny import LATENT, NEXT_LAYER_HEADS, WRAPPED

# One family of each kind of layers and heads.
CHOSEN = ("qwen3", "mimo", "glm4_moe", "deepseek_v3", "gpt_oss", "qwen3_next", "step3p5")


@pytest.fixture(scope="module")
def script(load_script):
    return load_script("make_tiny_model")


@pytest.fixture(scope="module", params=some_of(sorted(FAMILIES.keys() - {*WRAPPED, "kimi_k2"}), *CHOSEN))
def tiny(request, script, tmp_path_factory):
    """Write a model of each family, as small as the options allow and without a vision tower."""
    directory = tmp_path_factory.mktemp(request.param)
    args = argparse.Namespace(
        output_dir=directory,
        family=request.param,
        hidden_size=128,
        num_layers=2,
        vocab_size=384,
        mtp_num_layers=2,
        tie_word_embeddings=False,
        torch_dtype="float32",
        seed=1,
    )
    script.make_tiny_model(args)
    return directory


def test_it_is_whole_and_of_the_family_it_says(tiny):
    hf_config = read_config(tiny)
    family = index.get(hf_config, tiny)
    assert audit_hf(tiny, family) == []
    assert Heads.from_config(hf_config).layers == (
        2 if family.name in ("ernie4_5_moe", "mimo", "mimo_v2_flash", *NEXT_LAYER_HEADS) else 0
    )


def test_the_smallest_hidden_size_has_one_group_of_heads(script, tmp_path):
    settings = {"family": "gemma4_text", "hidden_size": 64, "num_layers": 2, "vocab_size": 384, "mtp_num_layers": 1}
    others = {"output_dir": tmp_path, "tie_word_embeddings": False, "torch_dtype": "float32", "seed": 1}
    script.make_tiny_model(argparse.Namespace(**settings, **others))
    assert audit_hf(tmp_path, index.get(read_config(tmp_path), tmp_path)) == []


def test_transformers_opens_it_and_random_weights_are_no_constant(tiny):
    model = AutoModelForCausalLM.from_pretrained(tiny, trust_remote_code=True)
    logits = model(torch.tensor([[5, 6, 7]])).logits
    assert logits.shape == (1, 3, 384)
    assert logits.std() > 0.01


def test_the_tokenizer_round_trips_and_the_template_marks_the_answer(tiny):
    tokenizer = AutoTokenizer.from_pretrained(tiny, trust_remote_code=False)
    assert tokenizer.decode(tokenizer.encode("def f(x): # 你好\n\t`é`")) == "def f(x): # 你好\n\t`é`"
    messages = [{"role": "user", "content": "What?"}, {"role": "assistant", "content": "That."}]
    encoded = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    answer = [i for i, mine in zip(encoded["input_ids"], encoded["assistant_masks"], strict=True) if mine]
    assert tokenizer.decode(answer) == "That.<|im_end|>"
    assert (
        answer[-1]
        == tokenizer.eos_token_id
        == json.loads((tiny / "generation_config.json").read_text())["eos_token_id"]
    )
    prompt = tokenizer.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
    assert tokenizer.apply_chat_template(messages, tokenize=False).startswith(prompt)


def test_vllm_s_cpu_kernels_take_its_heads(tiny):
    hf_config = read_config(tiny)
    if hf_config["model_type"] in LATENT:
        assert (hf_config["kv_lora_rank"], hf_config["qk_rope_head_dim"]) == (512, 64)
        return
    with safe_open(tiny / "model.safetensors", "pt") as weights:
        names = ("model.layers.1.self_attn.o_proj.weight", "backbone.layers.1.mixer.o_proj.weight")
        (name,) = set(names) & set(weights.keys())
        columns = weights.get_slice(name).get_shape()[1]
    assert columns // hf_config["num_attention_heads"] in (64, 128)
