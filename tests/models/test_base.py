"""Models as repositories and as torch.hub entries, their heads replaced, their stages in sight."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
import torch

from bcosvit import DenseNetConfig, create_model, explain, load
from bcosvit.models import Classifier, DenseNet, VisionTransformer, features
from bcosvit.models.weights import read_metadata
from tests.attribution.test_exactness import check
from tests.conftest import randomize, small_config, tiny_config

ROOT = Path(__file__).parents[2]
DENSE = {"growth": 2, "blocks": (2, 1), "stem_width": 4, "bottleneck": 2, "num_classes": 6}
NOTES = {"bcosvit.classes": json.dumps(["cat", "dog"]), "bcosvit.run": '{"accuracy": 0.5}'}


@pytest.fixture
def small():
    return randomize(create_model(small_config(num_classes=2))).eval()


def test_a_folder_and_back(small, tmp_path):
    small.save_pretrained(tmp_path / "m", metadata=NOTES, pictures={"map.png": b"png"})
    files = {path.name for path in (tmp_path / "m").iterdir()}
    processor = "preprocessor_config.json"
    assert files == {"model.safetensors", "config.json", processor, "README.md", "map.png"}
    assert json.loads((tmp_path / "m/config.json").read_text())["config"]["num_classes"] == 2
    card = (tmp_path / "m/README.md").read_text("utf-8")
    assert card.startswith("---\nlibrary_name: bcosvit\n")
    for said in ("(map.png)", "2: cat, dog", "50.00%", "16×16 pixels", "bcosvit.explain"):
        assert said in card
    assert NOTES.items() <= read_metadata(tmp_path / "m/model.safetensors").items()
    x = torch.rand(1, 3, 16, 16)
    for twin in (
        Classifier.from_pretrained(tmp_path / "m"),
        VisionTransformer.from_pretrained(str(tmp_path / "m")),
        Classifier.from_pretrained(tmp_path / "m/model.safetensors"),
    ):
        assert torch.equal(twin(x), small(x))


def test_the_wrong_class(small, tmp_path):
    small.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="holds a VisionTransformer, not a DenseNet"):
        DenseNet.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="so it has no revision"):
        Classifier.from_pretrained(tmp_path / "model.safetensors", revision="v1")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"no weights file .*model.safetensors"):
        Classifier.from_pretrained(tmp_path / "empty")


def test_from_a_repository(small, tmp_path, monkeypatch):
    small.save_pretrained(tmp_path)
    calls = []

    def download(*arguments, **options):
        calls.append((*arguments, options["revision"], options["token"]))
        return str(tmp_path / "model.safetensors")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    twin = Classifier.from_pretrained("me/cats", revision="v1", token="secret")
    assert calls == [("me/cats", "model.safetensors", "v1", "secret")]
    x = torch.rand(1, 3, 16, 16)
    assert torch.equal(twin(x), small(x))


class Api:
    """Stands in for the hub: what was asked of it, and what it was given."""

    calls: list

    def __init__(self, token=None):
        self.calls.append(("token", token))

    def create_repo(self, *, repo_id, private, exist_ok):
        self.calls.append(("repo", repo_id, private, exist_ok))
        return SimpleNamespace(repo_id=f"me/{repo_id}")

    def create_branch(self, *, repo_id, branch, exist_ok):
        self.calls.append(("branch", repo_id, branch, exist_ok))

    def upload_folder(self, *, repo_id, folder_path, commit_message, revision, create_pr):
        names = sorted(path.name for path in Path(folder_path).iterdir())
        self.calls.append(("upload", repo_id, names, commit_message, revision, create_pr))
        return SimpleNamespace(commit_url="https://hub/commit")


def test_pushing(small, tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    names = ["README.md", "config.json", "model.safetensors", "preprocessor_config.json"]
    monkeypatch.setattr(Api, "calls", [], raising=False)
    assert small.push_to_hub("cats", private=True, branch="b") == "https://hub/commit"
    assert Api.calls == [
        ("token", None),
        ("repo", "cats", True, True),
        ("branch", "me/cats", "b", True),
        ("upload", "me/cats", names, "Add model", "b", None),
    ]
    Api.calls.clear()
    small.save_pretrained(tmp_path / "dogs", push_to_hub=True, commit_message="New")
    assert Api.calls[-1] == ("upload", "me/dogs", names, "New", None, None)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ValueError, match=r"pip install 'bcosvit\[hub\]'"):
        small.push_to_hub("cats")


CONFIGS = {
    "B-cos ViT": small_config(position="emb"),
    "on a DenseNet": tiny_config(),
    "conventional": small_config(family="conventional"),
    "v1": DenseNetConfig(flavor="v1", **DENSE),
    "v2": DenseNetConfig(flavor="v2", **DENSE),
    "torchvision": DenseNetConfig(flavor="conventional", **DENSE),
}


def pixels(config) -> torch.Tensor:
    side = 32 if isinstance(config, DenseNetConfig) else config.image_size[0]
    return torch.rand(2, 3, side, side, dtype=torch.float64)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_a_new_head(config):
    model = randomize(create_model(config)).double().eval()
    x = pixels(config)
    if config.family == "bcos":
        explain(model, x)
    body = model.forward_features(x)
    model.reset_classifier(4)
    assert model.config.num_classes == 4
    assert model(x).shape == (2, 4)
    assert torch.equal(model.forward_features(x), body)
    # As a model that was made for so many classes, its bias included.
    made = create_model(config, num_classes=4, logit_bias=None)
    assert made.config == model.config
    assert repr(made) == repr(model)
    head = model.get_classifier().weight
    assert head.shape == made.get_classifier().weight.shape
    assert head.dtype == torch.float64


@pytest.mark.parametrize("config", [c for c in CONFIGS.values() if c.family == "bcos"])
def test_explanations_are_of_the_new_head(config):
    model = randomize(create_model(config)).double().eval()
    x = pixels(config)
    explain(model, x)
    model.reset_classifier(4)
    found = explain(model, x, "all")
    assert (found.completeness_error() < 1e-9 * found.map.abs().sum((-2, -1))).all()
    # A head of zeros leaves nothing: it is the new one that the explanation went through.
    torch.nn.init.zeros_(model.get_classifier().weight)
    assert (explain(model, x).map == 0).all()


def test_w_is_still_the_product_of_dynamic_matrices():
    """Which completeness alone does not prove."""
    gains = {"gain": 1.0, "prior_gain": 4.0, "feature_scale": 2.0, "logit_scale": 0.5}
    model = randomize(create_model(tiny_config(tap=1, **gains))).double().eval()
    explain(model, torch.rand(1, 3, 32, 32, dtype=torch.float64))
    model.reset_classifier(4)
    check(model, "v1", 1)


def test_a_chosen_bias_stays():
    model = create_model(DenseNetConfig(flavor="v2", logit_bias=-1.5, **DENSE))
    model.reset_classifier(4)
    assert model.logit.bias == -1.5
    with pytest.raises(ValueError, match="num_classes = 0"):
        model.reset_classifier(0)
    assert model.config.num_classes == 4


def test_the_head_trains_where_the_model_does(small):
    small.train().reset_classifier(3)
    assert small.get_classifier().training
    small(torch.rand(2, 3, 16, 16)).sum().backward()
    assert small.head.weight.grad is not None


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_maps_of_every_stage(config):
    model = randomize(create_model(config)).double().eval()
    x = pixels(config)
    stages = features(model)
    maps, info = stages(x), stages.feature_info
    assert [list(m.shape) for m in maps] == [
        [2, width, x.shape[2] // reduction, x.shape[3] // reduction]
        for width, reduction in zip(info.channels(), info.reduction(), strict=True)
    ]
    # Each is what the module it names gives.
    for name, found in zip(info.module_name(), maps, strict=True):
        given = []
        hook = model.get_submodule(name).register_forward_hook(lambda *a, to=given: to.append(a[2]))
        model(x)
        hook.remove()
        expected = given[0] if found.shape == given[0].shape else given[0].transpose(1, 2)
        assert torch.equal(found.flatten(), expected.flatten())


@pytest.mark.parametrize("config", [small_config(), DenseNetConfig(growth=2, blocks=(1, 1))])
def test_gradients_of_single_images_by_vmap(config):
    model = randomize(create_model(config.replace(num_classes=3))).double().eval()
    images = torch.rand(3, 3, 16, 16, dtype=torch.float64)
    weights = {name: weight.detach() for name, weight in [*model.named_parameters()][-1:]}

    def loss(weights, image):
        return torch.func.functional_call(model, weights, (image[None],)).square().sum()

    torch.testing.assert_close(torch.vmap(model)(images[:, None])[:, 0], model(images))
    found = torch.vmap(torch.func.grad(loss), in_dims=(None, 0))(weights, images)
    for name, each in found.items():
        for image, gradient in zip(images, each, strict=True):
            value = model(image[None]).square().sum()
            expected = torch.autograd.grad(value, model.get_parameter(name))[0]
            torch.testing.assert_close(gradient, expected)


def test_the_last_map_is_what_the_head_averages(small):
    x = torch.rand(2, 3, 16, 16)
    last = features(small)(x)[-1]
    assert torch.equal(last.flatten(2).transpose(1, 2), small.forward_features(x))
    logits = small.logit(small.head(small.forward_features(x).mean(1)))
    assert torch.equal(logits, small(x))
    with pytest.raises(ValueError, match="Linear is no model of bcosvit"):
        features(torch.nn.Linear(1, 1))


def test_torch_hub(small, tmp_path):
    small.save_pretrained(tmp_path)
    made = torch.hub.load(
        str(ROOT), "create_model", "bcos_vit_ti_13", source="local", num_classes=3, depth=1
    )
    assert made.config.num_classes == 3
    path = str(tmp_path / "model.safetensors")
    x = torch.rand(1, 3, 16, 16)
    assert torch.equal(torch.hub.load(str(ROOT), "load", path, source="local")(x), load(path)(x))
