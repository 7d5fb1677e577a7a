import pytest
from transformers import AutoConfig

from swiftlite.data.image_sizes import ImageSizes
from swiftlite.families.index import FAMILIES, image_sizes

SIZES = {"patch_size": 6, "temporal_patch_size": 3, "spatial_merge_size": 4, "in_channels": 1}
TOKENS = {"image_token_id": 10, "vision_start_token_id": 11, "vision_end_token_id": 12, "video_token_id": 13}


@pytest.mark.parametrize("model_type", [name for name, family in FAMILIES.items() if family.vision is not None])
def test_sizes_of_image_inputs(model_type):
    config = AutoConfig.for_model(model_type, vision_config=dict(SIZES), **TOKENS).to_dict()
    assert image_sizes(config) == ImageSizes(6, 3, 4, 1, 10, 11, 12, 13)
    by_default = AutoConfig.for_model(model_type)
    found = image_sizes(by_default.to_dict())
    assert found is not None
    assert found.item_width == 2 * 2 * 3 * 2 * by_default.vision_config.patch_size**2
    assert found.image_token_id == by_default.image_token_id


def test_channels_of_qwen2_5_vl_have_another_name_in_files():
    config = {"model_type": "qwen2_5_vl", "vision_config": {**SIZES, "in_chans": 2}, **TOKENS}
    del config["vision_config"]["in_channels"]
    found = image_sizes(config)
    assert found is not None
    assert found.channels == 2


@pytest.mark.parametrize(
    "config",
    [
        AutoConfig.for_model("qwen3").to_dict(),
        {"model_type": "qwen3_5", **TOKENS},
        {"model_type": "qwen3_5", "vision_config": SIZES},
        {"model_type": "qwen3_5", "vision_config": {"patch_size": 16}, **TOKENS},
        {"model_type": "glm4_moe", "vision_config": SIZES, **TOKENS},
    ],
)
def test_models_without_images(config):
    assert image_sizes(config) is None
