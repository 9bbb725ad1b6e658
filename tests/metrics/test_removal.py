"""Ways to remove pixels, options of the metrics, and the metrics that follow from them."""

import copy

import pytest
import torch
import torch.nn.functional as F

from bcosvit import create_model
from bcosvit._torchvision import torchvision
from bcosvit.attribution import Attribution
from bcosvit.metrics import (
    METRICS,
    Additivity,
    Bootstrap,
    DeletionInsertion,
    ExplainedBatch,
    GridPointingGame,
    PixelPerturbation,
    Randomization,
    evaluate,
    localization_score,
)
from bcosvit.metrics.additivity import agreement
from bcosvit.metrics.perturbation import confidence_curves, removal_places
from bcosvit.metrics.randomization import rank_correlation, shuffled_weights
from bcosvit.metrics.removal import (
    REMOVALS,
    blurred,
    region_pixels,
    region_sums,
    replacement,
    smoothed,
)
from tests.conftest import randomize, small_config
from tests.metrics.fakes import Contributions, Patches, Uniform, color_model
from tests.metrics.test_accuracy import row
from tests.metrics.test_perturbation import score


def patches(count=5, size=8):
    data = Patches(size=size)
    samples = [data[i] for i in range(count)]
    images = torch.stack([image for image, _, _ in samples])
    return images, torch.tensor([label for _, label, _ in samples]), [key for *_, key in samples]


@pytest.mark.parametrize(
    "metric", [Additivity, DeletionInsertion, PixelPerturbation, Randomization]
)
def test_one_image_is_enough_and_none_is_refused(metric):
    assert metric(images=1).images == 1
    with pytest.raises(ValueError, match="images = 0 is not allowed: give an integer >= 1"):
        metric(images=0)


def test_blur_agrees_with_torchvision():
    images = torch.rand(2, 3, 32, 48)
    peer = torchvision.transforms.functional.gaussian_blur(images, [15, 15], [2.0, 2.0])
    torch.testing.assert_close(blurred(images), peer, atol=1e-6, rtol=0)


@pytest.mark.parametrize("excess", [1.001, 0.999])
def test_blurred_white_stays_white_where_convolutions_round(monkeypatch, excess):
    """As with TF32, by which a GPU convolves by default; encodings refuse more than 1."""
    convolve = F.conv2d
    monkeypatch.setattr(F, "conv2d", lambda x, kernel: convolve(x, kernel) * excess)
    white = torch.ones(1, 3, 32, 32)
    assert blurred(white).max() <= 1
    assert replacement(color_model(), white, "blur") is not None


def test_what_takes_the_place_of_removed_pixels():
    model, images = color_model(), torch.rand(2, 3, 8, 8)
    found = {removal: replacement(model, images, removal) for removal in REMOVALS}
    assert found["zero"] is None
    assert torch.equal(found["black"][1, :, 3, 4], torch.tensor([0.0, 0, 0, 1, 1, 1]))
    color = images[1].mean((1, 2))
    torch.testing.assert_close(found["mean"][1, :, 7, 0], torch.cat([color, 1 - color]))
    torch.testing.assert_close(found["blur"], model.encoding(blurred(images)))


def test_smoothing_averages_with_zeros_outside():
    maps = torch.zeros(1, 5, 5)
    maps[0, 0, 0] = 9
    expected = torch.zeros(5, 5)
    expected[:2, :2] = 1
    assert torch.equal(smoothed(maps, 3)[0], expected)
    assert smoothed(maps, 1) is maps


def test_regions_at_the_border_are_smaller():
    maps = torch.arange(15.0).view(1, 3, 5)
    assert region_sums(maps, 2).tolist() == [[[12, 20, 13], [21, 25, 14]]]
    numbers = torch.arange(6).view(2, 3)
    assert region_pixels(numbers, 2, 3, 5).tolist() == [[0, 0, 1, 1, 2]] * 2 + [[3, 3, 4, 4, 5]]


@pytest.mark.parametrize("removal", ["black", "mean", "blur"])
def test_removed_regions_show_what_takes_their_place(removal):
    model, (images, labels, _) = color_model(), patches(1)
    seen = []
    model.from_encoded = lambda x: seen.append(x.clone()) or torch.zeros(len(x), 5)
    place = torch.arange(4).view(1, 1, 4)
    options = {"removal": removal, "region": 4}
    confidence_curves(model, images, labels, place, [0, 1], batch_size=8, **options)
    start, (most, least) = seen
    instead = replacement(model, images, removal)
    assert torch.equal(most[:, :4, :4], instead[0, :, :4, :4])
    assert torch.equal(most[:, 4:], start[0, :, 4:])
    assert torch.equal(least[:, 4:, 4:], instead[0, :, 4:, 4:])
    assert torch.equal(least[:, :4], start[0, :, :4])


