"""Draws the figures of the README and of `docs/idea.md`.

    python docs/figures/make.py                                 # trains a small model (minutes)
    python docs/figures/make.py --weights best.safetensors      # with existing weights
    python docs/figures/make.py --photos                        # only the photographs
    python docs/figures/make.py --audit REPORT                  # only the report of an audit

The README shows photographs with the shipped weights, `docs/idea.md` drawn scenes with a small
model that is trained on them.

The report is that of `python benchmarks/audit.py scenes --cues tag --rates 1 --first-seed 2
--seeds 3 --out DIR --reports DIR`, where all sea stars have a tag. It takes Playwright and
Chromium.

The model is the result of `bcosvit train "scenes?size=48" --out DIR`. Everything is seeded, so the
same machine draws the same files.
"""

import argparse
import shutil
import tempfile
from pathlib import Path

import matplotlib
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

import bcosvit
from bcosvit.attribution.color import color_image
from bcosvit.data.images import to_tensor
from bcosvit.data.scenes import Scenes
from bcosvit.messages import percent
from bcosvit.metrics.grid_pointing import grid_images
from bcosvit.models import Classifier
from bcosvit.nn import BcosEncoding, BcosLinear, frozen_view
from bcosvit.report.images import Tile, colors, contribution_image, on_white, panel, photo_image

FOLDER = Path(__file__).parent
PHOTOS = FOLDER.parents[1] / "examples" / "photos"
RED, BLUE, GRAY, INK = "#c8302f", "#2148c4", "#8a8a94", "#1d1d1f"
SIZE = 48


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--weights", help="A model of the drawn scenes; by default it is trained")
    parser.add_argument("--photos", action="store_true", help="Draw only the photographs")
    parser.add_argument("--audit", type=Path, help="Draw only the first suspicion of a report")
    given = parser.parse_args()
    if given.audit is not None:
        return suspicion(given.audit)
    photographs()
    if given.photos:
        return
    weights = given.weights
    matplotlib.rcParams.update({"svg.hashsalt": "bcosvit", "font.size": 10, "text.color": INK})
    two_vectors()
    six_channels()
    with tempfile.TemporaryDirectory() as folder:
        if weights is None:
            from bcosvit.train import train

            weights = train(f"scenes?size={SIZE}", out=Path(folder, "run"), recipe="quick").weights
        model = bcosvit.load(weights).eval()
    explained_scenes(model)
    adding_up(model)
    four_in_one(model)


def photographs() -> None:
    """Photographs, the contributions to the predicted class, and the row of W(x) in color."""
    predictor = bcosvit.Predictor.load()
    rows = []
    for file in ("chelsea.jpg", "coffee.jpg"):
        found = predictor.explain(predictor.read(PHOTOS / file), top=2)
        exact = found.exact
        assert exact is not None
        tiles = [Tile(image=photo_image(found.image), label=Path(file).stem)]
        for row, label in enumerate(found.target.tolist()):
            name, sure = predictor.class_names[label], found.probabilities[label].item()
            tiles += [
                Tile(image=contribution_image(exact.map[row]), label=f"{name} {percent(sure)}"),
                Tile(image=on_white(colors(exact, row)), label=f"W(x) of {name}"),
            ]
        rows.append(tiles)
    panel(rows, cell=224).save(FOLDER / "photographs.jpg", quality=92)


