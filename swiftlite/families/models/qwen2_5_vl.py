"""Qwen2.5-VL: the layers of Qwen2 and a vision tower.

The names of the tower's tensors start with `visual.`, and those of the language model are Qwen2's. The published models
have no MTP heads.
"""

from dataclasses import replace

from swiftlite.families.models.qwen2 import QWEN2
from swiftlite.families.vision import Qwen2_5Vision

QWEN2_5_VL = replace(QWEN2, name="qwen2_5_vl", vision=Qwen2_5Vision.of, language_model=("model.", "lm_head.", "mtp."))
