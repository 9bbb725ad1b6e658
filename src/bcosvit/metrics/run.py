"""All metrics of several methods on one model and data set.

The data are read at most three times: for the predictions, which also decide what the other metrics
look at (those of an earlier call will do); for the grids; and for the images that are explained as
they are, once for perturbation and masks together. Every method sees the same batch and shares its
forward work. Nothing but rows of numbers outlives a batch, and how images are batched, or shared
between processes, decides nothing.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from bcosvit.attribution import Explainer, explain_all
from bcosvit.metrics.accuracy import Accuracy, FromEncoded, Prediction, accuracy_of, predict
from bcosvit.metrics.bootstrap import Bootstrap
from bcosvit.metrics.localization import CELLS, GridPointingGame, Localization
from bcosvit.metrics.masks import Masked, energy_inside, pointing
from bcosvit.metrics.perturbation import Perturbation, PixelPerturbation
from bcosvit.metrics.ranks import Ranks
from bcosvit.metrics.results import Completeness, Evaluation
from bcosvit.metrics.samples import Batch, Images, Masks, Reader
from bcosvit.models.base import AnyModel
from bcosvit.nn.cuda_graphs import with_cuda_graphs
from bcosvit.nn.views import unwrapped

Progress = Callable[[int, int, str], None]
"""Told how many images are done, of how many, for what; counts those of this process."""

PAPER_GAME = GridPointingGame()
PAPER_PERTURBATION = PixelPerturbation()
DEFAULT_BOOTSTRAP = Bootstrap()

_Row = dict[str, Any]


def evaluate(
    model: AnyModel,
    data: Images,
    methods: Sequence[str | Explainer] = ("inherent",),
    *,
    localization: GridPointingGame | None = PAPER_GAME,
    perturbation: PixelPerturbation | None = PAPER_PERTURBATION,
    masks: Masks | None = None,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    batch_size: int = 32,
    workers: int = 0,
    progress: Progress | None = None,
    known: Accuracy | None = None,
) -> Evaluation:
    """Accuracy, and the metrics that are not None; ``masks`` brings the third one.

    At most ``batch_size`` pictures pass through the model at once, but for grids, of which one is
    four. ``workers`` processes read ahead. Inside ``torch.distributed`` every process calls this
    with the same arguments, does its share and gets the whole result. ``known`` is the accuracy
    that an earlier call found for this model and these data, which are then not predicted again.
    """
    model = unwrapped(model)
    explaining = any(metric is not None for metric in (localization, perturbation, masks))
    _check(model, data, methods, batch_size, explaining)
    if known is not None and known.images != len(data):
        raise ValueError(
            f"The accuracy that is known is of {known.images} images, and the data have "
            f"{len(data)}; give what evaluating this model on these very data has found."
        )
    if localization is not None and model.config.num_classes < CELLS:
        raise ValueError(
            f"The model knows {model.config.num_classes} classes, but a grid shows {CELLS} "
            f"different ones; pass localization=None."
        )
    run = _Run(
        model,
        data,
        methods,
        batch_size,
        workers,
        Ranks.current(),
        progress,
        # Two recordings: batches of predictions and those of perturbation may differ in size.
        predicting=with_cuda_graphs(model, model.from_encoded),
        perturbing=with_cuda_graphs(model, model.from_encoded),
    )
    if explaining:
        # A method that does not exist or apply is better found now than after all predictions.
        run.maps(*run.on_device(next(run.reader().read([0], 1))))
        run.missed.clear()
    found = known or accuracy_of(run.predictions(), bootstrap)
    grids = None if localization is None else _localization(run, found, localization, bootstrap)
    perturbed, masked = _explained(run, found, perturbation, masks, bootstrap)
    return Evaluation(
        accuracy=found,
        localization=grids,
        perturbation=perturbed,
        masks=masked,
        completeness=run.completeness(),
        settings={
            "methods": [m if isinstance(m, str) else repr(m) for m in methods],
            "localization": None if localization is None else asdict(localization),
            "perturbation": None if perturbation is None else asdict(perturbation),
            "masks": masks is not None,
            "bootstrap": asdict(bootstrap),
        },
    )


@dataclass(frozen=True)
class _Run:
    """What every pass over the data needs."""

    model: AnyModel
    data: Images
    methods: Sequence[str | Explainer]
    batch_size: int
    workers: int
    ranks: Ranks
    progress: Progress | None
    predicting: FromEncoded
    perturbing: FromEncoded
    missed: list[float] = field(default_factory=list)
    """By how much each explanation missed its logit (`Completeness.worst` is the largest)."""

    def reader(self, masks: Masks | None = None) -> Reader:
        return Reader(data=self.data, masks=masks, workers=self.workers)

    def on_device(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Images and labels, where the model is."""
        reference = next(self.model.parameters())
        return batch.images.to(reference), batch.labels.to(reference.device)

    def maps(self, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Every method's attribution maps [B, H, W]."""
        found = explain_all(self.model, images, labels, self.methods)
        expected = (len(images), *images.shape[-2:])
        for method, attribution in found.items():
            if attribution.map.shape != expected:
                raise ValueError(
                    f"Method {method} gave maps {list(attribution.map.shape)}, expected "
                    f"{list(expected)}; it must attribute to the images' pixels."
                )
            if attribution.map.isnan().any():
                raise ValueError(f"Method {method} gave a map with NaN, which cannot be ranked.")
            if attribution.residual is not None and attribution.logit is not None:
                # A model without a bias may say exactly nothing, and explain it rightly.
                least = max(abs(attribution.bias), torch.finfo(torch.float32).tiny)
                size = attribution.logit.double().abs().clamp(min=least)
                self.missed.extend((attribution.completeness_error() / size).tolist())
        return {method: attribution.map for method, attribution in found.items()}

    def completeness(self) -> Completeness | None:
        """Of all that every process has explained."""
        shares = self.ranks.gather([(len(self.missed), max(self.missed, default=0.0))])
        explanations = sum(count for count, _ in shares)
        if not explanations:
            return None
        return Completeness(explanations=explanations, worst=max(worst for _, worst in shares))

    def predictions(self) -> list[Prediction]:
        """Of all images, in their order."""
        mine = self.ranks.share(range(len(self.data)))
        batches = self._told(mine, self.reader().read(mine, self.batch_size), "predictions")
        rows = [row for batch in batches for row in predict(self.model, batch, self.predicting)]
        return self.ranks.gather(rows)

    def again(
        self, images: Sequence[Prediction], batch_size: int, what: str, masks: Masks | None = None
    ) -> Iterator[Batch]:
        """Reads ``images`` a second time, and makes sure that they are what they were."""
        indices = [image.index for image in images]
        known = iter(images)
        batches = self.reader(masks).read(indices, batch_size)
        for batch in self._told(indices, batches, what):
            for key, label in zip(batch.keys, batch.labels.tolist(), strict=True):
                before = next(known)
                if (key, label) != (before.key, before.label):
                    raise ValueError(
                        f"Image {before.index} was {before.key!r} with label {before.label} and "
                        f"is now {key!r} with label {label}; the data must not change."
                    )
            yield batch

    def _told(self, indices: Sequence[int], batches: Iterator[Batch], what: str) -> Iterator[Batch]:
        done = 0
        for batch in batches:
            yield batch
            done += len(batch.indices)
            if self.progress is not None:
                self.progress(done, len(indices), what)


def _localization(
    run: _Run, found: Accuracy, game: GridPointingGame, bootstrap: Bootstrap
) -> Localization:
    grids = game.plan(found.predictions)
    shown = [image for grid in run.ranks.share(grids) for image in grid]
    rows: list[_Row | None] = []
    for batch in run.again(shown, CELLS * max(1, run.batch_size // CELLS), "localization"):
        images, labels = run.on_device(batch)
        cells = images.unflatten(0, (-1, CELLS))
        rows += _rows(game.scores(cells, labels.view(-1, CELLS), run.maps))
    return Localization.of(game, grids, _columns(run.ranks.gather(rows)), bootstrap)


@dataclass
class _Found:
    """What one explained image yields."""

    curves: _Row | None = None
    scores: _Row | None = None
    area: float | None = None


def _explained(
    run: _Run,
    found: Accuracy,
    metric: PixelPerturbation | None,
    masks: Masks | None,
    bootstrap: Bootstrap,
) -> tuple[Perturbation | None, Masked | None]:
    """Perturbation and masks, from one explanation of each image."""
    selected = [] if metric is None else metric.select(found.predictions)
    chosen = {image.index for image in selected}
    # In the order of the data, which reads fastest, and in which no other decision is hidden.
    images = sorted(selected if masks is None else found.predictions, key=lambda image: image.index)
    mine: list[_Found] = []
    for batch in run.again(run.ranks.share(images), run.batch_size, "explanations", masks):
        mine += _explain_batch(run, batch, metric, chosen)
    each = {image.index: one for image, one in zip(images, run.ranks.gather(mine), strict=True)}
    perturbed = masked = None
    if metric is not None:
        curves = _columns([each[image.index].curves for image in selected])
        perturbed = Perturbation.of(metric, selected, curves, bootstrap)
    if masks is not None:
        with_mask = [image for image in images if each[image.index].area is not None]
        masked = Masked.of(
            with_mask,
            len(images) - len(with_mask),
            [area for image in with_mask if (area := each[image.index].area) is not None],
            _columns([each[image.index].scores for image in with_mask]),
            bootstrap,
        )
    return perturbed, masked


def _explain_batch(
    run: _Run, batch: Batch, metric: PixelPerturbation | None, chosen: set[int]
) -> list[_Found]:
    results = [_Found() for _ in batch.indices]
    perturb = [i for i, index in enumerate(batch.indices) if index in chosen]
    covered = [i for i, mask in enumerate(batch.masks) if mask is not None]
    needed = sorted({*perturb, *covered})
    if not needed:
        return results
    images, labels = run.on_device(batch)
    # Images that no metric asks for are not explained; `at` is where the others' maps are.
    at = {i: position for position, i in enumerate(needed)}
    maps = run.maps(images[needed], labels[needed])
    if metric is not None and perturb:
        some = {method: each[[at[i] for i in perturb]] for method, each in maps.items()}
        keys = [batch.keys[i] for i in perturb]
        curves = metric.curves(
            run.model, images[perturb], labels[perturb], keys, some, run.batch_size, run.perturbing
        )
        for i, row in zip(perturb, _rows(curves), strict=True):
            results[i].curves = row
    if covered:
        inside = torch.stack([mask for mask in batch.masks if mask is not None]).to(images.device)
        where = [at[i] for i in covered]
        scores = {
            method: torch.stack(
                [energy_inside(each[where], inside), pointing(each[where], inside)], 1
            )
            for method, each in maps.items()
        }
        areas = inside.double().mean((1, 2)).tolist()
        for i, row, area in zip(covered, _rows(scores), areas, strict=True):
            results[i].scores, results[i].area = row, area
    return results


def _rows(columns: Mapping[str, Tensor]) -> list[_Row]:
    """One dict a sample, of plain numbers: what processes exchange."""
    values = [column.tolist() for column in columns.values()]
    return [dict(zip(columns, row, strict=True)) for row in zip(*values, strict=True)]


def _columns(rows: Sequence[_Row | None]) -> dict[str, Tensor]:
    """The way back, in float64; nothing from nothing."""
    found = [row for row in rows if row is not None]
    assert len(found) == len(rows)
    names = found[0] if found else {}
    return {name: torch.tensor([row[name] for row in found], dtype=torch.float64) for name in names}


def _check(
    model: AnyModel,
    data: Images,
    methods: Sequence[str | Explainer],
    batch_size: int,
    explaining: bool,
) -> None:
    if any(module.training for module in model.modules()):
        raise ValueError(
            "The model is in training mode, in which it would change while it is measured; "
            "call model.eval() first."
        )
    if isinstance(methods, str) or (explaining and not methods):
        raise ValueError(
            f"methods = {methods!r} is not allowed: give a sequence of names or explainers, "
            f"such as ('inherent',)."
        )
    if batch_size < 1:
        raise ValueError(f"batch_size = {batch_size} is not allowed: give an integer >= 1.")
    if not len(data):
        raise ValueError("The data set is empty; give at least one image.")
