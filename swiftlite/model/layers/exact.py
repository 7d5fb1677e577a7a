"""Keep the precision of single parameters when the model is converted to another one."""

from collections.abc import Callable, Sequence
from typing import Self

import torch
from torch import nn


class KeepsPrecision(nn.Module):
    """A module with parameters that `.bfloat16()` and the like leave as they are; they only move to another device."""

    exact: Sequence[str] = ()
    """Names of these parameters."""

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        exact = {name: self.get_parameter(name).data for name in self.exact}
        super()._apply(fn, recurse)
        for name, data in exact.items():
            parameter = self.get_parameter(name)
            # `super()._apply` has rounded the values; those from before it are only moved.
            parameter.data = data.to(parameter.device)
        return self
