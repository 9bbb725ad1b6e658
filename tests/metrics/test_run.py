"""``evaluate`` as a whole: every metric of several methods, whatever the batches."""

import csv
import json
import weakref
from dataclasses import dataclass

import pytest
import torch

from bcosvit import create_model
from bcosvit.attribution import Attribution, explain
from bcosvit.metrics import (
    METRICS,
    Accuracy,
    Bootstrap,
    GridPointingGame,
    KeptScores,
    MaskOverlap,
    Metric,
    MetricResult,
    PixelPerturbation,
    evaluate,
    register_metric,
)
from bcosvit.metrics.evaluation import write_table
from bcosvit.metrics.grid_pointing import grid_images, localization_score
from tests.conftest import small_config
from tests.metrics.fakes import Contributions, Patches, Uniform, color_model

EXACT, NEGATED, UNIFORM = map(repr, (Contributions(), Contributions(-1), Uniform()))
QUICK = {"bootstrap": Bootstrap(samples=50)}
CLOSE = {"rtol": 1e-4, "atol": 1e-6}
METHODS = ("inherent", "ixg", "rollout", "random")


class Noisy:
    """Noisy versions of what each class's head row was taken from; one twice, one wrong."""

    def __init__(self, prototypes, each=5) -> None:
        count = each * len(prototypes)
        noise = torch.rand(count, *prototypes.shape[1:]) - 0.5
        self.images = prototypes.repeat(each, 1, 1, 1) + 0.05 * noise
        self.labels = torch.arange(count) % len(prototypes)
        self.images[17] = self.images[2]
        self.labels[3] = 0
        self.masks = torch.rand(count, *prototypes.shape[2:]) < 0.3

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index):
        return self.images[index], int(self.labels[index]), f"{index:03d}.png"

    def mask(self, index):
        return None if index % 6 == 0 else self.masks[index]


@pytest.fixture(scope="module")
def real():
    """A B-cos model in float32 that is right without having been trained."""
    torch.manual_seed(0)
    model = create_model(small_config(logit_scale=2e-7)).eval()
    blocks = 0.1 + 0.8 * torch.rand(5, 3, 4, 4).round()
    prototypes = blocks.repeat_interleave(4, 2).repeat_interleave(4, 3)
    with torch.no_grad():
        # A fresh prior is flat, and so is rollout.
        for block in model.blocks:
            block.attention.prior.logits.normal_()
        tokens = model.blocks(model.tokenizer(model.encoding(prototypes)))
        model.head.weight.copy_(tokens.mean(1))
    return model, Noisy(prototypes)


def test_all_metrics_on_a_model_whose_truth_is_known():
    data, model = Patches(each=6, size=16, wrong=3), color_model(gain=0.02)
    methods = (Contributions(), Contributions(-1), Uniform())
    found = evaluate(model, data, methods, masks=data.mask)
    assert found.accuracy.top1.mean == pytest.approx(0.9)
    assert found.accuracy.top5.mean == 1

    assert 5 <= len(found["localization"].grids) <= 6
    means = {method: mean.mean for method, mean in found["localization"].means.items()}
    assert means[EXACT] > 0.999
    assert means[UNIFORM] == 0.25
    assert means[NEGATED] < 0.3

    assert len(found["perturbation"].images) == 27
    assert found["perturbation"].abc[EXACT].low > 0.05
    assert found["perturbation"].abc[NEGATED].high < -0.05
    assert found["perturbation"].abc[UNIFORM].mean == pytest.approx(0, abs=0.01)

    assert found["masks"].means[EXACT]["energy"].mean == pytest.approx(0.9)
    assert found["masks"].means[EXACT]["pointing"].mean == pytest.approx(0.9)
    # The patch speaks against the three wrong labels.
    assert found["masks"].means[NEGATED]["pointing"].mean == pytest.approx(0.1)
    for score in ("energy", "pointing"):
        assert found["masks"].means[UNIFORM][score].mean == pytest.approx(
            found["masks"].chance.mean
        )


