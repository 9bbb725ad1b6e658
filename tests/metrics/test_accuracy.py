"""Predictions, their accuracy, and the order that the other metrics choose images by."""

import dataclasses
import math

import pytest
import torch

from bcosvit._torchvision import torchvision
from bcosvit.metrics import Bootstrap, Prediction, most_confident
from bcosvit.metrics.accuracy import Accuracy, places, predict
from bcosvit.metrics.loader import Reader
from bcosvit.predictor import confidence, log_odds
from tests.metrics.fakes import Patches, color_model
from tests.reference import metrics as reference


def row(key: str, odds: float, *, label: int = 0, place: int = 0, index: int = 0) -> Prediction:
    return Prediction(
        index=index,
        key=key,
        label=label,
        predicted=label,
        place=place,
        confidence=1 / (1 + math.exp(-odds)),
        log_odds=odds,
    )


@pytest.mark.parametrize("k", [1, 5])
def test_accuracy_agrees_with_torchmetrics(k):
    # It imports torchvision, which has one door.
    assert torchvision
    from torchmetrics.functional import accuracy as peer

    logits, labels = torch.randn(200, 12), torch.randint(12, (200,))
    ours = (places(logits, labels) < k).float().mean()
    theirs = peer(logits, labels, task="multiclass", num_classes=12, top_k=k, average="micro")
    torch.testing.assert_close(ours, theirs)


def test_of_equal_logits_the_lower_class_comes_first():
    logits = torch.tensor([[1.0, 2.0, 2.0], [0.0, 0.0, 0.0]])
    assert places(logits, torch.tensor([1, 1])).tolist() == [0, 1]
    assert places(logits, torch.tensor([2, 0])).tolist() == [1, 0]


@pytest.mark.parametrize("family", ["bcos", "conventional"])
def test_confidence_is_what_the_family_was_trained_for(family):
    model = color_model(family=family)
    logits, labels = torch.randn(6, 5, dtype=torch.float64), torch.randint(5, (6,))
    sure = confidence(model, logits)
    slow = reference.sigmoid if family == "bcos" else reference.softmax
    for i in range(6):
        torch.testing.assert_close(sure[i], torch.from_numpy(slow(logits[i].numpy())))
    own = sure.gather(1, labels[:, None])[:, 0]
    torch.testing.assert_close(log_odds(model, logits, labels).sigmoid(), own)


def test_log_odds_tell_apart_what_rounds_to_one():
    model = color_model(family="conventional")
    logits = torch.tensor([[90.0, 0, 0, 0, 0], [80.0, 0, 0, 0, 0]])
    assert confidence(model, logits)[:, 0].tolist() == [1, 1]
    first, second = log_odds(model, logits, torch.tensor([0, 0])).tolist()
    assert first - second == pytest.approx(10)


def test_a_row_an_image():
    data = Patches(wrong=2)
    rows = predict(color_model(), next(Reader(data=data).read([0, 7, 1], 3)))
    assert [r.index for r in rows] == [0, 7, 1]
    assert [r.key for r in rows] == ["image000", "image007", "image001"]
    assert [r.label for r in rows] == [1, 2, 2]
    assert [r.predicted for r in rows] == [0, 2, 1]
    assert [r.correct for r in rows] == [False, True, False]
    assert all(r.confidence == pytest.approx(1 / (1 + math.exp(-r.log_odds))) for r in rows)


def test_accuracy_counts_every_key_once():
    rows = [row("a", 1), row("b", 1, place=4), row("c", 1, place=5), row("a", 1)]
    metric = Accuracy()
    items = metric.select(rows)
    found = metric.result(items, {}, Bootstrap(), len(rows) - len(items))
    assert found.repeated == 1
    assert found.top1.mean == pytest.approx(1 / 3)
    assert found.top5.mean == pytest.approx(2 / 3)
    assert found.top1.count == 3
    with pytest.raises(ValueError, match="both called 'a'"):
        metric.select([*rows, row("a", 1, label=2)])


def test_the_surest_first_and_only_what_is_right():
    rows = [row("a", 1.0), row("b", 3.0), row("c", 9.0, place=1), row("d", 2.0)]
    assert [r.key for r in most_confident(rows)] == ["b", "d", "a"]


def test_rounding_does_not_decide_the_order():
    rows = [row("b", 2.0), row("a", 2.0), row("c", 3.0), row("d", 1.0)]
    expected = ["c", "a", "b", "d"]
    assert [r.key for r in most_confident(rows)] == expected
    for seed in range(5):
        noise = torch.rand(4, generator=torch.Generator().manual_seed(seed)) * 5e-6
        noisy = [
            dataclasses.replace(r, log_odds=r.log_odds + float(n))
            for r, n in zip(rows, noise, strict=True)
        ]
        assert [r.key for r in most_confident(noisy[::-1])] == expected


def test_what_cannot_be_right_is_refused():
    data = Patches(classes=6)
    batch = next(Reader(data=data).read(range(6), 6))
    with pytest.raises(ValueError, match=r"'image005' has label 5, but the model knows .* 0 to 4"):
        predict(color_model(), batch)
    model = color_model(classes=6)
    model.weight.data[2] = math.nan
    with pytest.raises(ValueError, match="'image000' contain NaN"):
        predict(model, batch)
