"""A published DenseNet as a tokenizer: the flavor is found, and the check can fail."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from bcosvit import create_model, load
from bcosvit._torchvision import torchvision  # noqa: F401  (the peer imports it unguarded)
from bcosvit.cli import app
from bcosvit.models import DenseNetConfig, published
from bcosvit.models.published import from_published
from bcosvit.models.weights import current_key
from tests.conftest import randomize
from tests.models.test_weights import authors_v1
from tests.reference import dynamic

from bcos.models.densenet import BcosDenseNet  # isort: skip
from bcos.modules import norms  # isort: skip

THIN = {"growth": 2, "blocks": (2, 1, 1), "stem_width": 4, "bottleneck": 2, "num_classes": 6}
VIT = {"width": 8, "num_heads": 2, "depth": 1, "image_size": 32, "num_classes": 3, "tap": 2}


def thin(flavor: str) -> dict[str, torch.Tensor]:
    model = randomize(create_model(DenseNetConfig(flavor=flavor, **THIN)))
    return dict(model.state_dict())


def options(flavor: str) -> dict:
    return {**VIT, "backbone": DenseNetConfig(flavor=flavor, **THIN)}


@pytest.fixture
def images() -> torch.Tensor:
    return torch.rand(2, 3, 32, 32)


@pytest.mark.parametrize("flavor", ["v1", "v2"])
def test_the_equations_agree_with_numpys(flavor):
    """What checkpoints are held against is itself held against the explicit matrices."""
    state = {key: tensor.double() for key, tensor in thin(flavor).items()}
    x = torch.rand(1, 3, 16, 16, dtype=torch.float64)
    encoded = torch.cat([x, 1 - x], 1)
    weights = {key.removeprefix("features."): tensor.numpy() for key, tensor in state.items()}
    expected, shape = dynamic.dense_backbone(
        encoded[0].numpy(), weights, flavor, (2, 1, 1), growth=2
    )
    found = published.published_features(state, encoded, 3, flavor)[0].numpy()
    np.testing.assert_allclose(found, expected.value.reshape(shape), rtol=1e-9)


def test_the_peer_agrees_with_the_equations():
    peer = BcosDenseNet(
        growth_rate=2,
        block_config=(2, 1, 1),
        num_init_features=4,
        bn_size=2,
        norm_layer=norms.NoBias(norms.BatchNormUncentered2d),
    )
    randomize(peer)
    state = {current_key(k): t.double() for k, t in peer.state_dict().items()}
    encoded = torch.rand(1, 6, 32, 32, dtype=torch.float64)
    theirs = encoded
    with torch.no_grad():
        for name, part in peer.double().eval().features.named_children():
            theirs = part(theirs)
            if name == "denseblock2":
                break
    written = published.published_features(state, encoded, 2, "v2")
    torch.testing.assert_close(theirs, written, rtol=1e-9, atol=0)


def test_v1(tmp_path, images):
    torch.save(authors_v1(create_model(DenseNetConfig(**THIN))), tmp_path / "state_dict.pkl")
    model, found = from_published(
        tmp_path / "state_dict.pkl", "bcos_vit_ti_38", images, **options("v1")
    )
    assert found.flavor == "v1"
    assert 0 < found.error < 1e-12
    assert found.unused > 0
    assert model(images).shape == (2, 3)


def test_v2(tmp_path, images):
    torch.save(thin("v2"), tmp_path / "v2.pth")
    _, found = from_published(tmp_path / "v2.pth", "bcos_vit_ti_38", images, **options("v2"))
    assert found.flavor == "v2"
    assert found.error < 1e-12


def test_another_function_is_noticed(tmp_path, images, monkeypatch):
    """MaxOut over the wrong neighbors loads without complaint."""
    torch.save(thin("v1"), tmp_path / "v1.pth")

    def swapped(model, path):
        weight = model.tokenizer.backbone.conv0.weight
        weight.data = weight.data.roll(1, 0)
        return []

    monkeypatch.setattr(published, "load_backbone", swapped)
    _, found = from_published(tmp_path / "v1.pth", "bcos_vit_ti_38", images, **options("v1"))
    assert found.error > 1e-2


def test_what_is_no_bcos_densenet(tmp_path, images):
    torch.save({"a": torch.zeros(1)}, tmp_path / "other.pth")
    with pytest.raises(ValueError, match="holds no DenseNet"):
        from_published(tmp_path / "other.pth", "bcos_vit_ti_38", images)
    torch.save({"features.conv0.weight": torch.zeros(4, 3, 7, 7)}, tmp_path / "conventional.pth")
    with pytest.raises(ValueError, match="takes 3 channels, so it is no B-cos DenseNet"):
        from_published(tmp_path / "conventional.pth", "bcos_vit_ti_38", images)
    torch.save(thin("v1"), tmp_path / "v1.pth")
    with pytest.raises(ValueError, match="bcos_densenet121 has no option 'backbone'"):
        from_published(tmp_path / "v1.pth", "bcos_densenet121", images)
    with pytest.raises(ValueError, match="is of flavor v1"):
        from_published(tmp_path / "v1.pth", "bcos_vit_ti_38", images, **options("v2"))


def test_the_command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    whole = create_model("bcos_densenet121", num_classes=2)
    torch.save(authors_v1(whole), "v1.pkl")
    vit = ["--set", "depth=1", "--set", "num_classes=3", "--out", "start.safetensors"]
    result = CliRunner().invoke(app, ["bcosify", "v1.pkl", "--model", "bcos_vit_ti_13", *vit])
    assert result.exit_code == 0, result.exception
    assert "the v1 network in v1.pkl up to dense block 1" in result.stdout
    assert result.stdout.endswith("start.safetensors\n")
    model = load("start.safetensors")
    assert model.config.num_classes == 3
    assert torch.equal(model.tokenizer.backbone.conv0.weight, whole.features.conv0.weight)
    # The rest is as chance made it, the same each time.
    before = load_file("start.safetensors")["head.weight"]
    CliRunner().invoke(app, ["bcosify", "v1.pkl", "--model", "bcos_vit_ti_13", *vit])
    assert torch.equal(load_file("start.safetensors")["head.weight"], before)