def same(a, b) -> None:
    assert [(p.index, p.place) for p in a.accuracy.predictions] == [
        (p.index, p.place) for p in b.accuracy.predictions
    ]
    keys = lambda images: [image.key for image in images]  # noqa: E731
    assert [keys(g) for g in a["localization"].grids] == [keys(g) for g in b["localization"].grids]
    assert keys(a["perturbation"].images) == keys(b["perturbation"].images)
    assert keys(a["masks"].images) == keys(b["masks"].images)
    torch.testing.assert_close(a["localization"].scores, b["localization"].scores, **CLOSE)
    torch.testing.assert_close(
        a["perturbation"].confidences, b["perturbation"].confidences, **CLOSE
    )
    torch.testing.assert_close(a["masks"].scores, b["masks"].scores, **CLOSE)
    for method, area in a["perturbation"].abc.items():
        for end in ("mean", "low", "high"):
            other = getattr(b["perturbation"].abc[method], end)
            assert getattr(area, end) == pytest.approx(other, rel=1e-3, abs=1e-6)


def measure(model, data, **options):
    chosen = {
        "localization": GridPointingGame(),
        "perturbation": PixelPerturbation(images=9),
        "masks": MaskOverlap(),
    }
    for name in chosen:
        chosen[name] = options.pop(name, chosen[name])
    options = {"masks": data.mask, **QUICK, **options}
    return evaluate(model, data, METHODS, metrics=list(chosen.values()), **options)


def test_batches_change_nothing(real):
    model, data = real
    whole = measure(model, data, batch_size=64)
    assert whole.accuracy.top1.mean > 0.8
    assert len(whole["localization"].grids) >= 4
    assert len(whole["perturbation"].images) == 9
    assert whole["perturbation"].abc["inherent"].mean > 0
    for batch_size in (1, 7):
        same(measure(model, data, batch_size=batch_size), whole)
    again = measure(model, data, batch_size=64)
    assert again.summary() == whole.summary()


class Stopped(Exception):
    """Instead of a signal."""


@dataclass
class StopsAfter:
    """Data of which so many can be read."""

    data: Noisy
    left: int

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index):
        if not self.left:
            raise Stopped
        self.left -= 1
        return self.data[index]

    def mask(self, index):
        return self.data.mask(index)


