"""What people try first in Python, with habits from timm, captum and Hugging Face."""

import ast
import json
import pkgutil
import re
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import bcosvit
from bcosvit.attribution import IntegratedGradients
from bcosvit.attribution.interop import CaptumStyle
from bcosvit.guesses import GUESSES, MODEL_GUESSES
from bcosvit.models.weights import CLASSES_KEY, RUN_KEY
from bcosvit.predictor import part_of
from bcosvit.shipped import DEFAULT, shipped
from tests.conftest import randomize, small_config

NAMES = ("tabby", "tiger cat", "golf_ball", "tench", "house")


@pytest.fixture
def weights(tmp_path) -> Path:
    path = tmp_path / "model.safetensors"
    metadata = {CLASSES_KEY: json.dumps(NAMES), RUN_KEY: json.dumps({"eval_crop": 0.5})}
    bcosvit.save(randomize(bcosvit.create_model(small_config())), path, metadata=metadata)
    return path


@pytest.fixture
def model(weights):
    return bcosvit.load(weights)


@pytest.fixture
def photo(tmp_path) -> Path:
    pixels = np.random.default_rng(0).integers(0, 256, (40, 48, 3), np.uint8)
    Image.fromarray(pixels).save(tmp_path / "photo.png")
    return tmp_path / "photo.png"


def test_public_names_are_those_that_type_checkers_see():
    tree = ast.parse(Path(bcosvit.__file__).read_text())
    typed = next(node for node in ast.walk(tree) if isinstance(node, ast.If))
    seen = {alias.name for node in typed.body for alias in node.names}
    assert seen == set(bcosvit.__all__) <= set(dir(bcosvit))
    assert [name for name in bcosvit.__all__ if getattr(bcosvit, name).__name__ != name] == []


def test_weights_bring_classes_and_transform(model):
    assert model.classes == NAMES
    assert model.transform == bcosvit.data.EvalTransform(16, 0.5)
    assert bcosvit.create_model(small_config()).classes is None
    model.reset_classifier(2)
    assert model.classes is None


def test_classes_and_transform_are_saved_again(model, tmp_path):
    bcosvit.save(model, tmp_path / "again.safetensors")
    again = bcosvit.load(tmp_path / "again.safetensors")
    assert (again.classes, again.transform) == (model.classes, model.transform)


def test_pictures_of_any_form_are_the_same_input(model, photo):
    image = Image.open(photo)
    pixels = np.asarray(image)
    expected = model.transform(image)
    forms = [str(photo), photo, image, pixels, pixels / 255, pixels.transpose(2, 0, 1), expected]
    maps = [bcosvit.explain(model, form).map for form in forms]
    assert all(torch.equal(each, maps[0]) for each in maps)
    both = bcosvit.explain(model, [photo, image])
    assert both.map.shape == (2, 16, 16) and both.names == ("photo.png", "")
    assert bcosvit.explain(model, photo.parent).map.shape == (1, 16, 16)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ("no.png", "There is no image no.png"),
        (3, "int is no picture"),
        (torch.rand(16, 16), "shape"),
        (np.full((4, 4, 3), 2.0), r"\[0, 1\]"),
        (np.full((4, 4, 3), 256), r"\[0, 255\]"),
        (np.full((4, 4, 3), -1), r"\[0, 255\]"),
        (np.full((4, 4, 3), 1j), "complex128 is no picture"),
        (np.full((4, 4, 3), "a"), "is no picture"),
        (np.zeros((4, 4, 5), np.uint8), "is no picture"),
        (np.zeros((0, 4, 3), np.uint8), "is no picture"),
        ([], "no pictures"),
        (torch.rand(1, 3, 0, 0), "no pixels"),
        (torch.rand(1, 3, 16, 16).to_sparse(), "to_dense"),
        (torch.rand(1, 3, 16, 16, device="meta"), "without values"),
        (torch.rand(1, 3, 16, 16, dtype=torch.float64), "torch.float64"),
    ],
)
def test_wrong_pictures(model, wrong, says):
    with pytest.raises(ValueError, match=says):
        bcosvit.explain(model, wrong)


@pytest.mark.parametrize("target", [10**30, -(10**30), [10**30], [[0]], [None], [True], [1.5]])
def test_wrong_classes(model, photo, target):
    with pytest.raises(ValueError, match="from 0 to 4"):
        bcosvit.explain(model, photo, target)


def test_arrays_of_other_integers_and_of_booleans(model):
    pixels = np.random.default_rng(0).integers(0, 256, (20, 20, 3))
    expected = bcosvit.explain(model, pixels.astype(np.uint8)).map
    for dtype in (np.int64, np.uint16):
        assert torch.equal(bcosvit.explain(model, pixels.astype(dtype)).map, expected)
    mask = pixels[..., 0] > 100
    white = bcosvit.explain(model, 255 * mask.astype(np.uint8)).map
    assert torch.equal(bcosvit.explain(model, mask).map, white)


