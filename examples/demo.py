"""Goes through the main features with drawn images; `make demo` runs this script.

It explains images with the shipped weights, trains a small B-cos ViT from scratch on drawn scenes,
explains scenes that the model has not seen, and compares its explanations with other methods. This
takes a few minutes on two cores. The last line printed is the path of a page with all results.
"""

import shutil
from pathlib import Path
from typing import Any

from drawings import draw
from PIL import Image
from rich.console import Console

from bcosvit.attribution import method_title
from bcosvit.data.scenes import Scenes
from bcosvit.models.hub import DEFAULT
from bcosvit.report.evaluate import REPORT, evaluate_weights
from bcosvit.report.explain import explain_pictures
from bcosvit.report.html import Html, element, figure, foot, page, paragraph, picture, table
from bcosvit.report.html import text as plain
from bcosvit.report.provenance import command_line, versions
from bcosvit.train import train

OUT = Path("demo-out")
SIZE = 48
METHODS = "inherent,ixg,intgrad,rollout,gradcam,random"


def main() -> None:
    console = Console()
    shutil.rmtree(OUT, ignore_errors=True)

    console.rule(f"1  Explain images with the shipped weights, {DEFAULT}")
    draw(OUT / "drawings")
    explain_pictures(
        [OUT / "drawings"],
        DEFAULT,
        classes="golf_ball,parachute",
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
        grids=40,
        images=40,
        console=console,
    )
    report = OUT / "report.html"
    write_report(report, run.accuracy, found.summary())
    console.print(f"\nThe report is {report.resolve()}", soft_wrap=True, highlight=False)


def write_report(path: Path, accuracy: float, summary: dict[str, Any]) -> None:
    """Writes one page with images, and links to the reports of all steps."""
    lead = paragraph("What `make demo` did, step by step.")
    ending = foot(command_line(), {"weights": DEFAULT, "methods": METHODS}, versions())
    areas = summary["perturbation"]["abc"]
    with page(path, "bcosvit, end to end", lead, ending) as write:
        maps = sorted((OUT / "shipped").glob("*both*inherent.png"))
        colors = sorted((OUT / "shipped").glob("*both*colors.png"))
        shown = [_figure(file) for file in (OUT / "drawings" / "both.png", *maps, *colors)]
        write(
            _section(
                "Explained with the shipped weights",
                "One drawn image, two classes; the evidence for each class is in its own half.",
                element("div", *shown, class_="panels"),
                link="shipped.html",
            )
        )
        write(
            _section(
                "Trained on drawn scenes",
                f"A small B-cos ViT with an accuracy of {accuracy:.1%} on unseen scenes.",
                _figure(OUT / "run" / "curves.png"),
                link="explanations.html",
            )
        )
        write(
            _section(
                "Measured",
                "Accuracy, localization, perturbation and masks, for several methods.",
                table(
                    "All methods by two metrics; higher is better.",
                    ("Method", "Localization", "Perturbation (ABC)"),
                    [
                        (method_title(name), f"{score['mean']:.3f}", f"{areas[name]['mean']:.3f}")
                        for name, score in summary["localization"]["score"].items()
                    ],
                    numbers=(1, 2),
                    chosen=(0,),
                ),
                link=f"evaluation/{REPORT}",
            )
        )


def _section(title: str, words: str, *content: Html, link: str) -> Html:
    more = element("p", element("a", plain(f"Full report: {link}"), href=link))
    return element("section", element("h2", plain(title)), paragraph(words), *content, more)


def _figure(file: Path) -> Html:
    with Image.open(file) as opened:
        size = opened.size
    caption = file.stem.partition("-")[2].replace("-", " ").replace("_", " ")
    return figure(picture(file.read_bytes(), caption or file.stem, size), plain(caption))


if __name__ == "__main__":
    main()