def test_curves_of_logits():
    model, (images, labels, keys) = color_model(), patches()
    maps = {"exact": Contributions()(model, images, labels).map}
    metric = PixelPerturbation(output="logit", share=1.0, points=3)
    curves = score(metric, model, images, labels, keys, maps, 16)["exact"]
    contributions = maps["exact"].double().flatten(1).sort(1, descending=True).values
    expected = [contributions.sum(1), contributions[:, 32:].sum(1), torch.zeros(len(images))]
    # A linear model without bias loses exactly the contributions of what is removed.
    torch.testing.assert_close(curves[:, 0], torch.stack(expected, 1).double(), atol=1e-5, rtol=0)
    found = metric.result([(row(key, 1),) for key in keys], {"exact": curves}, Bootstrap())
    assert found.charts()[0].y_axis == "relative logit"
    with pytest.raises(ValueError, match="min_confidence"):
        metric.result([(row("a", 1),)], {"exact": -curves[:1]}, Bootstrap())


def test_smoothing_changes_the_order_of_removal():
    model, (images, labels, keys) = color_model(), patches()
    # One strong pixel alone is weaker than a group of weaker ones, once maps are smoothed.
    maps = torch.zeros(len(images), 8, 8)
    maps[:, 0, 0], maps[:, 4:7, 4:7] = 2, 1
    seen = []
    model.from_encoded = lambda x: seen.append(x.clone()) or torch.ones(len(x), 5)
    options = {"share": 1 / 64, "points": 2}
    for smooth in (1, 3):
        score(
            PixelPerturbation(smooth=smooth, **options),
            model,
            images,
            labels,
            keys,
            {"m": maps},
            99,
        )
    (plain, smooth) = (seen[1][0], seen[3][0])
    assert plain[:, 0, 0].eq(0).all() and not plain[:, 5, 5].eq(0).all()
    assert smooth[:, 5, 5].eq(0).all() and not smooth[:, 0, 0].eq(0).all()


@pytest.mark.parametrize("metric", [PixelPerturbation, Additivity])
def test_images_of_little_confidence_are_left_out(metric):
    rows = [row("a", 3), row("b", -1), row("c", 0.1)]
    assert [image.key for (image,) in metric().select(rows)] == ["a", "c", "b"]
    assert [image.key for (image,) in metric(min_confidence=0.5).select(rows)] == ["a", "c"]


def test_grids_of_confident_images_and_smooth_maps():
    rows = [row(f"{k} {odds}", odds, label=k) for k in range(4) for odds in (2, -2)]
    assert len(GridPointingGame(grids=9).select(rows)) == 2
    assert len(GridPointingGame(grids=9, min_confidence=0.5).select(rows)) == 1
    maps, cell = torch.randn(4, 8, 8), torch.arange(4)
    batch = ExplainedBatch(
        model=color_model(),
        images=torch.zeros(4, 3, 8, 8),
        labels=cell,
        keys=["g"],
        maps={"m": maps},
        masks=None,
        batch_size=4,
        from_encoded=color_model().from_encoded,
    )
    found = GridPointingGame(smooth=3).score(batch)["m"][0]
    pooled = torch.nn.functional.avg_pool2d(maps, 3, 1, 1)
    torch.testing.assert_close(found, localization_score(pooled, cell))
    assert not torch.equal(found, GridPointingGame().score(batch)["m"][0])


def test_contributions_of_a_linear_model_are_additive():
    model, (images, labels, keys) = color_model(), patches()
    # Colors of unequal lightness, so that regions differ within patches and background.
    images = (images + 0.3 * torch.rand_like(images)).clamp(0, 1)
    maps = {
        "exact": Contributions()(model, images, labels).map,
        "negated": Contributions(-1.0)(model, images, labels).map,
        "double": Contributions(2.0)(model, images, labels).map,
        "uniform": Uniform()(model, images, labels).map,
    }
    found = score(Additivity(divisions=3), model, images, labels, keys, maps, 16)
    ones = torch.ones(len(images), dtype=torch.float64)
    for method, r2, slope in (("exact", 1, 1), ("negated", 1, -1), ("double", 1, 0.5)):
        torch.testing.assert_close(found[method][:, 0], r2 * ones, atol=1e-4, rtol=0)
        torch.testing.assert_close(found[method][:, 1], slope * ones, atol=1e-3, rtol=0)
    torch.testing.assert_close(found["exact"][:, 2], ones, atol=1e-4, rtol=0)
    assert (found["negated"][:, 2] < 0).all()
    items = [(row(key, 1),) for key in keys]
    result = Additivity().result(items, found, Bootstrap())
    assert result.summary()["r2"]["exact"]["mean"] == pytest.approx(1, abs=1e-4)
    assert len(list(result.rows())) == 4 * len(images)
    assert set(result.columns()["Additivity (R²)"]) == set(maps)