@pytest.mark.parametrize("method", [None, 3, b"inherent"])
def test_what_is_no_method(model, photo, method):
    with pytest.raises(ValueError, match="is no method"):
        bcosvit.explain(model, photo, method=method)


def test_no_method(model, photo):
    with pytest.raises(ValueError, match="No method is given; choose from inherent"):
        bcosvit.explain(model, photo, method=[])


def test_classes_by_name(model, photo):
    by_number = bcosvit.explain(model, photo, 2)
    assert by_number.labels == ["golf_ball"]
    for name in ("golf_ball", "Golf ball", "GOLF-BALL", "2"):
        assert torch.equal(bcosvit.explain(model, photo, name).map, by_number.map)
    several = bcosvit.explain(model, photo, ["tench", 2])
    assert several.labels == [["tench", "golf_ball"]]
    torch.testing.assert_close(several.map[:, 1], by_number.map)
    each = bcosvit.explain(model, [photo, photo], ["tench", "house"])
    assert each.labels == ["tench", "house"]
    with pytest.raises(ValueError, match="did you mean 'tabby' or 'tiger cat'"):
        bcosvit.explain(model, photo, "taby cat")


def test_versus_is_the_exact_difference(model, photo):
    rather = bcosvit.explain(model, photo, "tabby", versus="tench")
    a, b = (bcosvit.explain(model, photo, name) for name in ("tabby", "tench"))
    close = partial(torch.testing.assert_close, rtol=1e-4, atol=1e-4)
    close(rather.map, a.map - b.map)
    close(rather.weights, a.weights - b.weights)
    close(rather.logit, a.logit - b.logit)
    close(rather.map.sum((1, 2)) + rather.residual, rather.logit)
    assert "rather than tench" in repr(rather)
    with pytest.raises(ValueError, match="only maps that sum to the logit"):
        bcosvit.explain(model, photo, "tabby", "ixg", versus="tench")


def test_plots(model, photo, tmp_path):
    a = bcosvit.explain(model, [photo, photo], ["tabby", "house"])
    assert a.plot().size[0] > 4 * 224 and a.plot(size=50).size[0] < 4 * 224
    a.save(tmp_path / "a.png")
    with Image.open(tmp_path / "a.png") as saved:
        assert saved.size == a.plot().size
    a.save(tmp_path / "a.npz")
    with np.load(tmp_path / "a.npz") as arrays:
        np.testing.assert_array_equal(arrays["map_inherent"], a.map)
    with pytest.raises(ValueError, match=r"\.png"):
        a.save(tmp_path / "a.docx")
    with pytest.raises(ValueError, match="size = 0"):
        a.plot(size=0)
    assert a._repr_html_().startswith("<img")


def test_methods_side_by_side(model, photo):
    found = bcosvit.explain(model, photo, "tabby", method=["inherent", "ixg", "rollout"])
    assert list(found) == ["inherent", "ixg", "rollout"]
    assert torch.equal(found["ixg"].map, bcosvit.explain(model, photo, "tabby", "ixg").map)
    # One tile per method, and the picture, the overlay and W(x).
    assert found.plot(size=100).size[0] > 6 * 100
    assert "rollout" in repr(found) and found._repr_html_().startswith("<img")


def test_show_opens_a_viewer_outside_of_notebooks(model, photo, monkeypatch):
    shown = []
    monkeypatch.setattr(Image.Image, "show", lambda self: shown.append(self.size))
    bcosvit.explain(model, photo).show()
    assert len(shown) == 1


def test_predictors_are_explained_too(weights, photo):
    predictor = bcosvit.Predictor.load(weights, "cpu")
    assert bcosvit.explain(predictor, photo, "tench").labels == ["tench"]
    with pytest.raises(ValueError, match=r"bcosvit\.bcosify"):
        bcosvit.explain(torch.nn.Linear(2, 2), photo)


def test_like_a_pipeline(weights, photo):
    predictor = bcosvit.Predictor.load(weights, "cpu")
    found = predictor(str(photo), top_k=2)
    assert [each["label"] in NAMES for each in found] == [True, True]
    assert found[0]["score"] >= found[1]["score"]
    assert predictor([photo, photo], top_k=2) == [found, found]
    with pytest.raises(ValueError, match="top_k = 0"):
        predictor(photo, top_k=0)


def test_pictures_know_the_precision_of_their_batch(model, photo):
    """Whether contributions miss the logit is judged by it."""
    predictor = bcosvit.Predictor.of(model)
    predictor.model.to(torch.bfloat16)
    found = predictor.explain(predictor.read(photo))
    assert found.exact.computed_in == torch.bfloat16
    together = part_of(found.exact, [0], logits=False)
    assert together.computed_in == torch.bfloat16 and together.logits is found.exact.logits


