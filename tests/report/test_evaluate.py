"""`evaluate_weights`: the report and its tables, which data fit, and what cannot be measured."""

import csv
import io
import json
import re

import pytest
import torch
from rich.console import Console

import bcosvit
from bcosvit.data.dataset import Split
from bcosvit.data.scenes import Scenes
from bcosvit.data.sources import Source
from bcosvit.report.evaluate import evaluate_weights, write_report
from bcosvit.report.provenance import Provenance
from bcosvit.report.tables import evaluation_table
from tests.data.support import Halves
from tests.report.made import evaluation
from tests.report.support import Page, write_pictures, write_weights

DATA = "scenes?size=32&train=8&val=40"
SCENES = Scenes.classes
QUICK = {"options": {"grids": 2, "images": 3}, "methods": "inherent,rollout,random"}


@pytest.fixture
def weights(tmp_path):
    return write_weights(tmp_path / "model.safetensors", classes=SCENES)


def test_the_report_and_its_tables(weights, tmp_path):
    out = tmp_path / "out"
    found = evaluate_weights(weights, DATA, out=out, **QUICK)
    page = Page(out / "report.html")
    page.assert_self_contained()
    summary = json.loads((out / "summary.json").read_text())
    assert summary == json.loads(json.dumps(found.summary()))
    assert summary["accuracy"]["images"] == 40
    for link in (link for link in page.links if link.endswith(".csv")):
        with (out / link).open() as file:
            assert list(csv.DictReader(file))
    top1 = found.accuracy.top1
    assert f"{top1.mean:.3f}" in page.text
    assert f"{top1.low:.3f} to {top1.high:.3f}" in page.text
    for method, abc in found["perturbation"].abc.items():
        assert f"{abc.mean:.3f}".replace("-", "−") in page.text, method
    assert "scenes?size=32" in page.text
    assert '"grids": 2' in page.text


def test_half_precision_and_its_completeness(weights, tmp_path):
    options = {**QUICK, "methods": "inherent", "metrics": "perturbation"}
    full = evaluate_weights(weights, DATA, out=tmp_path / "a", **options)
    half = evaluate_weights(weights, DATA, out=tmp_path / "b", precision="bf16", **options)
    assert full.completeness.worst < 1e-5 < half.completeness.worst < 0.1
    with pytest.raises(ValueError, match="bf16"):
        evaluate_weights(weights, DATA, out=tmp_path / "c", precision="half")


def keys(found):
    return [image.key for image in found["perturbation"].images]


def test_the_numbers_do_not_depend_on_the_batch(weights, tmp_path):
    options = {**QUICK, "limit": 16, "seed": 3}
    one = evaluate_weights(weights, DATA, out=tmp_path / "a", batch_size=5, **options)
    other = evaluate_weights(weights, DATA, out=tmp_path / "b", batch_size=32, **options)
    assert keys(one) == keys(other)
    for method, area in one["perturbation"].abc.items():
        assert area.mean == pytest.approx(other["perturbation"].abc[method].mean, abs=1e-4)


def test_some_metrics_of_some_pictures(weights, tmp_path):
    options = {**QUICK, "metrics": "accuracy,perturbation"}
    found = evaluate_weights(weights, DATA, out=tmp_path, limit=15, **options)
    assert "localization" not in found.results
    assert len(found.accuracy.predictions) == 15
    # Drawn from all classes, not the first ones of the split.
    assert len({prediction.label for prediction in found.accuracy.predictions}) > 4
    again = evaluate_weights(weights, DATA, out=tmp_path, limit=15, **options)
    assert again.accuracy.predictions == found.accuracy.predictions
    assert not (tmp_path / "localization.csv").exists()


def test_every_metric_on_a_page(tmp_path):
    found = evaluation()
    found.write(tmp_path)
    write_report(
        tmp_path / "report.html",
        found,
        facts={"Model": "made up"},
        provenance=Provenance(command="a command", versions={}, config={}),
    )
    page = Page(tmp_path / "report.html")
    page.assert_self_contained()
    # Localization, two curves, their area, energy and pointing.
    assert page.tags.count("svg") == 6
    columns = [
        found["localization"].means,
        found["perturbation"].abc,
        {method: each["energy"] for method, each in found["masks"].means.items()},
        {method: each["pointing"] for method, each in found["masks"].means.items()},
    ]
    overview = page.source.split("</table>")[0]
    for means in columns:
        best = max(means.values(), key=lambda value: value.mean)
        assert f"<b>{best.mean:.3f}</b><small>{best.low:.3f} to {best.high:.3f}</small>" in overview
        for value in means.values():
            assert f">{value.mean:.3f}<" in overview.replace("−", "-")
    table = Console(width=200, file=io.StringIO(), force_terminal=False)
    table.print(evaluation_table(found))
    printed = table.file.getvalue()
    mean, interval = str(found["perturbation"].abc["ixg"]).split(" ", 1)
    assert f" {mean} " in printed and interval in printed
    assert str(found.accuracy.top1) in printed


def test_accuracy_alone_needs_no_method(weights, tmp_path):
    evaluate_weights(weights, DATA, out=tmp_path, metrics="accuracy")
    page = Page(tmp_path / "report.html")
    page.assert_self_contained()
    assert "Method" not in page.text


