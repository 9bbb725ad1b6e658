"""Pixel perturbation, against a case worked out by hand and a slow reference."""

import math

import pytest
import torch

from bcosvit import create_model, explain
from bcosvit.metrics import (
    Bootstrap,
    ExplainedBatch,
    NotDefinedError,
    PixelPerturbation,
    area_between,
)
from bcosvit.metrics.perturbation import confidence_curves, removal_places
from bcosvit.predictor import confidence
from tests.conftest import randomize, small_config
from tests.metrics.fakes import Contributions, Linear, Patches, Uniform, color_model
from tests.metrics.test_accuracy import row
from tests.reference import metrics as reference


def score(metric, model, images, labels, keys, maps, batch_size):
    batch = ExplainedBatch(
        model=model,
        images=images,
        labels=labels,
        keys=keys,
        maps=maps,
        masks=None,
        batch_size=batch_size,
        from_encoded=model.from_encoded,
    )
    return metric.score(batch)


def test_places_follow_the_attribution():
    maps = torch.tensor([[0.5, -1.0, 3.0, 0.0]])
    assert removal_places(maps, torch.arange(4)[None]).tolist() == [[1, 3, 0, 2]]


def test_equal_pixels_go_in_the_order_of_the_shuffle():
    maps = torch.tensor([[1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
    shuffles = torch.tensor([[3, 0, 2, 1], [2, 3, 0, 1]])
    assert removal_places(maps, shuffles).tolist() == [[0, 3, 2, 1], [2, 3, 0, 1]]


def test_rounding_errors_are_ties():
    maps = torch.tensor([[0.3, -0.01, 0.3, 0.0, -0.01, 7.0]]).repeat(50, 1)
    noisy = maps * (1 + 2e-7 * torch.randn(50, 6))
    shuffle = torch.tensor([[4, 2, 1, 5, 3, 0]]).expand(50, -1)
    assert (maps != noisy).any()
    assert removal_places(noisy, shuffle).tolist() == [[2, 5, 1, 3, 4, 0]] * 50


def test_five_digits_count_at_any_scale():
    values = torch.tensor([1.0, 1.0001, -3e-30, -3.0003e-30, 4e30, 4.0004e30])
    places = removal_places(values[None], torch.arange(6)[None])[0]
    assert places.tolist() == [3, 2, 4, 5, 1, 0]


def hand_made() -> tuple[Linear, torch.Tensor]:
    """Logits, in units of log 3: 2, 1, −1 and 0 by pixel, minus 1 for the bias; then 0, minus 1.

    A sigmoid of u·log 3 is 1/(1 + 3^−u): 3/4, 1/4, 1/10, 9/10 for u = 1, −1, −2, 2.
    """
    weight = torch.zeros(4, 6, dtype=torch.float64)
    weight[0, 0], weight[0, 1] = 2, -1
    model = Linear(weight, gain=math.log(3), bias=-math.log(3))
    images = torch.zeros(2, 3, 2, 2, dtype=torch.float64)
    images[0, 0] = torch.tensor([[1, 0.5], [0, 0]])
    images[0, 1, 1, 0] = 1
    return model, images


def test_curves_worked_out_by_hand():
    model, images = hand_made()
    metric = PixelPerturbation(share=0.5, points=3)
    labels = torch.tensor([0, 0])
    maps = {"exact": Contributions()(model, images, labels).map}
    curves = score(metric, model, images, labels, ["a", "b"], maps, 3)["exact"]
    most, least = [0.75, 0.25, 0.1], [0.75, 0.9, 0.9]
    expected = torch.tensor([[most, least], [[0.25] * 3] * 2], dtype=torch.float64)
    torch.testing.assert_close(curves, expected)
    # Trapezia of the gaps 0, 0.65, 0.8 at steps of 1/4, by image; then means, then the division:
    # images of unequal confidence weigh by it, which a mean of ratios (0.175) would not give.
    assert area_between(curves, 0.5).tolist() == pytest.approx([0.2625, 0])
    images_ = [row("a", math.log(3)), row("b", -math.log(3))]
    found = metric.result([(image,) for image in images_], {"exact": curves}, Bootstrap())
    assert found.abc["exact"].mean == pytest.approx(0.2625 / 2 / 0.5)
    assert [p.mean for p in found.curves["exact"]["most"]] == pytest.approx([1, 0.5, 0.35])
    assert [p.mean for p in found.curves["exact"]["least"]] == pytest.approx([1, 1.15, 1.15])
    assert found.abc["exact"].mean == pytest.approx(
        reference.area_between_curves(curves.tolist(), 0.5)
    )
    rows = list(found.rows())
    assert [r["abc"] for r in rows] == pytest.approx([0.35, 0])
    assert rows[0]["most 0.25"] == pytest.approx(0.25)


@pytest.mark.parametrize("family", ["bcos", "conventional"])
def test_curves_agree_with_the_reference(family):
    # Wild weights give logits of a thousand: scaled down, lest every confidence be 1.
    scale = {"bcos": 1e-6, "conventional": 0.1}[family]
    model = create_model(small_config(family=family, logit_scale=scale))
    model = randomize(model).double().eval()
    images, labels = torch.rand(3, 3, 16, 16, dtype=torch.float64), torch.tensor([4, 0, 2])
    # All values differ, so that no tie needs breaking.
    each = [torch.randperm(256).view(16, 16).double() - 100.5 for _ in range(6)]
    maps = {"a": torch.stack(each[:3]), "b": torch.stack(each[3:])}
    metric = PixelPerturbation()
    curves = score(metric, model, images, labels, ["x", "y", "z"], maps, 20)
    encoded = model.encoding(images)
    for name, each in maps.items():
        assert curves[name].shape == (3, 2, 9)
        for i in range(3):

            def sure(image, label=labels[i]):
                with torch.no_grad():
                    logits = model.from_encoded(torch.from_numpy(image)[None])
                return confidence(model, logits)[0, label]

            slow = reference.perturbation(encoded[i].numpy(), each[i].numpy(), sure, 0.25, 9)
            torch.testing.assert_close(curves[name][i], torch.tensor(slow, dtype=torch.float64))
        assert (curves[name].std(2) > 1e-4).all()


def abc(explainer, *, seed=0, size=12) -> float:
    data, model = Patches(size=size, each=8), color_model()
    samples = [data[i] for i in range(len(data))]
    images = torch.stack([image for image, _, _ in samples])
    labels = torch.tensor([label for _, label, _ in samples])
    metric = PixelPerturbation(seed=seed)
    maps = {"m": explainer(model, images, labels).map}
    curves = score(metric, model, images, labels, [key for *_, key in samples], maps, 64)["m"]
    return reference.area_between_curves(curves.tolist(), metric.share)


def test_oracle_negation_and_uniform():
    oracle, negated = abc(Contributions()), abc(Contributions(-1))
    assert oracle > 0.05
    assert negated == pytest.approx(-oracle, abs=1e-6)
    uniform = [abc(Uniform(), seed=seed) for seed in range(100)]
    assert abs(sum(uniform) / 100) < 0.01 * oracle
    assert max(map(abs, uniform)) < 0.1 * oracle


def test_ties_follow_from_seed_and_key_alone():
    model, data = color_model(), Patches()
    images = torch.stack([data[i][0] for i in range(6)])
    labels, keys = torch.arange(6) % 5, [f"key{i}" for i in range(6)]
    maps = {"m": Uniform()(model, images, labels).map}

    def curves(seed, picked):
        some = {"m": maps["m"][picked]}
        names = [keys[i] for i in picked]
        metric = PixelPerturbation(seed=seed)
        return score(metric, model, images[picked], labels[picked], names, some, 7)["m"]

    whole = curves(0, list(range(6)))
    torch.testing.assert_close(curves(0, [4, 1]), whole[[4, 1]])
    assert not torch.equal(curves(1, list(range(6))), whole)
    # The same picture under two names is shuffled in two ways.
    twice = {"m": maps["m"][[0, 0]]}
    two = score(PixelPerturbation(), model, images[[0, 0]], labels[[0, 0]], ["a", "b"], twice, 9)
    assert not torch.equal(two["m"][0], two["m"][1])


def test_all_versions_in_full_batches_without_autograd():
    model, data = color_model(), Patches()
    images, labels = torch.stack([data[i][0] for i in range(3)]), torch.arange(3)
    maps = {str(seed): torch.randn(3, 8, 8) for seed in range(2)}
    curves = score(PixelPerturbation(), model, images, labels, ["a", "b", "c"], maps, 10)
    # 3 starts, and 2 methods × 3 images × 2 orders × 8 points.
    assert model.forwards == [3, *[10] * 9, 6]
    assert not curves["0"].requires_grad


def test_pixels_are_zeroed_in_the_encoding():
    model, data = color_model(), Patches()
    seen = []
    model.from_encoded = lambda x: seen.append(x.clone()) or torch.zeros(len(x), 5)
    images, labels = torch.stack([data[0][0]]), torch.tensor([0])
    place = torch.arange(64).view(1, 1, 64)
    confidence_curves(model, images, labels, place, [0, 16], batch_size=8)
    start, (most, least) = seen
    zero = torch.zeros(6)
    assert torch.equal(start, model.encoding(images))
    for position in range(64):
        y, x = divmod(position, 8)
        whole = start[0, :, y, x]
        assert torch.equal(most[:, y, x], zero if position < 16 else whole)
        assert torch.equal(least[:, y, x], zero if position >= 48 else whole)


def test_shares_and_selection():
    metric = PixelPerturbation(images=2)
    assert metric.shares == tuple(0.03125 * i for i in range(9))
    rows = [row("a", 1), row("b", 5, place=1), row("c", 3), row("d", 2)]
    assert [r.key for (r,) in metric.select(rows)] == ["c", "d"]


@pytest.mark.parametrize("options", [{"images": 0}, {"points": 1}, {"share": 0}, {"share": 25}])
def test_bad_parameters_are_refused(options):
    with pytest.raises(ValueError, match=f"{next(iter(options))} = .* is not allowed"):
        PixelPerturbation(**options)


def test_inherent_beats_its_negation_on_a_real_model():
    model = randomize(create_model(small_config(logit_scale=1e-6))).double().eval()
    images = torch.rand(8, 3, 16, 16, dtype=torch.float64)
    found = explain(model, images)
    maps = {"inherent": found.map, "negated": -found.map}
    keys = [str(i) for i in range(8)]
    curves = score(PixelPerturbation(), model, images, found.target, keys, maps, 32)
    area = {name: float(area_between(each, 0.25).mean()) for name, each in curves.items()}
    assert area["inherent"] > 0
    assert area["negated"] == pytest.approx(-area["inherent"])


def test_places_of_any_number_of_maps():
    maps, shuffles = torch.randn(3, 2, 5).round(), torch.rand(3, 2, 5).argsort(-1)
    found = removal_places(maps, shuffles)
    for i in range(3):
        assert torch.equal(found[i], removal_places(maps[i], shuffles[i]))
        assert torch.equal(found[i, 1], removal_places(maps[i, 1], shuffles[i, 1]))


def test_what_is_followed_is_said():
    image = row("a", 1.0)
    curves = {"exact": torch.ones(1, 2, 3, dtype=torch.float64)}
    for output, says in (("probability", "Confidence in the true"), ("logit", "The logit of the")):
        metric = PixelPerturbation(points=3, output=output)
        about = metric.result([(image,)], curves, Bootstrap()).about()
        assert [says in about, "Confidence in" in about, "The logit of" in about].count(True) == 2


def test_nothing_is_relative_to_a_start_that_is_not_positive():
    curves = {"map": torch.full((2, 2, 9), -1.0, dtype=torch.float64)}
    metric = PixelPerturbation(output="logit")
    with pytest.raises(NotDefinedError, match="mean logit of the images is -1"):
        metric.result([], curves, Bootstrap())
