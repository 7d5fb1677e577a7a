"""The language model of Step-3.5 for transformers 5, which has its layers only as a part of Step-3.7."""

from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, GenerationMixin
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import Concatenate, WeightConverter, WeightRenaming
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.step3p7.configuration_step3p7 import Step3p7TextConfig
from transformers.models.step3p7.modeling_step3p7 import Step3p7PreTrainedModel, Step3p7TextModel

from swiftlite.families.resolved import HfModel


def trunk_of(model: HfModel) -> "tuple[type[Step3p5ForCausalLM], Step3p7TextConfig]":
    """Return the class and the config of the trunk.

    The config has no entries for MTP heads in lists, which transformers would check, and no others of the whole model.
    """
    own = {key: value for key, value in model.config.items() if key not in ("text_config", "vision_config")}
    no_heads = model.family.mtp.config(model.config, 0) | {"num_nextn_predict_layers": 0}
    return Step3p5ForCausalLM, Step3p7TextConfig.from_dict(own | no_heads)


class Step3p5ForCausalLM(Step3p7PreTrainedModel, GenerationMixin):
    """transformers' text model of Step-3.7 with an output layer. Its files have the names of Step-3.5."""

    config: Step3p7TextConfig

    def __init__(self, config: Step3p7TextConfig):
        super().__init__(config)
        self.model = Step3p7TextModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids: torch.Tensor | None = None, **kwargs: Any) -> CausalLMOutputWithPast:
        """Return the logits [B, S, V] of tokens [B, S]; `kwargs` are arguments of the text model."""
        outputs = self.model(input_ids=input_ids, **kwargs)
        logits: Any = self.lm_head(outputs.last_hidden_state)
        return CausalLMOutputWithPast(logits=logits, past_key_values=outputs.past_key_values)


# As transformers' conversion of Step-3.7 (conversion_mapping.py of 5.19), whose names have other prefixes.
_CONVERSION = [
    WeightRenaming(r"\.moe\.gate\.weight$", ".mlp.gate.weight"),
    WeightRenaming(r"\.moe\.router_bias$", ".mlp.gate.e_score_correction_bias"),
    WeightRenaming(r"\.moe\.down_proj\.weight$", ".mlp.experts.down_proj"),
    WeightRenaming(r"\.share_expert\.", ".mlp.shared_experts."),
    WeightConverter(
        source_patterns=[r"moe.gate_proj.weight", r"moe.up_proj.weight"],
        target_patterns=r"mlp.experts.gate_up_proj",
        operations=[Concatenate(dim=1)],
    ),
]
register_checkpoint_conversion_mapping("Step3p5ForCausalLM", _CONVERSION, overwrite=True)
AutoModelForCausalLM.register(Step3p7TextConfig, Step3p5ForCausalLM, exist_ok=True)
