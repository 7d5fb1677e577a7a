"""Mistral 3 (Mistral Small 3.1 and 3.2): the layers of Mistral and a vision tower.

The published models have no MTP heads.
"""

from swiftlite.families.models.mistral import MISTRAL
from swiftlite.families.serving.convention import Serving
from swiftlite.families.wrapped import wrapped

MISTRAL3 = wrapped(MISTRAL, "mistral3", Serving(transformers="swiftlite.engines.transformers.language_models:mistral"))
