"""`ForwardStep`: what a pipeline schedule calls for each micro-batch and chunk."""

from collections.abc import Callable, Iterator
from typing import Any

import torch

ForwardStep = Callable[[Iterator[Any], torch.nn.Module], tuple[Any, Callable]]
"""(iterator, chunk) -> (the chunk's output, a function of the model's output that returns the sum to minimize, its
number of targets, and further values)."""