@pytest.mark.parametrize("torn", [False, True])
def test_an_evaluation_that_was_stopped_goes_on_where_it_was(real, tmp_path, torn):
    model, data = real
    whole = measure(model, data, batch_size=4)
    keep = KeptScores(tmp_path / "new" / "scores.jsonl")
    found, stops = None, 0
    while found is None:
        # One image to see whether methods apply, one batch or grid, and a part of the next.
        some = StopsAfter(data, 1 + 4 + 3)
        try:
            found = measure(model, some, batch_size=4, known=whole.accuracy, keep=keep)
        except Stopped:
            stops += 1
            if torn and stops == 2:
                text = keep.path.read_text()
                keep.path.write_text(text[: -len(text.splitlines()[-1]) // 2])
    batches = len(whole["localization"].grids) + -(-len(data) // 4)
    # Every call adds a batch; the last one adds two, since the last batch has a single image.
    assert len(data) % 4 == 1
    assert stops == batches - 2 + torn
    assert found.summary() == whole.summary()
    assert found.completeness == whole.completeness
    keep.remove()
    assert list(keep.path.parent.iterdir()) == []


def test_scores_are_kept_by_metric(real, tmp_path):
    model, data = real
    keep = KeptScores(tmp_path / "scores.jsonl")
    options = {"metrics": [MaskOverlap()], "masks": data.mask, "keep": keep, **QUICK}
    first = evaluate(model, data, METHODS, **options)
    kept = keep.path.read_text()
    assert evaluate(model, data, METHODS, **options).summary() == first.summary()
    assert keep.path.read_text() == kept
    others = {**options, "metrics": [PixelPerturbation()], "known": first.accuracy}
    with pytest.raises(Stopped):
        evaluate(model, StopsAfter(data, 1), METHODS, **others)


def test_curves_belong_to_their_images(real):
    model, data = real
    found = measure(model, data)["perturbation"]
    starts = [image.confidence for image in found.images]
    assert starts == pytest.approx(sorted(starts, reverse=True))
    assert [image.index for image in found.images] != sorted(image.index for image in found.images)
    assert found.confidences["inherent"][:, 0, 0].tolist() == pytest.approx(starts)


def test_workers_change_nothing(real):
    model, data = real
    assert measure(model, data, num_workers=1).summary() == measure(model, data).summary()


def test_several_methods_equal_one_by_one(real):
    model, data = real
    together = measure(model, data)
    for method in METHODS:
        alone = evaluate(
            model,
            data,
            [method],
            metrics=["localization", PixelPerturbation(images=9), "masks"],
            masks=data.mask,
            **QUICK,
        )
        assert alone["localization"].means[method] == together["localization"].means[method]
        assert alone["masks"].means[method] == together["masks"].means[method]
        torch.testing.assert_close(
            alone["perturbation"].confidences[method],
            together["perturbation"].confidences[method],
            **CLOSE,
        )


def test_seeds_matter(real):
    model, data = real
    plain = measure(model, data)
    grids = measure(model, data, localization=GridPointingGame(seed=5))
    assert grids["localization"].grids != plain["localization"].grids
    ties = measure(model, data, perturbation=PixelPerturbation(images=9, seed=5))
    assert ties["perturbation"].images == plain["perturbation"].images
    # Only rollout, drawn large from few tokens, has pixels that are equal.
    one, other = ties["perturbation"].confidences, plain["perturbation"].confidences
    assert torch.equal(one["inherent"], other["inherent"])
    assert not torch.equal(one["rollout"], other["rollout"])


def test_each_image_is_explained_once_for_both_metrics_and_read_no_more_than_needed():
    data, model = Patches(each=3), color_model()
    explained = []

    def counting(model, images, target=None):
        explained.append(len(images))
        return Uniform()(model, images, target)

    evaluate(
        model,
        data,
        [counting],
        metrics=["perturbation", "masks"],
        masks=data.mask,
        batch_size=4,
    )
    assert sum(explained) == 1 + 15
    assert data.reads == [0, *range(15), *range(15)]


def test_the_classes_of_a_grid_share_its_picture(real, monkeypatch):
    model, data = real
    tokenizer, passes = type(model.tokenizer), []
    forward = tokenizer.forward

    def counted(self, encoded):
        passes.append(len(encoded))
        return forward(self, encoded)

    game, known = GridPointingGame(grids=4), evaluate(model, data, metrics=["accuracy"]).accuracy
    methods = ("rollout", "gradsam", "libragrad")
    monkeypatch.setattr(tokenizer, "forward", counted)
    found = evaluate(model, data, methods, metrics=[game], known=known, **QUICK)["localization"]
    # Before the grids, the methods are tried on one image.
    assert len(found.grids) == 4 and sum(passes) == 1 + 4
    for grid, scores in zip(found.grids, found.scores["libragrad"], strict=True):
        cells = torch.stack([data[image.index][0] for image in grid])
        picture = grid_images(cells.unsqueeze(0))
        for cell, image in enumerate(grid):
            alone = explain(model, picture, image.label, "libragrad").map
            expected = localization_score(alone, torch.tensor([cell])).item()
            assert float(scores[cell]) == pytest.approx(expected, rel=1e-4)


def test_sets_of_options_share_explanations_and_passes():
    model, data, explained, passes = color_model(), Patches(), [], []

    class Counted(Contributions):
        def __call__(self, model, images, target=None):
            explained.append(len(images))
            return super().__call__(model, images, target)

    class Passes(type(model)):
        def from_encoded(self, encoded):
            passes.append(len(encoded))
            return super().from_encoded(encoded)

    model.__class__ = Passes

    def measure(*metrics):
        explained.clear()
        passes.clear()
        found = evaluate(model, data, [Counted()], metrics=metrics, **QUICK)
        return [found[name].samples() for name in found.results if name != "accuracy"]

    for metrics in (
        (PixelPerturbation(images=5), PixelPerturbation(images=5, output="logit")),
        (GridPointingGame(grids=2), GridPointingGame(grids=2, smooth=3)),
    ):
        alone, costs = [], []
        for metric in metrics:
            alone += measure(metric)
            costs.append((sum(explained), sum(passes)))
        together = measure(*metrics)
        # The second set of options asks for nothing but what the first one has left.
        assert (sum(explained), sum(passes)) == costs[0] == costs[1]
        for one, other in zip(together, alone, strict=True):
            for method, (values, divisors) in one.items():
                assert torch.equal(values, other[method][0])
                assert divisors is None or torch.equal(divisors, other[method][1])


def test_what_is_known_is_not_predicted_again():
    data, model = Patches(each=3), color_model()
    first = evaluate(model, data, [Uniform()], masks=data.mask, **QUICK)
    data.reads.clear()
    again = evaluate(model, data, [Uniform()], masks=data.mask, known=first.accuracy, **QUICK)
    same(first, again)
    grids = [image.index for grid in first["localization"].grids for image in grid]
    assert data.reads == [0, *grids, *range(15)]


def test_images_that_no_metric_asks_for_are_not_explained():
    data, model = Patches(each=3), color_model()
    explained = []

    def counting(model, images, target=None):
        explained.append(len(images))
        return Uniform()(model, images, target)

    few = PixelPerturbation(images=2)
    some = lambda index: data.mask(index) if index >= 12 else None  # noqa: E731
    found = evaluate(model, data, [counting], metrics=[few, "masks"], masks=some)
    assert sum(explained) == 1 + 2 + 3
    assert found["masks"].without == 12
    assert len(found["masks"].images) == 3


@dataclass(frozen=True, kw_only=True)
class Pairs(PixelPerturbation):
    """Looks at the first image of each pair."""

    tiles = 2

    def select(self, predictions):
        return [*zip(predictions[::2], predictions[1::2], strict=True)]

    def result(self, items, scores, bootstrap, left_out=0):
        return super().result([(first,) for first, _ in items], scores, bootstrap, left_out)


def test_items_of_several_images_may_be_explained_by_their_first():
    data, model = Patches(each=2, size=16), color_model(gain=0.02)
    both = [Pairs(seed=1), MaskOverlap()]
    found = evaluate(
        model, data, (Contributions(),), metrics=both, masks=data.mask, batch_size=3, **QUICK
    )
    assert len(found["perturbation"].images) == 5 and len(found["masks"].images) == 10
    alone = evaluate(model, data, (Contributions(),), metrics=both[:1], batch_size=3, **QUICK)
    assert alone["perturbation"].abc == found["perturbation"].abc


def test_images_are_let_go():
    class Watched(Patches):
        alive = most = 0

        def __getitem__(self, index):
            image, label, key = super().__getitem__(index)
            image = image.clone()
            Watched.alive += 1
            Watched.most = max(Watched.most, Watched.alive)
            weakref.finalize(image, self.gone)
            return image, label, key

        def gone(self):
            Watched.alive -= 1

    data = Watched(each=40, classes=5)
    evaluate(color_model(), data, [Uniform()], masks=data.mask, batch_size=4, **QUICK)
    assert len(data.reads) > 400
    assert Watched.most <= 8


def test_progress_and_random_state():
    told, data = [], Patches(each=3)
    state = torch.get_rng_state()
    evaluate(
        color_model(), data, [Uniform()], progress=lambda *what: told.append(what), batch_size=8
    )
    assert told[:2] == [(8, 15, "predictions"), (15, 15, "predictions")]
    assert {what for *_, what in told} == {"predictions", "localization", "explanations"}
    assert all(told[i][0] <= told[i][1] for i in range(len(told)))
    assert told[-1] == (15, 15, "explanations")
    assert torch.equal(torch.get_rng_state(), state)


def test_a_model_that_is_never_right_has_nothing_to_show(tmp_path):
    data = Patches(each=2, wrong=10)
    found = evaluate(color_model(), data, [Uniform()], **QUICK)
    assert found.accuracy.top1.mean == 0
    assert found["localization"].summary()["grids"] == 0
    assert found["perturbation"].summary()["images"] == 0
    assert found["perturbation"].abc == {}
    found.write(tmp_path)
    assert (tmp_path / "localization.csv").read_text() == ""


def test_tables_and_summary(tmp_path):
    data, model = Patches(each=2), color_model()
    found = evaluate(model, data, [Contributions(), Uniform()], masks=data.mask)
    found.write(tmp_path / "out")
    tables = {}
    for path in (tmp_path / "out").glob("*.csv"):
        with path.open(newline="") as file:
            tables[path.stem] = list(csv.DictReader(file))
    assert {name: len(rows) for name, rows in tables.items()} == {
        "accuracy": 10,
        "localization": 2 * 4 * len(found["localization"].grids),
        "perturbation": 20,
        "masks": 20,
    }
    assert tables["accuracy"][7]["key"] == "image007"
    first = tables["perturbation"][0]
    assert float(first["least 0.25"]) == float(found["perturbation"].confidences[EXACT][0, 1, 8])
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary == found.summary()
    assert summary["settings"]["methods"] == [EXACT, UNIFORM]
    assert summary["settings"]["metrics"]["perturbation"]["images"] == 250
    assert set(summary["perturbation"]["abc"][EXACT]) == {"mean", "low", "high", "count"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        *(f"{name}.csv" for name in tables),
        "summary.json",
    }


def test_odd_keys_survive_in_tables(tmp_path):
    class Odd(Patches):
        def __getitem__(self, index):
            image, label, _ = super().__getitem__(index)
            return image, label, f'a,"b"\nfile\udcff{index}'

    evaluate(color_model(), Odd(each=1), [Uniform()], **QUICK).write(tmp_path)
    with (tmp_path / "accuracy.csv").open(newline="", encoding="utf-8") as file:
        assert next(csv.DictReader(file))["key"] == 'a,"b"\nfile\\udcff0'


def test_a_conventional_model_and_a_subset_of_metrics():
    data = Patches(each=2)
    model = color_model(family="conventional")
    found = evaluate(model, data, [], metrics=["accuracy"])
    assert list(found.results) == ["accuracy"]
    assert set(found.summary()) == {"accuracy", "settings"}


class Changing(Patches):
    def __getitem__(self, index):
        image, label, key = super().__getitem__(index)
        return image, label, f"{key}-{self.reads.count(index)}"


def bad_map(model, images, target=None):
    return Attribution(map=torch.zeros(len(images), 2, 2), target=target)


def nan_map(model, images, target=None):
    return Attribution(map=images[:, 0] * float("nan"), target=target)


class MaskedGrids(GridPointingGame):
    needs_masks = True


KNOWN = evaluate(color_model(), Patches(each=2), metrics=["accuracy"]).accuracy


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"methods": ()}, "methods = .* is not allowed"),
        ({"methods": "inherent"}, "methods = 'inherent' is not allowed"),
        ({"methods": ("nonsense",)}, "no method 'nonsense'"),
        ({"methods": (bad_map,)}, "gave maps .* expected"),
        ({"methods": (nan_map,)}, "NaN"),
        ({"batch_size": 0}, "batch_size = 0"),
        ({"data": Patches(each=0)}, "data set is empty"),
        ({"data": Patches(each=1), "known": KNOWN}, "is of 10 images, and the data have 5"),
        ({"data": Changing()}, "must not change"),
        ({"model": color_model().train()}, "training mode"),
        (
            {
                "model": color_model(classes=3),
                "data": Patches(classes=3),
                "metrics": ["localization"],
            },
            "localization cannot be measured: .* there are 3",
        ),
        ({"metrics": ["masks"]}, "masks cannot be measured"),
        (
            {"metrics": [MaskedGrids()], "masks": lambda index: torch.ones(8, 8).bool()},
            "masks are those of single images",
        ),
        ({"metrics": ["localisation"]}, "no metric .* did you mean 'localization'"),
        ({"data": Patches(classes=3)}, "hold 3 classes"),
        ({"masks": lambda index: torch.ones(8, 8)}, "mask of 'image000' is torch.float32"),
        ({"masks": lambda index: torch.ones(4, 8).bool()}, r"mask .* \[4, 8\], expected"),
        ({"masks": lambda index: torch.zeros(8, 8).bool()}, "mask of 'image000' is empty"),
    ],
)
def test_what_is_refused(change, message):
    options = {"model": color_model(), "data": Patches(), "methods": (Uniform(),), **QUICK}
    with pytest.raises(ValueError, match=message):
        evaluate(**{**options, **change})


