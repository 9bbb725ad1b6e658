"""Our explainers inside captum and Quantus: the adapters, and the examples as users run them."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from captum.attr import IntegratedGradients
from captum.metrics import sensitivity_max

from bcosvit import create_model, explain
from bcosvit.attribution.attention import Rollout
from bcosvit.attribution.interop import CaptumStyle, quantus_explain_func
from tests.conftest import randomize, small_config

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("method", ["inherent", "rollout", Rollout(start=1)])
def test_quantus_explain_func(model, images, method):
    targets = np.array([0, 3, 1, 4])
    maps = quantus_explain_func(method)(
        model=model, inputs=images.numpy(), targets=targets, device="cpu", nr_samples=3
    )
    expected = explain(model, images, torch.tensor(targets), method).map
    assert maps.shape == (4, 1, 16, 16)
    assert maps.dtype == np.float32
    np.testing.assert_allclose(maps[:, 0], expected, rtol=1e-6)


def test_quantus_hands_over_what_it_has(images):
    """Doubles for a model in single precision, targets of any integer type, tensors too."""
    model = randomize(create_model(small_config())).eval()
    expected = quantus_explain_func()(model, images.float(), torch.tensor([0, 1, 2, 3]))
    for kind in (np.int32, np.uint8, np.float64):
        maps = quantus_explain_func()(model, images.numpy(), np.arange(4, dtype=kind))
        np.testing.assert_array_equal(maps, expected)


def test_captum_style_has_the_shape_of_the_images(model, images):
    target = torch.tensor([0, 3, 1, 4])
    attributions, delta = CaptumStyle(model).attribute(
        images, target=target, return_convergence_delta=True
    )
    own = explain(model, images, target)
    assert attributions.shape == images.shape
    torch.testing.assert_close(attributions.sum(1), own.map)
    r, rest = own.weights[:, 0], own.weights[:, 3]
    torch.testing.assert_close(attributions[:, 0], r * images[:, 0] + rest * (1 - images[:, 0]))
    assert delta.shape == (4,)
    assert delta.max() < 1e-9


@pytest.mark.parametrize("method", ["inherent", "ixg"])
def test_captum_style_of_several_classes_has_an_axis_for_them(model, images, method):
    style = CaptumStyle(model, method)
    # As many classes as images, which could be taken for each other.
    found = style.attribute(images, target=torch.tensor([[0, 1, 2, 3]] * 4))
    for k in range(4):
        torch.testing.assert_close(found[:, k], style.attribute(images, target=k))


def test_captum_style_of_other_methods(model, images):
    rollout = CaptumStyle(model, "rollout")
    assert rollout.attribute(images, target=2).shape == (4, 1, 16, 16)
    assert not rollout.has_convergence_delta()
    with pytest.raises(ValueError, match="completeness"):
        rollout.attribute(images, return_convergence_delta=True)
    with pytest.raises(ValueError, match="2 tensors"):
        rollout.attribute((images, images))


def test_captums_metrics_take_it_like_their_own(model, images):
    def still(inputs):
        return inputs

    for method in (CaptumStyle(model), IntegratedGradients(model)):
        assert method.multiplies_by_inputs
        assert method.has_convergence_delta()
        assert method.forward_func is model
        change = sensitivity_max(method.attribute, images, still, n_perturb_samples=2, target=1)
        assert change.shape == (4,)
        assert change.max() < 1e-9


@pytest.mark.parametrize(
    ("example", "says"),
    [
        ("captum_example.py", ["inherent (ours)", "IntGrad (captum)", "largest error", "sensi"]),
        pytest.param(
            "quantus_example.py",
            ["inherent  PixelFlipping", "rollout   Sparseness"],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_the_examples_run(example, says):
    command = [sys.executable, EXAMPLES / example]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    for words in says:
        assert words in result.stdout