def test_what_predictors_refuse(model, photo):
    with pytest.raises(ValueError, match="5 classes, not 2"):
        bcosvit.Predictor.of(model, ["cat", "dog"])
    predictor = bcosvit.Predictor.of(model)
    with pytest.raises(ValueError, match=r"Predictor\.read"):
        predictor.explain(photo)
    with pytest.raises(ValueError, match="find_classes"):
        predictor.explain(predictor.read(photo), ["tabby"])


def test_like_timm():
    assert bcosvit.list_models("*_ti_87*", pretrained=True) == ["bcos_vit_ti_87_imagenette"]
    assert set(bcosvit.list_models(pretrained=True)) == set(shipped())
    made = bcosvit.create_model("bcos_densenet121", pretrained=True, num_classes=3)
    trained = bcosvit.load("bcos_densenet121_imagenette")
    assert made.config.num_classes == 3
    first = "features.conv0.weight"
    assert torch.equal(made.state_dict()[first], trained.state_dict()[first])
    untrained = bcosvit.create_model("bcos_densenet121_imagenette", num_classes=3)
    assert untrained.config.num_classes == 3 and untrained.training
    with pytest.raises(ValueError, match=f"No weights.*{DEFAULT}"):
        bcosvit.create_model("vit_ti_13", pretrained=True)
    with pytest.raises(ValueError, match="did you mean"):
        bcosvit.create_model("bcos_vit_ti_39", pretrained=True)
    with pytest.raises(ValueError, match="other options than growth"):
        bcosvit.create_model("bcos_densenet121", pretrained=True, growth=3)


def test_like_hugging_face(model, tmp_path):
    model.save_pretrained(tmp_path / "folder")
    again = bcosvit.from_pretrained(tmp_path / "folder")
    assert again.classes == NAMES
    config = json.loads((tmp_path / "folder/config.json").read_text())
    assert config["id2label"]["1"] == "tiger cat" and config["label2id"]["tiger cat"] == 1
    processor = json.loads((tmp_path / "folder/preprocessor_config.json").read_text())
    assert processor["size"] == {"shortest_edge": 32}
    assert processor["crop_size"] == {"height": 16, "width": 16}
    assert not processor["do_normalize"]


def test_like_captum():
    model = bcosvit.create_model(small_config()).double().eval()
    images = torch.rand(2, 3, 16, 16, dtype=torch.float64)
    method = IntegratedGradients(steps=100)
    found = CaptumStyle(model, method).attribute(images, target=1, baselines=0.5)
    logits = model(images)[:, 1] - model(torch.full_like(images, 0.5))[:, 1]
    torch.testing.assert_close(found.sum((1, 2, 3)), logits, rtol=0.02, atol=1e-6)
    with pytest.raises(ValueError, match="leave them out"):
        CaptumStyle(model).attribute(images, target=1, baselines=0.5)


@pytest.mark.parametrize("name", GUESSES)
def test_guesses_name_what_exists(name):
    with pytest.raises(AttributeError, match=re.escape(f"bcosvit has no {name};")) as caught:
        getattr(bcosvit, name)
    for path in re.findall(r"bcosvit(?:\.\w+)+", str(caught.value)):
        assert pkgutil.resolve_name(path) is not None
    for method in re.findall(r"'(\w+)'", str(caught.value)):
        assert method in bcosvit.explainers()


@pytest.mark.parametrize("name", MODEL_GUESSES)
def test_guesses_of_methods_name_what_exists(name):
    model = bcosvit.create_model(small_config())
    with pytest.raises(AttributeError, match=re.escape(f"A model has no {name};")) as caught:
        getattr(model, name)
    message = str(caught.value)
    for path in re.findall(r"bcosvit(?:\.\w+)+", message):
        assert pkgutil.resolve_name(path) is not None
    for attribute in re.findall(r"model\.(\w+)", message):
        assert hasattr(model, attribute)
    with pytest.raises(AttributeError, match="has no attribute 'no_such_name'"):
        _ = model.no_such_name


@pytest.mark.parametrize(
    "given", [("photo.jpg",), ("photo.jpg", "model"), (torch.rand(3, 16, 16),)]
)
def test_explaining_without_a_model(given):
    with pytest.raises(ValueError, match="model is the first argument"):
        bcosvit.explain(*given)


def test_explaining_nothing():
    with pytest.raises(ValueError, match="nothing to explain"):
        bcosvit.explain(bcosvit.create_model(small_config()))


def test_near_misses():
    with pytest.raises(AttributeError, match="did you mean 'create_model'"):
        _ = bcosvit.creat_model
    assert not hasattr(bcosvit, "no_such_name") and not hasattr(bcosvit, "_private")