def test_pictures_must_be_tensors_of_one_size():
    class Pictures(Patches):
        def __getitem__(self, index):
            image, label, key = super().__getitem__(index)
            return (image[:, :4] if index == 2 else image), label, key

    with pytest.raises(ValueError, match="'image000' and 'image002' have sizes"):
        evaluate(color_model(), Pictures(), [Uniform()])

    class Files(Patches):
        def __getitem__(self, index):
            return "a picture", 0, "name"

    with pytest.raises(ValueError, match="Image 'name' is str, expected a tensor"):
        evaluate(color_model(), Files(), [Uniform()])


class Short:
    """Claims to be complete, and leaves a quarter of every logit out."""

    def __call__(self, model, images, target=None):
        logit = model(images).detach().gather(1, target.unsqueeze(1)).squeeze(1)
        share = 0.75 * (logit - model.bias) / images[0, 0].numel()
        maps = share.view(-1, 1, 1).expand(-1, *images.shape[-2:])
        none = torch.zeros_like(logit)
        return Attribution(map=maps, target=target, residual=none, logit=logit, bias=model.bias)


def test_completeness_is_measured_where_it_is_claimed(real):
    model, data = real
    found = evaluate(
        model,
        data,
        ("inherent", "ixg"),
        metrics=["localization", PixelPerturbation(images=6)],
        **QUICK,
    )
    explained = 4 * len(found["localization"].grids) + len(found["perturbation"].images)
    assert found.completeness.explanations == explained > 10
    assert 0 < found.completeness.worst < 1e-4
    assert found.summary()["completeness"]["explanations"] == explained
    post_hoc = evaluate(model, data, ("ixg",), metrics=["perturbation"], **QUICK)
    assert post_hoc.completeness is None and "completeness" not in post_hoc.summary()


