"""Recorded kernels: what needs no GPU. The rest is in tests/test_gpu.py."""

import pytest
import torch
from torch import nn

from bcosvit.nn import Replay


def test_a_batch_on_the_cpu_is_refused():
    with pytest.raises(ValueError, match="the batch is on cpu: call the module itself"):
        Replay(nn.Linear(2, 2))(torch.rand(1, 2))
