"""Copy megatron-core's config, for a module with other settings than the rest of the model."""

from copy import copy
from typing import TypeVar

from megatron.core.transformer.transformer_config import TransformerConfig

Config = TypeVar("Config", bound=TransformerConfig)


def with_settings(config: Config, **settings: object) -> Config:
    """Return a copy with other settings. Unlike `dataclasses.replace`, it does not derive other fields again."""
    own = copy(config)
    for name, value in settings.items():
        setattr(own, name, value)
    return own
