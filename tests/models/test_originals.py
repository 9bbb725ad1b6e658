"""`bcosvit bcosify`: models of other libraries by name, and files."""

import sys

import pytest
import torch
from typer.testing import CliRunner

from bcosvit import bcosify, create_model, load, save
from bcosvit._torchvision import torchvision
from bcosvit.cli import app
from bcosvit.models.originals import load_original
from tests.conftest import small_config

DATA = "scenes?size=32&train=24&val=16"


@pytest.fixture(scope="module")
def state(tmp_path_factory):
    """A narrow ResNet's state dict."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("state") / "net.pth"
    torch.save(torchvision.models.shufflenet_v2_x0_5(num_classes=8).state_dict(), path)
    return path


def run(*arguments: object):
    return CliRunner().invoke(app, ["bcosify", *map(str, arguments)], env={"COLUMNS": "200"})


def test_a_model_of_torchvision_is_converted(state, tmp_path):
    out = tmp_path / "model.safetensors"
    name = ("torchvision:shufflenet_v2_x0_5", "--weights", state, "--set", "num_classes=8")
    result = run(*name, "--image-size", 32, "--data", DATA, "--out", out)
    assert result.exit_code == 0, result.exception
    assert "16 predictions are the same" in result.stdout
    assert "The residual" in result.stdout and "Energy in the mask" in result.stdout
    original = load_original(name[0], state, {"num_classes": 8})
    images = torch.rand(2, 3, 32, 32)
    mean, std = (torch.tensor(s).view(3, 1, 1) for s in (original.mean, original.std))
    torch.testing.assert_close(
        load(out)(images), original.model((images - mean) / std), rtol=1e-3, atol=1e-4
    )


def test_a_recipe_trains_it(state, tmp_path):
    out = tmp_path / "model.safetensors"
    name = ("torchvision:shufflenet_v2_x0_5", "--weights", state, "--set", "num_classes=8")
    fields = ("epochs=1", "batch_size=8", "num_workers=0", "explain_every=0", "warmup_epochs=0")
    chosen = [word for field in fields for word in ("--set", f"recipe.{field}")]
    way = ("--image-size", 32, "--data", DATA, "--recipe", "bcosify", *chosen, "--out", out)
    result = run(*name, *way)
    assert result.exit_code == 0, result.exception
    assert "trained" in result.stdout
    assert (load(out).fade, load(out).b) == (0, 2)
    assert load(tmp_path / "model-converted.safetensors").fade == 1


def test_a_conventional_model_of_ours_is_converted(tmp_path):
    model = create_model(small_config(family="conventional")).eval()
    save(model, tmp_path / "plain.safetensors")
    result = run(tmp_path / "plain.safetensors", "--out", tmp_path / "out.safetensors")
    assert result.exit_code == 0, result.exception
    images = torch.rand(2, 3, *model.config.image_size)
    torch.testing.assert_close(
        load(tmp_path / "out.safetensors")(images), model(images), rtol=1e-3, atol=1e-4
    )


def test_what_cannot_be_converted_is_refused(state, tmp_path):
    save(
        bcosify(
            torch.nn.Sequential(
                torch.nn.Conv2d(3, 2, 3), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten()
            ),
            image_size=8,
        ),
        tmp_path / "a.safetensors",
    )
    for name, weights, message in [
        ("torchvision:shufflenet", state, "no model of torchvision 'shufflenet'"),
        ("torchvision:shufflenet_v2_x0_5", None, "--weights FILE"),
        ("torchvision:resnet18", state, "holds no weights of torchvision:resnet18"),
        (str(state), None, "without a model"),
        (str(state), state, "does not say which model"),
        (str(tmp_path / "a.safetensors"), None, "explains itself already"),
    ]:
        with pytest.raises(ValueError, match=message):
            load_original(name, weights)
    for options, message in [
        (("--recipe", "bcosify"), "nothing to train on"),
        (("--set", "recipe.epochs=1"), "without --recipe"),
    ]:
        result = run("torchvision:resnet18", *options, "--out", tmp_path / "out.safetensors")
        assert message in str(result.exception)


def test_timm(tmp_path, monkeypatch):
    timm = pytest.importorskip("timm")
    model = timm.create_model("tf_efficientnet_lite0", num_classes=3)
    torch.save(model.state_dict(), tmp_path / "net.pth")
    options = {"num_classes": 3}
    found = load_original("timm:tf_efficientnet_lite0", tmp_path / "net.pth", options)
    assert found.mean == (0.5, 0.5, 0.5)
    assert torch.equal(found.model.classifier.weight, model.classifier.weight)
    with pytest.raises(ValueError, match="did you mean 'tf_efficientnet_lite"):
        load_original("timm:tf_efficientnet_lite", tmp_path / "net.pth")
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(ValueError, match=r"bcosvit\[timm\]"):
        load_original("timm:tf_efficientnet_lite0", tmp_path / "net.pth")
