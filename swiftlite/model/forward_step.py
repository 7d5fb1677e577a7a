"""`ForwardStep`: the function that a pipeline schedule calls for each micro-batch and chunk."""

from collections.abc import Callable, Iterator
from typing import Any

import torch

ForwardStep = Callable[[Iterator[Any], torch.nn.Module], tuple[Any, Callable]]
"""A function that maps (iterator over micro-batches, model chunk) to (output of the chunk, loss function). The loss
function maps the output to the loss summed over targets, the number of these targets, and statistics that
`run_pipeline` returns.
"""
