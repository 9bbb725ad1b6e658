"""`explain_pictures`: what it writes, what it refuses, and that the numbers are the model's."""

import json
import re

import numpy as np
import pytest
import torch
from PIL import Image

import bcosvit
from bcosvit.data.images import read_image
from bcosvit.data.transforms import EvalTransform
from bcosvit.predictor import Predictor
from bcosvit.report.explain import explain_pictures, find_pictures
from tests.report.support import CLASSES, Page, write_pictures, write_weights


@pytest.fixture
def weights(tmp_path):
    return write_weights(tmp_path / "model.safetensors")


@pytest.fixture
def pictures(tmp_path):
    return write_pictures(tmp_path / "pictures", 3)


def assert_close(ours, expected):
    """Up to rounding in float32, which differs between batches of another size."""
    np.testing.assert_allclose(ours, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


def test_a_report_on_a_folder(weights, pictures, tmp_path):
    out = tmp_path / "report.html"
    found = explain_pictures([pictures], weights, methods="all", top=2, out=out)
    assert (found.explained, found.skipped) == (3, ())
    page = Page(out)
    page.assert_self_contained()
    assert [h for h in page.headings if h.endswith(".png")] == ["0000.png", "0001.png", "0002.png"]
    # For each picture two classes: the photo, an overlay, W(x) and ten methods.
    assert len(page.images) == 3 * 2 * (3 + len(bcosvit.explainers(bcosvit.load(weights))))
    assert page.text.count("Σ contributions") == 3 * 2
    assert "could not be read" not in page.text
    assert page.text.count("Probabilities are independent sigmoids") == 1
    assert '"family": "bcos"' in page.text
    assert bcosvit.__version__ in page.text
    assert torch.__version__ in page.text


def test_the_numbers_are_the_models(weights, pictures, tmp_path):
    out = tmp_path / "numbers"
    explain_pictures(
        [pictures],
        weights,
        classes="dog,0",
        methods="inherent,rollout",
        out=None,
        npz=out,
        json=out / "all.json",
    )
    model = bcosvit.load(weights)
    paths = sorted(pictures.iterdir())
    images = torch.stack([EvalTransform(16)(read_image(path)) for path in paths])
    records = json.loads((out / "all.json").read_text())
    assert records["skipped"] == []
    assert records["config"]["num_classes"] == 5
    for number, path in enumerate(paths):
        arrays = np.load(out / f"{number + 1:05}-{path.stem}.npz")
        assert np.array_equal(arrays["image"], images[number])
        assert arrays["classes"].tolist() == ["dog", "cat"]
        logits = model(images[number : number + 1])[0].detach()
        np.testing.assert_allclose(arrays["logits"], logits, rtol=1e-4)
        np.testing.assert_allclose(arrays["probabilities"], logits.sigmoid(), rtol=1e-4)
        record = records["images"][number]
        assert record["file"] == path.name
        assert record["top"][0]["index"] == logits.argmax()
        for row, label in enumerate((1, 0)):
            own = bcosvit.explain(model, images[number : number + 1], label)
            assert_close(arrays["map_inherent"][row], own.map[0])
            assert_close(arrays["weights"][row], own.weights[0])
            roll = bcosvit.explain(model, images[number : number + 1], label, "rollout")
            assert_close(arrays["map_rollout"][row], roll.map[0])
            entry = record["explained"][row]
            assert entry["class"] == CLASSES[label]
            total = entry["contributions"] + entry["residual"] + entry["bias"]
            assert total == pytest.approx(entry["logit"], abs=1e-3)
            assert entry["completeness_error"] < 1e-3


def test_pictures_of_every_map(weights, pictures, tmp_path):
    explain_pictures(
        [pictures / "0001.png"],
        weights,
        top=1,
        methods="ixg,inherent",
        out=None,
        png=tmp_path / "p",
    )
    names = sorted(path.name for path in (tmp_path / "p").iterdir())
    kinds = [name.rsplit("-", 1)[1] for name in names]
    assert kinds == ["colors.png", "inherent.png", "ixg.png", "overlay.png"]
    assert all(name.startswith("00001-0001-") for name in names)
    for path in (tmp_path / "p").iterdir():
        with Image.open(path) as picture:
            assert picture.size == (16, 16)
            assert (picture.mode == "RGBA") == path.name.endswith("colors.png")


def test_bad_pictures_are_listed_and_passed_over(weights, pictures, tmp_path):
    (pictures / "0001.png").write_bytes(b"nothing of the kind")
    (pictures / "empty.jpg").touch()
    found = explain_pictures(
        [pictures], weights, out=tmp_path / "r.html", json=tmp_path / "r.json", npz=tmp_path / "n"
    )
    assert found.explained == 2
    assert [item.key for item in found.skipped] == ["0001.png", "empty.jpg"]
    assert "2 could not be read" in found.summary("r.html")
    page = Page(tmp_path / "r.html")
    page.assert_self_contained()
    assert "not an image of a known format" in page.text
    assert "2 left out" in page.text
    record = json.loads((tmp_path / "r.json").read_text())
    assert [item["file"] for item in record["skipped"]] == ["0001.png", "empty.jpg"]
    assert [image["number"] for image in record["images"]] == [1, 3]
    assert len(list((tmp_path / "n").iterdir())) == 2


@pytest.mark.parametrize("count", [1, 2])
def test_nothing_readable_is_an_error_and_leaves_nothing(weights, tmp_path, count):
    folder = tmp_path / "bad"
    folder.mkdir()
    for number in range(count):
        (folder / f"{number}.png").write_bytes(b"no")
    says = "0.png is not an image" if count == 1 else "None of 2 pictures can be read"
    with pytest.raises(ValueError, match=says):
        explain_pictures([folder], weights, out=tmp_path / "o" / "r.html", json=tmp_path / "o/j")
    assert list((tmp_path / "o").iterdir()) == []


def test_joint_scales(weights, pictures, tmp_path):
    def highest(joint: bool) -> list[str]:
        """The upper ends of color bars: a method's for each class, then the other's."""
        out = tmp_path / f"{joint}.html"
        one = pictures / "0000.png"
        explain_pictures([one], weights, top=3, methods="inherent,ixg", joint=joint, out=out)
        ends = re.findall(r"<span>\+([\d.e-]+)</span></span>", out.read_text())
        return [*ends[::2], *ends[1::2]]

    alone, together = highest(False), highest(True)
    assert len(set(alone[:3])) == len(set(alone[3:])) == 3
    assert len(set(together[:3])) == len(set(together[3:])) == 1
    assert together[0] != together[3]


def test_conventional_models_have_softmax_and_sums_of_exact_methods_only(pictures, tmp_path):
    weights = write_weights(tmp_path / "c.safetensors", family="conventional", classes=None)
    explain_pictures(
        [pictures], weights, methods="all", out=tmp_path / "all.html", npz=tmp_path / "all"
    )
    page = Page(tmp_path / "all.html")
    page.assert_self_contained()
    assert "Σ contributions" in page.text
    assert "CheferLRP" in page.text
    assert "class 0" in page.text
    for path in (tmp_path / "all").iterdir():
        arrays = np.load(path)
        assert arrays["probabilities"].sum() == pytest.approx(1)
        logits = arrays["map_exact-linear"].sum((1, 2)) + arrays["residual"] + arrays["bias"]
        expected = arrays["logits"][arrays["target"]]
        np.testing.assert_allclose(logits, expected, rtol=1e-3, atol=1e-3)
    explain_pictures(
        [pictures], weights, methods="ixg,plrp", out=tmp_path / "r.html", npz=tmp_path / "n"
    )
    assert "Σ contributions" not in Page(tmp_path / "r.html").text
    for path in (tmp_path / "n").iterdir():
        arrays = np.load(path)
        assert arrays["probabilities"].sum() == pytest.approx(1)
        assert "weights" not in arrays


def test_the_default_method_is_the_models_own(weights, pictures, tmp_path):
    explain_pictures([pictures], weights, out=None, npz=tmp_path / "n")
    arrays = np.load(next((tmp_path / "n").iterdir()))
    assert [name for name in arrays if name.startswith("map_")] == ["map_inherent"]


def test_more_classes_than_are_explained_at_once(pictures, tmp_path):
    weights = write_weights(tmp_path / "m.safetensors", classes=None, num_classes=20)
    explain_pictures([pictures / "0000.png"], weights, top=99, out=None, npz=tmp_path / "n")
    arrays = np.load(next((tmp_path / "n").iterdir()))
    assert sorted(arrays["target"].tolist()) == list(range(20))
    logits = arrays["map_inherent"].sum((1, 2)) + arrays["residual"] + arrays["bias"]
    np.testing.assert_allclose(logits, arrays["logits"][arrays["target"]], rtol=1e-3, atol=1e-3)


def test_the_crop_of_training_is_used(pictures, tmp_path):
    model = bcosvit.load(write_weights(tmp_path / "m.safetensors"))
    notes = {"bcosvit.run": json.dumps({"eval_crop": 1.0})}
    bcosvit.save(model, tmp_path / "whole.safetensors", metadata=notes)
    picture = pictures / "0000.png"
    for name, crop in (("whole", 1.0), ("m", 224 / 256)):
        explain_pictures([picture], tmp_path / f"{name}.safetensors", out=None, npz=tmp_path / name)
        image = np.load(tmp_path / name / "00001-0000.npz")["image"]
        assert np.array_equal(image, EvalTransform(16, crop)(read_image(picture)))


def test_equal_names_do_not_collide(weights, pictures, tmp_path):
    other = write_pictures(tmp_path / "other", 1)
    both = [pictures / "0000.png", other]
    explain_pictures(both, weights, out=tmp_path / "r.html", npz=tmp_path / "n")
    assert len(list((tmp_path / "n").iterdir())) == 2
    assert {"pictures/0000.png", "other/0000.png"} <= set(Page(tmp_path / "r.html").headings)


def test_odd_names_are_shown_and_written(weights, pictures, tmp_path):
    odd = pictures / "a <b>&amp; 'q\" ü [x].png"
    (pictures / "0000.png").rename(odd)
    explain_pictures([odd], weights, classes="3", out=tmp_path / "r.html", png=tmp_path / "p")
    page = Page(tmp_path / "r.html")
    page.assert_self_contained()
    assert odd.name in page.headings
    assert "<b>mouse</b>" in page.headings
    assert all("<" not in path.name and "/" not in path.name for path in (tmp_path / "p").iterdir())


def test_a_densenet(pictures, tmp_path):
    config = bcosvit.DenseNetConfig(
        flavor="v2", growth=2, blocks=(1, 1), stem_width=4, bottleneck=1, num_classes=2
    )
    model = bcosvit.create_model(config)
    weights = tmp_path / "d.safetensors"
    bcosvit.save(model, weights)
    one = pictures / "0000.png"
    explain_pictures([one], weights, methods="inherent,ixg", out=tmp_path / "r")
    assert "B-cos DenseNet, 2 classes, 224×224 pixels" in Page(tmp_path / "r").text


def test_classes_are_found_by_name_and_number():
    config = bcosvit.ModelConfig(
        width=12, depth=1, image_size=16, num_classes=5, backbone=bcosvit.StemConfig(widths=(6,))
    )
    model = bcosvit.create_model(config)
    predictor = Predictor.of(model, CLASSES)
    assert predictor.find_classes("dog, sea star") == [1, 2]
    assert predictor.find_classes("4,cat,0") == [4, 0]
    assert predictor.find_classes('"tench, Tinca tinca",dog') == [4, 1]
    # A class that is called by a number is meant before its position.
    assert Predictor.of(model, ("1", "0", "a", "b", "c")).find_classes("0") == [1]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"classes": "cta"}, r"no class 'cta'; did you mean 'cat'\?"),
        ({"classes": "zebra"}, "the model knows cat, dog"),
        ({"classes": "5"}, "no class '5'"),
        ({"classes": " , "}, "names no class"),
        ({"classes": "cat", "top": 2}, "--classes or --top"),
        ({"top": 0}, "top = 0"),
        ({"methods": "inherant"}, "did you mean 'inherent'"),
        ({"methods": "cheferlrp"}, "some of inherent, ixg"),
        ({"methods": ""}, "No method is named"),
        ({"device": "abacus"}, "The device 'abacus' cannot be used"),
    ],
)
def test_mistakes(weights, pictures, tmp_path, options, says):
    with pytest.raises(ValueError, match=says):
        explain_pictures([pictures], weights, out=tmp_path / "o" / "r.html", **options)
    assert not (tmp_path / "o").exists()