def test_a_model_that_is_never_right(tmp_path):
    """No grid and no image to perturb: the report says so instead of failing."""
    weights = write_weights(tmp_path / "m.safetensors", classes=(*SCENES, "nothing"))
    model = bcosvit.load(weights)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.blocks[0].attention.prior.logits.zero_()
    bcosvit.save(model, weights, metadata={"bcosvit.classes": json.dumps(["nothing", *SCENES])})
    found = evaluate_weights(weights, DATA, out=tmp_path, **QUICK)
    assert found.accuracy.top1.mean == 0
    page = Page(tmp_path / "report.html")
    page.assert_self_contained()
    assert "0 grids of 2 asked for" in page.text
    assert "–" in page.text


def test_masks_on_a_page(weights, tmp_path, monkeypatch):
    split = Split(Halves(16))
    source = Source(name="halves", classes=SCENES, train=split, val=split)
    monkeypatch.setattr("bcosvit.report.evaluate.open_source", lambda data, **_: source)
    found = evaluate_weights(weights, "halves", out=tmp_path, **QUICK)
    assert found["masks"].without == 5
    assert found["masks"].chance.mean == 0.5
    page = Page(tmp_path / "report.html")
    page.assert_self_contained()
    assert "Energy in the mask" in page.text
    assert (tmp_path / "masks.csv").exists()


def folder_of(tmp_path, *classes):
    for name in classes:
        write_pictures(tmp_path / "data" / name, 10)
    return tmp_path / "data"


def test_a_folder_with_few_classes_and_a_bad_picture(tmp_path):
    data = folder_of(tmp_path, "cat", "dog")
    bad = sorted((data / "cat").iterdir())[3]
    bad.write_bytes(b"not a picture")
    weights = write_weights(tmp_path / "m.safetensors")
    options = {**QUICK, "split": "all"}
    found = evaluate_weights(weights, data, out=tmp_path / "out", **options)
    assert "localization" not in found.results
    page = Page(tmp_path / "out" / "report.html")
    page.assert_self_contained()
    assert "there are 2" in page.text
    assert "the data have no masks" in page.text
    assert "cat/0003.png" in page.text
    assert len(found.accuracy.predictions) == 19


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"metrics": "accuracy,speed"}, "no metric 'speed'"),
        ({"metrics": "masks", "data": "folder"}, "the data have no masks"),
        ({"metrics": "localization", "data": "folder"}, "a grid shows 4"),
        ({"methods": "cheferlrp"}, "does not apply"),
        ({"split": "test"}, "'test'"),
        ({"limit": 0}, "limit is 0"),
        ({"options": {"grids": 0}}, "grids = 0"),
        ({"options": {"grid": 3}}, "did you mean 'grids'"),
        ({"data": "missing-folder"}, "is missing"),
    ],
)
def test_mistakes(tmp_path, options, says):
    classes = ("ladybird", "lemon", *SCENES[2:])
    weights = write_weights(tmp_path / "m.safetensors", classes=classes)
    data = options.pop("data", DATA)
    if data == "folder":
        data = folder_of(tmp_path, "lemon", "ladybird")
    with pytest.raises(ValueError, match=re.escape(says)):
        evaluate_weights(weights, data, out=tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_data_with_other_classes(tmp_path):
    named = write_weights(tmp_path / "a.safetensors")
    with pytest.raises(ValueError, match="'ladybird' is none that the model knows"):
        evaluate_weights(named, DATA, out=tmp_path / "out")
    unnamed = write_weights(tmp_path / "b.safetensors", classes=None)
    with pytest.raises(ValueError, match=r"8 classes .* knows 5"):
        evaluate_weights(unnamed, DATA, out=tmp_path / "out")


def test_classes_and_mistakes(weights, tmp_path):
    found = evaluate_weights(weights, DATA, out=tmp_path, metrics="accuracy", methods="inherent")
    page = (tmp_path / "report.html").read_text()
    section = page[page.index(">Classes and mistakes</h2>") :]
    predictions = found.accuracy.predictions
    wrong = [image for image in predictions if not image.correct]
    assert len(wrong) > 12
    # One row per class, with what it is taken for counted here.
    body = re.findall(r"<tbody>(.*?)</tbody>", section, re.DOTALL)
    cells = [
        [re.sub(r"<[^>]+>", "", cell).strip() for cell in re.findall(r"<t[hd].*?</t[hd]>", row)]
        for row in re.findall(r"<tr.*?</tr>", body[1].replace("\n", ""))
    ]
    for label, row in enumerate(cells):
        counts = [
            sum(image.label == label and image.predicted == other for image in predictions)
            for other in range(len(SCENES))
        ]
        assert row[0] == SCENES[label]
        assert [int(text or 0) for text in row[1:]] == counts
    right = sum(image.correct and image.label == 0 for image in predictions)
    assert f"{20 * right}" in body[0].split("</tr>")[0]
    # The least likely labels first, each with the picture and both explanations.
    wrong.sort(key=lambda image: (image.log_odds, image.key))
    keys = re.findall(r"labeled [^<]*%; ([^<]*)</span></h3>", section)
    assert keys == [image.key for image in wrong[:12]]
    panels = re.findall(r'<div class="panels three">(.*?)</div>', section, re.DOTALL)
    assert [panel.count("<img") for panel in panels] == [3] * 12
