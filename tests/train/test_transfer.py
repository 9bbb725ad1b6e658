"""The recipe for small data: the head alone is trained, on cached inputs, and stays explainable."""

import pytest
import torch
from PIL import Image
from torch import nn

import bcosvit
from bcosvit.train import train
from bcosvit.train.recipe import Recipe, get_recipe
from tests.data.support import folder
from tests.train.support import DATA, model_config, recipe


class Small(nn.Module):
    """A network whose last layer classifies every position."""

    def __init__(self, classes=5):
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3, stride=4)
        self.norm = nn.BatchNorm2d(6)
        self.fc = nn.Linear(6, classes)

    def forward(self, x):
        return self.fc(torch.relu(self.norm(self.conv(x))).permute(0, 2, 3, 1)).mean((1, 2))


def converted():
    return bcosvit.bcosify(Small().eval(), image_size=32, b=2.0, fade=0.0)


def models():
    stem = bcosvit.StemConfig(widths=(8,))
    small = {"width": 12, "num_heads": 3, "depth": 1, "image_size": 32, "num_classes": 5}
    return {
        "converted": converted(),
        "vit": bcosvit.create_model(bcosvit.ModelConfig(backbone=stem, **small)),
        "vit on it": bcosvit.create_model(
            "bcos_vit_ti", backbone=converted(), depth=1, width=12, image_size=32
        ),
        "densenet": bcosvit.create_model("bcos_densenet121", blocks=(1, 1), num_classes=5),
    }


@pytest.mark.parametrize("name", ["converted", "vit", "vit on it", "densenet"])
def test_what_the_head_takes_and_makes_of_it(name):
    model = models()[name].eval()
    encoded = model.encoding(torch.rand(2, 3, 32, 32))
    with torch.no_grad():
        inputs = model.head_inputs(encoded)
        torch.testing.assert_close(model.from_head_inputs(inputs), model.from_encoded(encoded))
        model.get_classifier().weight.zero_()
        torch.testing.assert_close(model.head_inputs(encoded), inputs)


def photos(root):
    """Two classes of one color each."""
    folder(root, {"blue": 12, "red": 12})
    for name, color in {"blue": (20, 40, 200), "red": (200, 40, 20)}.items():
        for path in (root / name).iterdir():
            Image.new("RGB", (40, 40), color).save(path)
    return root


def test_the_head_is_trained_and_nothing_else(tmp_path):
    start = tmp_path / "start.safetensors"
    bcosvit.save(converted(), start)
    data = photos(tmp_path / "photos")
    few = {"num_workers": 0, "epochs": 4, "warmup_epochs": 0, "learning_rate": 0.1}
    # No recipe is named: images of one's own are transferred to.
    run = train(data, init=start, settings=few, out=tmp_path / "run", accelerator="cpu")
    assert run.accuracy == 1.0
    before, after = bcosvit.load(start), bcosvit.load(run.weights)
    assert after.config.num_classes == 2 and after.classes == ("blue", "red")
    old, new = before.state_dict(), after.state_dict()
    differ = {k for k in old if old[k].shape != new[k].shape or not torch.equal(old[k], new[k])}
    assert {key.rsplit(".", 2)[1] for key in differ} == {"fc"}
    found = bcosvit.explain(after, torch.rand(2, 3, 32, 32))
    assert (found.completeness_error() < 1e-5).all()
    assert (found.residual == 0).all()


def test_what_a_head_takes_may_have_no_channels_in_space(tmp_path):
    ways = recipe(head_only=True, cache_views=1, channels_last=True, epochs=1, ema=None)
    assert train(DATA, out=tmp_path / "run", model=model_config(), recipe=ways).rows


def test_a_head_needs_a_cache():
    with pytest.raises(ValueError, match="cache_views"):
        Recipe(head_only=True)
    assert get_recipe("transfer").head_only