def test_mistaken_paths(weights, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="no file or folder"):
        find_pictures([tmp_path / "missing.png"])
    with pytest.raises(ValueError, match="no pictures"):
        find_pictures([tmp_path / "empty"])
    with pytest.raises(ValueError, match="nothing to explain"):
        find_pictures([])
    with pytest.raises(ValueError, match="path is empty"):
        find_pictures([""])


@pytest.mark.parametrize("option", ["out", "json"])
def test_pictures_are_not_replaced_by_results(weights, pictures, tmp_path, option):
    picture = pictures / "0000.png"
    before = picture.read_bytes()
    with pytest.raises(ValueError, match="one of the pictures"):
        explain_pictures([pictures], weights, **{"out": None, option: picture})
    assert picture.read_bytes() == before
    with pytest.raises(ValueError, match="give a name in"):
        explain_pictures([pictures], weights, **{"out": None, option: tmp_path / "maps.png"})


def test_two_results_are_not_one_file(weights, pictures, tmp_path):
    same = tmp_path / "results"
    with pytest.raises(ValueError, match="same file"):
        explain_pictures([pictures], weights, out=same, json=same)
    assert not same.exists()


def test_weights_that_do_not_fit_their_names(pictures, tmp_path):
    weights = write_weights(tmp_path / "m.safetensors", num_classes=3)
    with pytest.raises(ValueError, match="names 5 classes, but its model has 3"):
        explain_pictures([pictures], weights)


def test_pictures_that_are_not_square(pictures, tmp_path):
    weights = write_weights(tmp_path / "m.safetensors", image_size=(16, 24))
    with pytest.raises(ValueError, match="24×16 pixels, but only squares"):
        explain_pictures([pictures], weights)
