"""Goes through the main features; `make demo` runs this script.

It explains photographs with the shipped weights, trains a small B-cos ViT from scratch on drawn
scenes, explains scenes that the model has not seen, and compares its explanations with other
methods. This takes a few minutes on two cores. The last line printed is the path of a page with
all results.
"""

import shutil
from pathlib import Path

from PIL import Image
from rich.console import Console

from bcosvit.attribution import method_title
from bcosvit.data.scenes import Scenes
from bcosvit.metrics import Evaluation
from bcosvit.predictor import Predictor
from bcosvit.report.evaluate import evaluate_weights
from bcosvit.report.explain import explain_pictures
from bcosvit.report.images import Picture, photo_image
from bcosvit.report.pages import environment, number
from bcosvit.report.provenance import Provenance
from bcosvit.report.tables import metric_columns
from bcosvit.shipped import DEFAULT
from bcosvit.train import train

OUT = Path("demo-out")
PHOTOS = Path(__file__).parent / "photos"
SIZE = 48
METHODS = "inherent,ixg,libragrad,rollout,gradcam,random"


def main() -> None:
    console = Console()
    shutil.rmtree(OUT, ignore_errors=True)

    console.rule(f"1  Explain photographs with the shipped weights, {DEFAULT}")
    explain_pictures(
        [PHOTOS],
        DEFAULT,
        top=2,
        methods="inherent,ixg",
        out=OUT / "shipped.html",
        png=OUT / "shipped",
        console=console,
    )

    console.rule("2  Train a B-cos ViT on drawn scenes")
    run = train(f"scenes?size={SIZE}", out=OUT / "run", recipe="quick")

    console.rule("3  Explain scenes that the model has not seen")
    pictures = OUT / "pictures"
    pictures.mkdir()
    unseen = Scenes("val", size=SIZE)
    for index in range(16):
        scene = unseen[index]
        scene.image.save(pictures / f"{index:02d} {unseen.classes[scene.label]}.png")
    explain_pictures([pictures], run.weights, top=2, methods=METHODS, out=OUT / "explanations.html")

    console.rule("4  Measure the explanations")
    found = evaluate_weights(
        run.weights,
        f"scenes?size={SIZE}&val=200",
        out=OUT / "evaluation",
        methods=METHODS,
        options={"grids": 40, "images": 40},
        console=console,
    )
    report = OUT / "report.html"
    write_report(report, run.accuracy, found)
    console.print(f"\nThe report is {report.resolve()}", soft_wrap=True, highlight=False)


TEMPLATE = """
{% extends "report/templates/page.html.jinja" %}
{% from "report/templates/macros.html.jinja" import image, table %}
{% block lead %}<p>What <code>make demo</code> did, step by step.</p>{% endblock %}
{% macro show(picture) %}
<figure>{{ image(picture) }}<figcaption>{{ picture.alt }}</figcaption></figure>
{% endmacro %}
{% block content %}
<section><h2>Explained with the shipped weights</h2>
<p>Three photographs: the evidence for (red) and against (blue) the most confident class, and where
it is.</p>
{% for photo in shipped | batch(3) %}
<div class="panels three">{% for picture in photo %}{{ show(picture) }}{% endfor %}</div>
{% endfor %}
<p><a href="shipped.html">All explanations: shipped.html</a></p></section>
<section><h2>Trained on drawn scenes</h2>
<p>A small B-cos ViT with an accuracy of {{ accuracy | percent }} on unseen scenes.</p>
{{ show(curves) }}
<p><a href="explanations.html">All explanations: explanations.html</a></p></section>
<section><h2>Measured</h2>
<p>Accuracy, localization, perturbation and masks for all methods.</p>
{{ table("Higher is better.", ["Method"] + columns | list, rows, range(1, 9), (0,)) }}
<p><a href="evaluation/report.html">All metrics: evaluation/report.html</a></p></section>
{% endblock %}
"""


def write_report(path: Path, accuracy: float, found: Evaluation) -> None:
    """Writes one page with images, and links to the reports of all steps."""
    shipped, predictor = [], Predictor.load(DEFAULT)
    for photo in sorted(PHOTOS.glob("*.jpg")):
        shipped.append(Picture.of(photo_image(predictor.read(photo)), photo.stem))
        for kind in ("inherent", "overlay"):
            # Of two classes the more confident one was written first.
            files = (OUT / "shipped").glob(f"*{photo.stem}*{kind}.png")
            file = min(files, key=lambda file: file.stat().st_mtime_ns)
            # 00001-chelsea-285-Egyptian_cat-inherent
            name = file.stem.split("-", 3)[3].removesuffix(f"-{kind}").replace("_", " ")
            shipped.append(_picture(file, f"{name}, {kind}"))
    columns = metric_columns(found)
    page = (
        environment()
        .from_string(TEMPLATE)
        .render(
            title="bcosvit, end to end",
            provenance=Provenance.of({"weights": DEFAULT, "methods": METHODS}),
            shipped=shipped,
            curves=_picture(OUT / "run" / "curves.png", "Loss, accuracy, learning rate by epoch"),
            accuracy=accuracy,
            columns=columns,
            rows=[
                [
                    method_title(method),
                    *(number(values[method].mean) for values in columns.values()),
                ]
                for method in METHODS.split(",")
            ],
        )
    )
    path.write_text(page, "utf-8")


def _picture(file: Path, caption: str) -> Picture:
    with Image.open(file) as opened:
        width, height = opened.size
    return Picture(data=file.read_bytes(), alt=caption, width=width, height=height)


if __name__ == "__main__":
    main()
