"""Color images of W(x): against a slow reference, the peer, and where the peer breaks."""

import numpy as np
import pytest
import torch

from bcosvit import explain
from bcosvit._torchvision import torchvision  # noqa: F401  (the peer imports it unguarded)
from bcosvit.attribution.color import color_image
from tests.reference import color as reference

from bcos.common import gradient_to_image  # isort: skip


@pytest.fixture
def row() -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of W(x) with some zero pixels, and contributions of both signs."""
    weights = torch.randn(6, 11, 14, dtype=torch.float64)
    weights[:, 3:5, 2:6] = 0
    weights[[1, 4], 8, 8] = -1
    return weights, torch.randn(11, 14, dtype=torch.float64)


@pytest.mark.parametrize("smooth", [1, 2, 3, 4, 15, 40])
@pytest.mark.parametrize("percentile", [99.5, 50.0, 100.0])
def test_against_the_reference(row, smooth, percentile):
    ours = color_image(*row, smooth=smooth, percentile=percentile)
    slow = reference.color_image(*(t.numpy() for t in row), smooth, percentile)
    np.testing.assert_allclose(ours.numpy(), slow, atol=1e-12)


def test_against_the_peer(model, images):
    a = explain(model, images)
    ours = color_image(a.weights, a.map)
    for i, encoded in enumerate(model.encoding(images)):
        theirs = gradient_to_image(encoded, a.weights[i])
        np.testing.assert_allclose(ours[i].permute(1, 2, 0), theirs, atol=1e-6)


def test_every_leading_shape_is_the_same_pictures(row):
    weights, contributions = torch.randn(2, 3, 6, 8, 9), torch.randn(2, 3, 8, 9)
    together = color_image(weights, contributions)
    assert together.shape == (2, 3, 4, 8, 9)
    for i in range(2):
        for k in range(3):
            alone = color_image(weights[i, k], contributions[i, k])
            assert torch.equal(together[i, k], alone)


def test_all_classes_of_an_explanation(model, images):
    a = explain(model, images, "all")
    picture = color_image(a.weights, a.map)
    assert picture.shape == (4, 5, 4, 16, 16)
    assert ((picture >= 0) & (picture <= 1)).all()


def test_zero_weights_are_transparent_and_finite():
    picture = color_image(torch.zeros(6, 5, 5), torch.zeros(5, 5))
    assert torch.equal(picture, torch.zeros(4, 5, 5))


def test_a_lone_pixel_is_seen():
    """The percentile of its picture is zero."""
    weights = torch.zeros(6, 100, 100)
    weights[0, 50, 50] = 1
    picture = color_image(weights, weights.sum(0), smooth=1)
    assert picture[:, 50, 50].tolist() == [1, 0, 0, 1]
    assert picture[3].sum() == 1


def test_pixels_against_the_class_are_not_shown():
    weights = torch.rand(6, 4, 4)
    assert not color_image(weights, -torch.ones(4, 4), smooth=3)[3].any()


@pytest.mark.parametrize("size", [1e-30, 1e-20, 1.0, 1e20, 1e37])
def test_the_size_of_w_does_not_matter(size):
    weights, contributions = torch.rand(6, 9, 9) - 0.3, torch.randn(9, 9)
    expected = color_image(weights, contributions, smooth=3)
    torch.testing.assert_close(
        color_image(size * weights, contributions, smooth=3), expected, atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype):
    weights, contributions = torch.rand(6, 9, 9).to(dtype), torch.randn(9, 9).to(dtype)
    picture = color_image(weights, contributions)
    assert picture.dtype == torch.float32
    assert torch.equal(picture, color_image(weights.float(), contributions.float()))


def test_inputs_are_left_alone_and_need_no_gradient():
    weights = torch.randn(6, 5, 5, requires_grad=True)
    before = weights.detach().clone()
    picture = color_image(weights, weights.sum(0))
    assert not picture.requires_grad
    assert torch.equal(weights, before)


@pytest.mark.slow
def test_sixteen_million_pixels():
    """More than torch.quantile takes; a window of 15 × 15 in a time that one can wait for."""
    weights = torch.rand(6, 4001, 4000) - 0.4
    picture = color_image(weights, weights[0])
    assert picture.isfinite().all()
    assert 0.0049 < (picture[3] == 1).float().mean() < 0.0051


@pytest.mark.parametrize(
    ("weights", "contributions", "options", "says"),
    [
        (torch.zeros(3, 4, 4), torch.zeros(4, 4), {}, r"expected \[..., 6, H, W\]"),
        (torch.zeros(2, 6, 4, 4), torch.zeros(4, 4), {}, r"expected \[2, 4, 4\]"),
        (torch.zeros(6, 4, 4), torch.zeros(4, 4), {"smooth": 0}, "smooth = 0"),
        (torch.zeros(6, 4, 4), torch.zeros(4, 4), {"percentile": 101}, "percentile = 101"),
        (torch.full((6, 4, 4), torch.nan), torch.zeros(4, 4), {}, "NaN"),
    ],
)
def test_mistakes(weights, contributions, options, says):
    with pytest.raises(ValueError, match=says):
        color_image(weights, contributions, **options)