class Nothing:
    """Completely explains a logit of zero."""

    def __call__(self, model, images, target=None):
        none = images.new_zeros(len(images))
        return Attribution(map=images[:, 0] * 0, target=target, residual=none, logit=none)


def test_nothing_may_be_explained_completely():
    found = evaluate(color_model(), Patches(), (Nothing(),), metrics=["perturbation"], **QUICK)
    assert found.completeness.worst == 0


def test_contributions_that_do_not_add_up_are_seen():
    found = evaluate(color_model(), Patches(), (Short(),), metrics=["perturbation"], **QUICK)
    assert found.completeness.worst == pytest.approx(0.25, rel=1e-4)


@dataclass(frozen=True, kw_only=True)
class Counted(Metric):
    """Looks at predictions alone."""

    title = "Counted"
    explains = False

    def select(self, predictions):
        return [(each,) for each in predictions if each.correct]

    def result(self, items, scores, bootstrap, left_out=0):
        return CountedResult(keys=[each.key for (each,) in items], scores=dict(scores))


@dataclass(frozen=True, kw_only=True)
class CountedResult(MetricResult):
    keys: list
    scores: dict

    def about(self):
        return "How many are right."

    def rows(self):
        return [{"key": key} for key in self.keys]

    def summary(self):
        return {"right": len(self.keys)}


def test_a_metric_of_predictions_gets_them_and_no_scores():
    data = Patches(each=2, wrong=3)
    found = evaluate(color_model(), data, [], metrics=[Counted()])
    (result,) = [each for each in found.results.values() if isinstance(each, CountedResult)]
    assert result.scores == {}
    assert len(result.keys) == len(data) - 3


def test_a_metric_is_called_by_its_title_or_else_by_its_class(restored_registries):
    @register_metric("first of the test")
    class Titled(Accuracy):
        title = "The title"

    @register_metric("second of the test")
    class Untitled(Accuracy):
        title = ""

    assert [METRICS.get(f"{n} of the test").title for n in ("first", "second")] == [
        "The title",
        "Untitled",
    ]


@pytest.mark.parametrize("name", ["=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "\r=1"])
def test_no_text_of_a_table_is_a_formula(name, tmp_path):
    write_table(tmp_path / "t.csv", [{"key": name, "number": -1.5, "other": "a=b", "none": ""}])
    with (tmp_path / "t.csv").open(newline="", encoding="utf-8") as file:
        (row,) = csv.DictReader(file)
    assert row == {"key": f"'{name}", "number": "-1.5", "other": "a=b", "none": ""}
