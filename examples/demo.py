"""The main job, end to end, on what ships with the project: what `make demo` runs.

Trains a small B-cos ViT from scratch on drawn scenes, explains pictures that it has not seen, and
measures its explanations against other methods. A few minutes on two cores.
"""

import shutil
from pathlib import Path

from rich.console import Console

from bcosvit.data.scenes import Scenes
from bcosvit.report.evaluate import evaluate_weights
from bcosvit.report.explain import explain_pictures
from bcosvit.train import train

OUT = Path("demo-out")
SIZE = 48
METHODS = "inherent,ixg,intgrad,rollout,gradcam,random"


def main() -> None:
    console = Console()
    shutil.rmtree(OUT, ignore_errors=True)

    console.rule("1  Train a B-cos ViT on drawn scenes")
    run = train(f"scenes?size={SIZE}", out=OUT / "run", recipe="quick")

    console.rule("2  Explain pictures that it has not seen")
    pictures = OUT / "pictures"
    pictures.mkdir()
    unseen = Scenes("val", size=SIZE)
    for index in range(16):
        scene = unseen[index]
        scene.image.save(pictures / f"{index:02d} {unseen.classes[scene.label]}.png")
    explain_pictures([pictures], run.weights, top=2, methods=METHODS, out=OUT / "explanations.html")

    console.rule("3  Measure the explanations")
    evaluate_weights(
        run.weights,
        f"scenes?size={SIZE}&val=200",
        out=OUT / "evaluation",
        methods=METHODS,
        grids=40,
        images=40,
        console=console,
    )
    console.print("\nLook at:")
    for path in (
        OUT / "run" / "curves.png",
        OUT / "explanations.html",
        OUT / "evaluation" / "report.html",
    ):
        console.print(f"  {path.resolve()}", soft_wrap=True, highlight=False)


if __name__ == "__main__":
    main()
