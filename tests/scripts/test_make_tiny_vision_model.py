import argparse

import pytest
from transformers import AutoTokenizer

from swiftlite.bridge.audit import audit_hf
from swiftlite.families.resolved import resolve


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_it_is_whole_and_reads_images(load_script, tmp_path, family):
    args = argparse.Namespace(output_dir=tmp_path, family=family, hidden_size=128, num_layers=2, vocab_size=384, seed=1)
    load_script("make_tiny_vision_model").make_model(args)
    model = resolve(tmp_path)
    assert model.family.name == family
    assert audit_hf(tmp_path, model.family) == []
    assert audit_hf(tmp_path, model.with_images().family) == []
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    content = [{"type": "image"}, {"type": "text", "text": "What?"}]
    ids = tokenizer.apply_chat_template([{"role": "user", "content": content}], return_dict=True)["input_ids"]
    assert ids.count(model.config["image_token_id"]) == 1
