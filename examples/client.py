"""Sends an image to a running `bcosvit serve`.

    bcosvit serve --weights best.safetensors
    python examples/client.py photo.jpg --server http://127.0.0.1:7860

Needs ``pip install gradio_client``, nothing else. Writes the map, the overlay, W(x) in color and a
report into a folder.
"""

import argparse
import shutil
from pathlib import Path
from typing import Any

from gradio_client import Client, handle_file


def ask(server: str, photo: str | Path, out: str | Path) -> dict[str, Any]:
    """Returns the answer for the most confident class and writes files to ``out``."""
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    client = Client(server, verbose=False, analytics_enabled=False, download_files=folder / "raw")
    picture = handle_file(photo)

    about = client.predict(api_name="/model")
    top = client.predict(picture, 3, api_name="/predict")["top"]
    print(about["model"])
    for entry in top:
        print(f"  {entry['class']:24} {entry['probability']:.1%}")

    # "" stands for the most confident class and for the model's default method.
    numbers, *pictures = client.predict(picture, "", "", 0.75, False, api_name="/explain")
    for name, path in zip(("map", "overlay", "colors"), pictures, strict=True):
        # Only B-cos models have color images.
        if path is not None:
            shutil.copy(path, folder / f"{name}.png")

    half = about["image_size"] // 2
    result = {"top": top, "explained": numbers}
    if about["exact"]:
        terms = [numbers[name] for name in ("contributions", "residual", "bias")]
        print("  contributions + residual + bias = logit:", end=" ")
        print(*(f"{term:+.4f}" for term in terms), "=", f"{numbers['logit']:+.4f}")
        left = client.predict(picture, "", 0, 0, half, 2 * half, api_name="/region")
        print(f"  the left half contributes {left['together']:+.4f}")
        result["left"] = left

    report = client.predict([picture], "", "", "html", api_name="/report")
    shutil.copy(report, folder / "report.html")
    return result


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("photo")
    parser.add_argument("--server", default="http://127.0.0.1:7860")
    parser.add_argument("--out", default="answers")
    given = parser.parse_args()
    ask(given.server, given.photo, given.out)
