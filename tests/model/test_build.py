"""Test that a model which the device cannot compute is rejected before it is built."""

import pytest
import torch

from swiftlite.args.fields import ParallelLayout
from swiftlite.base.errors import OptionError
from swiftlite.model.build import check_computable
from swiftlite.runtime.device import Device
from tests.messages import naming

CPU, GPU = Device(torch.device("cpu"), "gloo"), Device(torch.device("cuda", 0), "nccl")


def test_experts_shared_both_ways_need_a_gpu():
    both = ParallelLayout(tensor_model_parallel_size=2, expert_model_parallel_size=2, expert_tensor_parallel_size=2)
    with pytest.raises(OptionError, match=naming("gloo")):
        check_computable(both, CPU)
    check_computable(both, GPU)
    check_computable(ParallelLayout(expert_model_parallel_size=2), CPU)