def test_nothing_is_explained_by_or_of_a_constant():
    varied, constant = torch.randn(1, 9), torch.ones(1, 9)
    assert agreement(constant, varied)[0, :2].tolist() == [0, 0]
    assert agreement(varied, constant)[0, 0] == 0
    assert agreement(varied, constant)[0, 2] == 0


def test_insertion_is_the_removal_of_the_least_important_read_backwards():
    model, (images, labels, keys) = color_model(), patches()
    maps = {"exact": Contributions()(model, images, labels).map}
    metric = DeletionInsertion(points=5, removal="black")
    curves = score(metric, model, images, labels, keys, maps, 16)
    items = [(row(key, 1),) for key in keys]
    found = metric.result(items, curves, Bootstrap())
    black, whole = model.encoding(torch.zeros_like(images)), model.encoding(images)
    shuffles = torch.stack([metric._shuffle(key, 64) for key in keys])
    places = removal_places(maps["exact"].flatten(1), shuffles).view(-1, 1, 8, 8)
    areas = []
    for i, label in enumerate(labels.tolist()):
        steps = [
            torch.where(places[i : i + 1] < count, whole[i : i + 1], black[i : i + 1])
            for count in (0, 16, 32, 48, 64)
        ]
        sure = model.from_encoded(torch.cat(steps)).double().sigmoid()[:, label].detach()
        areas.append(torch.trapezoid(sure, dx=0.25).item())
    expected = sum(areas) / len(areas)
    assert found.areas["exact"]["insertion"].mean == pytest.approx(expected, abs=1e-6)
    assert found.areas["exact"]["deletion"].mean < expected
    assert found.columns()["Insertion"]["exact"].mean == pytest.approx(expected, abs=1e-6)


def test_rank_correlation_agrees_with_scipy():
    stats = pytest.importorskip("scipy.stats")
    a, b = torch.randint(0, 5, (3, 40)).float(), torch.randn(3, 40)
    found = rank_correlation(a, b)
    for i in range(3):
        assert found[i].item() == pytest.approx(stats.spearmanr(a[i], b[i]).statistic)
    assert rank_correlation(torch.ones(1, 5), torch.randn(1, 5)).item() == 0


def test_a_method_that_ignores_the_model_does_not_pass_the_sanity_check():
    class Edges:
        def __call__(self, model, images, target=None):
            return Attribution(map=images.mean(1), target=target)

    model = randomize(create_model(small_config(logit_scale=1e-6))).eval()
    before = copy.deepcopy(model.state_dict())
    data = [(torch.rand(3, 16, 16), 0, str(n)) for n in range(4)]
    labels = [int(model(image[None])[0].argmax()) for image, _, _ in data]
    data = [(image, label, key) for (image, _, key), label in zip(data, labels, strict=True)]
    found = evaluate(model, data, [Edges(), "inherent"], metrics=[Randomization()])["randomization"]
    assert found.means[next(iter(found.means))].mean == pytest.approx(0)
    assert found.means["inherent"].mean > 0.3
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    shuffled = shuffled_weights(model, 0)
    for mine, theirs in zip(model.parameters(), shuffled.parameters(), strict=True):
        assert torch.equal(mine.flatten().sort().values, theirs.flatten().sort().values)


@pytest.mark.parametrize(
    ("metric", "options"),
    [
        ("perturbation", {"smooth": 2}),
        ("perturbation", {"min_confidence": 1.0}),
        ("perturbation", {"region": 0}),
        ("perturbation", {"removal": "gray"}),
        ("perturbation", {"output": "odds"}),
        ("localization", {"smooth": 0}),
        ("localization", {"min_confidence": -0.1}),
        ("additivity", {"removal": "gray"}),
        ("additivity", {"divisions": 1}),
        ("additivity", {"images": 0}),
        ("randomization", {"images": 0}),
    ],
)
def test_wrong_options_are_refused(metric, options):
    name = next(iter(options))
    with pytest.raises(ValueError, match=name):
        type(METRICS.get(metric))(**options)


def test_only_default_metrics_are_measured_unless_others_are_named():
    model, data = color_model(), Patches(each=2)
    found = evaluate(model, data, [Contributions()])
    assert set(found.results) == {"accuracy", "localization", "perturbation"}
    assert not METRICS.get("additivity").default


def test_defaults_are_those_of_the_published_tables():
    """A changed default would change numbers that nobody asked to change."""
    assert Additivity() == Additivity(images=250, divisions=7, removal="zero", min_confidence=0.0)