def suspicion(report: Path) -> None:
    """The first suspicion of an audit, as a browser shows it."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as started:
        chromium = shutil.which("chromium")
        browser = started.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1120, "height": 900})
        page.goto(report.resolve().as_uri())
        page.locator("article.suspicion").first.screenshot(path=FOLDER / "audit.png")
        browser.close()


def two_vectors() -> None:
    """Draws the row of W(x) and the gradient of one B-cos unit with two inputs."""
    unit = BcosLinear(2, 1).double()
    angle = np.deg2rad(20)
    with torch.no_grad():
        unit.weight.copy_(torch.tensor([[np.cos(angle), np.sin(angle)]]))
    x = torch.tensor([0.6, 1.0], dtype=torch.float64, requires_grad=True)
    row = torch.autograd.grad(frozen_view(unit)(x).sum(), x)[0].numpy()
    slope = torch.autograd.grad(unit(x).sum(), x)[0].numpy()
    at, value = x.detach().numpy(), unit(x).item()

    figure = Figure(figsize=(7.6, 3.4), layout="constrained")
    plane, bars = figure.subplots(1, 2, width_ratios=(1.15, 1))
    # All vectors v with v·x = y: a line across x.
    foot, along = value * at / (at @ at), np.array([-at[1], at[0]]) / np.hypot(*at)
    ends = np.stack([foot - 2 * along, foot + 2 * along])
    plane.plot(*ends.T, color=GRAY, linestyle=(0, (4, 3)), linewidth=1)
    plane.text(-0.58, 1.08, "all v with v·x = y", color=GRAY)
    weight = unit.weight.detach().numpy()[0]
    for vector, color, name, shift in (
        (at, INK, "x, the input", (0.04, 0.02)),
        (weight, GRAY, "ŵ, the weight", (0.04, 0.0)),
        (row, RED, "", (0, 0)),
        (slope, BLUE, "∂y/∂x, not frozen", (-0.75, -0.15)),
    ):
        _arrow(plane, vector, color)
        plane.text(*(vector + np.array(shift)), name, color=color)
    plane.text(0.22, 0.1, "W(x), frozen", color=RED, rotation=20, rotation_mode="anchor")
    plane.plot(0, 0, "o", color=INK, markersize=4)
    plane.set(xlim=(-0.6, 1.6), ylim=(-0.5, 1.2), aspect="equal", xticks=[], yticks=[])
    plane.set_title("one unit: y = |cos(x, ŵ)| · ŵ·x")
    plane.spines[:].set_visible(False)

    places = np.arange(2)
    for offset, vector, color in ((-0.19, row, RED), (0.19, slope, BLUE)):
        drawn = bars.bar(places + offset, vector * at, 0.34, color=color)
        bars.bar_label(drawn, fmt="%+.2f", padding=3, fontsize=9)
    bars.axhline(0, color=INK, linewidth=0.8)
    bars.set_xticks(places, ["x₁", "x₂"])
    bars.set_yticks([])
    bars.margins(y=0.2)
    bars.spines[:].set_visible(False)
    bars.set_title(f"the shares of x₁ and x₂ in y = {value:.2f}")
    figure.savefig(FOLDER / "two-vectors.svg", metadata={"Date": None})


def _arrow(axes: Axes, vector: np.ndarray, color: str) -> None:
    axes.annotate(
        "", vector, (0, 0), arrowprops={"arrowstyle": "-|>", "color": color, "linewidth": 2}
    )


COLORS = {
    "black": (0, 0, 0),
    "gray": (0.5, 0.5, 0.5),
    "white": (1, 1, 1),
    "dark red": (0.45, 0, 0),
    "red": (1, 0, 0),
    "yellow": (1, 0.9, 0),
    "blue": (0, 0.2, 1),
}


def six_channels() -> None:
    """Draws the cosines between colors in three and in six channels."""
    pixels = torch.tensor(list(COLORS.values()), dtype=torch.float64)
    encoded = BcosEncoding().encode(pixels[:, :, None, None])[:, :, 0, 0]
    figure = Figure(figsize=(7.6, 3.9), layout="constrained")
    for axes, vectors, title in zip(
        figure.subplots(1, 2),
        (pixels, encoded),
        ("three channels: r, g, b", "six: r, g, b, 1−r, 1−g, 1−b"),
        strict=True,
    ):
        unit = torch.nn.functional.normalize(vectors, dim=1)
        cosines = (unit @ unit.T).numpy()
        axes.imshow(cosines, cmap="Reds", vmin=0, vmax=1.3)
        for (i, j), cosine in np.ndenumerate(cosines):
            same = i != j and cosine > 0.999
            dead = i == j and cosine == 0
            weight = "bold" if same or dead else "normal"
            axes.text(j, i, f"{cosine:.2f}", ha="center", va="center", fontsize=8, weight=weight)
            if same or dead:
                frame = matplotlib.patches.Rectangle(
                    (j - 0.46, i - 0.46), 0.92, 0.92, fill=False, edgecolor=INK, linewidth=1.5
                )
                axes.add_patch(frame)
        for place, color in enumerate(COLORS.values()):
            for corner in ((place - 0.5, -1.15), (-1.15, place - 0.5)):
                width, height = (1, 0.55) if corner[1] == -1.15 else (0.55, 1)
                swatch = matplotlib.patches.Rectangle(
                    corner, width, height, facecolor=color, edgecolor=GRAY, clip_on=False
                )
                axes.add_patch(swatch)
        axes.set(xticks=[], yticks=[])
        axes.spines[:].set_visible(False)
        axes.set_title(title, pad=26)
    figure.savefig(FOLDER / "six-channels.svg", metadata={"Date": None})


def scenes(model: Classifier, count: int) -> tuple[Tensor, Tensor, list[str]]:
    """Returns the first unseen scenes of different classes that the model classifies correctly."""
    unseen = Scenes("val", size=SIZE)
    pictures, labels = [], []
    for index in range(len(unseen)):
        scene = unseen[index]
        image = to_tensor(scene.image)
        right = model(image[None]).argmax() == scene.label
        if right and scene.label not in labels:
            pictures.append(image)
            labels.append(scene.label)
        if len(labels) == count:
            break
    return torch.stack(pictures), torch.tensor(labels), [unseen.classes[k] for k in labels]


def explained_scenes(model: Classifier) -> None:
    """Draws scenes, W(x)·x, W(x) in color, and input × gradient."""
    images, labels, names = scenes(model, 5)
    ours = bcosvit.explain(model, images, labels)
    other = bcosvit.explain(model, images, labels, method="ixg")
    colors = color_image(ours.weights, ours.map, smooth=5)
    rows = [
        [
            Tile(image=photo_image(image), label=name)
            for image, name in zip(images, names, strict=True)
        ],
        [Tile(image=contribution_image(map), label="contributions W(x)·x") for map in ours.map],
        [Tile(image=on_white(rgba), label="W(x) in color") for rgba in colors],
        [Tile(image=contribution_image(map), label="input · gradient") for map in other.map],
    ]
    panel(rows, cell=144).save(FOLDER / "scenes.png", optimize=True)


def adding_up(model: Classifier) -> None:
    """Draws a logit as the sum of its parts."""
    images, labels, names = scenes(model, 1)
    a = bcosvit.explain(model, images, labels)
    assert a.residual is not None and a.logit is not None
    steps = {
        "bias": a.bias,
        "what speaks\nagainst it": float(a.map.clamp(max=0).sum()),
        "what speaks\nfor it": float(a.map.clamp(min=0).sum()),
        "residual": float(a.residual),
    }
    figure = Figure(figsize=(7.6, 2.6), layout="constrained")
    axes = figure.subplots()
    total = 0.0
    for place, (name, step) in enumerate(steps.items()):
        color = GRAY if name in ("bias", "residual") else RED if step > 0 else BLUE
        axes.barh(place, step, 0.6, left=total, color=color)
        total += step
        axes.plot([total, total], [place - 0.3, place + 1.3], color=INK, linewidth=0.8)
        axes.text(max(total, total - step) + 0.15, place, _signed(step), va="center")
    axes.barh(len(steps), float(a.logit), 0.6, color=INK)
    axes.text(max(float(a.logit), 0) + 0.15, len(steps), _signed(float(a.logit)), va="center")
    axes.axvline(0, color=INK, linewidth=0.8)
    axes.set_yticks(range(len(steps) + 1), [*steps, f"logit of\n“{names[0]}”"])
    axes.invert_yaxis()
    axes.tick_params(length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    low, high = axes.get_xlim()
    axes.set_xlim(low - 1, high + 4)
    figure.savefig(FOLDER / "adding-up.svg", metadata={"Date": None})


def _signed(number: float) -> str:
    return f"{number:+.3f}".replace("-", "−")


def four_in_one(model: Classifier) -> None:
    """Draws an image of four scenes, explained for each of the four classes."""
    images, labels, names = scenes(model, 4)
    grid = grid_images(images[None])
    a = bcosvit.explain(model, grid.expand(4, -1, -1, -1), labels)
    tiles = [Tile(image=photo_image(grid[0]), label="four scenes in one")]
    tiles += [Tile(image=contribution_image(m), label=n) for m, n in zip(a.map, names, strict=True)]
    panel([tiles], cell=144).save(FOLDER / "grid.png", optimize=True)


if __name__ == "__main__":
    main()
