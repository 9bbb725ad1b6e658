"""Recorded kernels: what needs no GPU. The rest is in tests/test_gpu.py."""

import pytest
import torch
from torch import nn

from bcosvit.nn import CUDAGraphRunner
from bcosvit.nn.cuda_graphs import with_cuda_graphs


def test_a_batch_on_the_cpu_is_refused():
    with pytest.raises(ValueError, match="the batch is on cpu: call the module itself"):
        CUDAGraphRunner(nn.Linear(2, 2))(torch.rand(1, 2))


def test_nothing_is_recorded_for_a_module_on_the_cpu():
    model = nn.Linear(2, 2)
    assert with_cuda_graphs(model, model.forward) == model.forward
