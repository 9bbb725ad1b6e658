"""The score of pictures of unknown kinds: fitting, storing, and where it is shown."""

import json
import math

import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

import bcosvit
from bcosvit.cli import app
from bcosvit.models.unknown import Unlike, auroc, auroc_interval, fit_known, fit_unlike
from bcosvit.models.weights import UNLIKE_KEY, read_metadata
from bcosvit.web.service import ExplanationService
from bcosvit.web.session import INDEPENDENT, PageEvents


def drawn(seed, count, shift):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 6, generator=generator) + shift * torch.tensor([1.0, -1, 1, 0, 0, 0])


def test_a_fitted_score_is_a_probability_that_holds_for_other_pictures():
    kinds = ["fog", "sand"] * 100
    unlike = fit_unlike(drawn(0, 300, 0.0), drawn(1, 200, 1.5), kinds)
    known, unknown = unlike(drawn(2, 2000, 0.0)), unlike(drawn(3, 2000, 1.5))
    value, low, high = auroc_interval(known, unknown, resamples=100)
    # Two normal distributions at a distance of 1.5·√3: Φ(1.5·√3/√2).
    best = 0.5 * (1 + math.erf(1.5 * math.sqrt(3) / 2))
    assert best - 0.02 < value < best + 0.01 and low < value < high
    assert (known > unlike.threshold).double().mean() == pytest.approx(0.05, abs=0.03)
    both = torch.cat([known, unknown])
    near = (both > 0.6) & (both < 0.8)
    share = (near[2000:].sum() / near.sum()).item()
    assert share == pytest.approx(both[near].mean().item(), abs=0.1)


def test_known_pictures_alone_give_a_share():
    logits = drawn(0, 1000, 0.0)
    unlike = fit_known(logits)
    scores = unlike(logits)
    assert scores.mean() == pytest.approx(0.5, abs=0.01)
    assert (scores > unlike.threshold).double().mean() == pytest.approx(0.05, abs=0.01)
    assert unlike(torch.full((6,), -99.0)) == 1 and unlike(torch.full((6,), 99.0)) == 0


def test_auroc_counts_ties_half():
    assert auroc(torch.tensor([0.0, 1.0]), torch.tensor([1.0, 2.0])) == 0.875


def test_a_score_survives_storing():
    for unlike in (fit_known(drawn(0, 50, 0)), fit_unlike(drawn(0, 50, 0), drawn(1, 50, 1))):
        again = Unlike.loads(unlike.dumps(), 6)
        logits = drawn(5, 20, 0.5)
        torch.testing.assert_close(again(logits), unlike(logits), atol=1e-3, rtol=0)
        assert again.about == unlike.about


@pytest.mark.parametrize(
    "text",
    ["[]", "{", '{"threshold": 1}', '{"threshold": 1, "weight": [1]}', '{"threshold": "a"}',
     '{"threshold": NaN, "quantiles": [0, 1]}'],
)  # fmt: skip
def test_a_damaged_score_is_refused(text):
    with pytest.raises(ValueError, match="score of unknown kinds"):
        Unlike.loads(text, 6)


def small():
    stem = bcosvit.StemConfig(widths=(8,))
    config = bcosvit.ModelConfig(width=12, depth=1, image_size=16, num_classes=3, backbone=stem)
    return bcosvit.create_model(config).eval()


def test_calibrate_stores_the_score_and_explain_shows_it(tmp_path):
    bcosvit.save(small(), tmp_path / "plain.safetensors", dtype=torch.float16)
    for kind, low in {"known/a": 120, "unknown/b": 0, "unknown/c": 20}.items():
        (tmp_path / kind).mkdir(parents=True)
        for number in range(6):
            color = (low + number, low + 2 * number, low + 100 - number)
            Image.new("RGB", (20, 20), color).save(tmp_path / kind / f"{number}.png")
    folders = ["--known", str(tmp_path / "known"), "--unknown", str(tmp_path / "unknown")]
    out = tmp_path / "out.safetensors"
    command = ["calibrate", "--weights", str(tmp_path / "plain.safetensors"), *folders]
    found = CliRunner().invoke(app, [*command, "--out", str(out), "--device", "cpu"])
    assert found.exit_code == 0 and "AUROC" in found.stdout
    assert json.loads(read_metadata(out)[UNLIKE_KEY])["about"]["unknown"] == 12
    predictor = bcosvit.Predictor.load(out, "cpu")
    image = torch.rand(3, 16, 16)
    shown = predictor.explain(image)
    assert shown.unlike is not None and 0 <= shown.unlike <= 1
    # Weights without a score load as before.
    plain = bcosvit.Predictor.load(tmp_path / "plain.safetensors", "cpu").explain(image)
    assert plain.unlike is None and not plain.unlike_note
    # A score that calls everything unlike says so in the terminal, the report and the JSON file.
    model = bcosvit.load(out)
    model.unlike = Unlike(threshold=0.5, weight=(0.0, 0.0, 0.0), bias=9.0)
    bcosvit.save(model, tmp_path / "all.safetensors")
    target = ["--out", str(tmp_path / "r.html"), "--json", str(tmp_path / "r.json")]
    picture = str(tmp_path / "known" / "a" / "0.png")
    weights = ["--weights", str(tmp_path / "all.safetensors"), "--device", "cpu"]
    found = CliRunner().invoke(app, ["explain", picture, *weights, *target])
    assert found.exit_code == 0 and "Unlike anything" in found.stdout
    assert "Unlike anything" in (tmp_path / "r.html").read_text()
    assert json.loads((tmp_path / "r.json").read_text())["images"][0]["is_unlike"]
    # And in Python and on the page.
    both = bcosvit.explain(bcosvit.load(tmp_path / "all.safetensors"), [picture, picture])
    assert both.is_unlike.tolist() == [True, True] and both.unlike.shape == (2,)
    assert "2 of 2: Unlike anything" in repr(both) and "Unlike anything" in both._repr_html_()
    assert bcosvit.explain(bcosvit.load(tmp_path / "plain.safetensors"), picture).unlike is None
    page = PageEvents(
        service=ExplanationService(predictor=bcosvit.Predictor.load(tmp_path / "all.safetensors"))
    )
    title, *_ = page.show([picture], {"current": 0, "labels": {}}, 0.5, INDEPENDENT, None)
    assert "Unlike anything" in title
