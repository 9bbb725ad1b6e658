"""Average pooling without torch's wrong CUDA gradient, which tests/test_gpu.py looks at."""

import pytest
import torch
from torch import nn

from bcosvit.nn import AvgPool2d, BatchNormUncentered2d, frozen_view, norm


@pytest.mark.parametrize(("windows", "rearranged"), [((3, 2, 1), True), ((2, 2), False)])
def test_differentiated_inputs_are_rearranged_where_windows_overlap(
    windows, rearranged, monkeypatch
):
    monkeypatch.setattr(norm, "_is_wrong_on", lambda device: True)
    x = torch.rand(2, 8, 6, 6).contiguous(memory_format=torch.channels_last)
    pool = AvgPool2d(*windows)
    # torch's result lies in memory as its input does.
    assert pool(x).is_contiguous(memory_format=torch.channels_last)
    assert pool(x.requires_grad_()).is_contiguous() == rearranged
    torch.testing.assert_close(pool(x), nn.AvgPool2d(*windows)(x))


def test_gradients_on_a_cpu_do_not_depend_on_the_layout():
    x, pool = torch.rand(2, 8, 7, 6, dtype=torch.float64), AvgPool2d(3, 2, 1)
    last = x.contiguous(memory_format=torch.channels_last).requires_grad_()
    assert pool(last).is_contiguous(memory_format=torch.channels_last)
    assert torch.autograd.gradcheck(pool, (last,))


def test_it_stands_in_for_torchs_in_a_frozen_view():
    model = nn.Sequential(nn.AvgPool2d(3, 2, 1))
    assert type(frozen_view(model)[0]) is AvgPool2d
    assert type(model[0]) is nn.AvgPool2d


def test_training_divides_by_the_biased_variance_and_remembers_it():
    x = torch.tensor([1.0, 2.0, 4.0, 9.0]).view(2, 1, 2, 1)
    norm = BatchNormUncentered2d(1, momentum=0.25).train()
    # The mean is 4, so the squared deviations are 9, 4, 0 and 25, and their mean is 9.5.
    torch.testing.assert_close(norm(x), x / (9.5 + norm.eps) ** 0.5)
    torch.testing.assert_close(norm.running_var, torch.tensor([0.75 * 1 + 0.25 * 9.5]))
