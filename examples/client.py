"""Sends an image to a running `bcosvit serve`.

    bcosvit serve --weights best.safetensors
    python examples/client.py photo.jpg --server http://127.0.0.1:7860

Needs ``pip install gradio_client``, which brings httpx. Writes the map, the overlay, W(x) in color
and a report into a folder.
"""

import argparse
import base64
import shutil
from pathlib import Path
from typing import Any

import httpx
from gradio_client import Client, handle_file


def ask(server: str, photo: str | Path, out: str | Path) -> dict[str, Any]:
    """Returns the answer for the most confident class and writes files to ``out``."""
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    picture = Path(photo).read_bytes()

    def post(endpoint: str, **arguments: str | int) -> dict[str, Any]:
        answer = httpx.post(
            f"{server.rstrip('/')}/api/{endpoint}",
            files={"picture": picture},
            data=arguments,
            timeout=60,
        )
        if answer.is_error:
            raise ValueError(answer.json()["error"])
        return answer.json()

    about = httpx.get(f"{server.rstrip('/')}/api/model", timeout=60).json()
    top = post("predict", top=3)["top"]
    print(about["model"])
    for entry in top:
        print(f"  {entry['class']:24} {entry['probability']:.1%}")

    # Without a label it is the most confident class, and without a method the model's default.
    numbers = post("explain", images="true")
    for name, image in numbers.pop("images").items():
        # Only B-cos models have color images.
        if image is not None:
            (folder / f"{name}.png").write_bytes(base64.b64decode(image))

    half = about["image_size"] // 2
    result = {"top": top, "explained": numbers}
    if about["exact"]:
        terms = [numbers[name] for name in ("contributions", "residual", "bias")]
        print("  contributions + residual + bias = logit:", end=" ")
        print(*(f"{term:+.4f}" for term in terms), "=", f"{numbers['logit']:+.4f}")
        left = post("region", x=0, y=0, width=half, height=2 * half)
        print(f"  the left half contributes {left['together']:+.4f}")
        result["left"] = left

    # Reports are files, which come through Gradio.
    client = Client(server, verbose=False, analytics_enabled=False, download_files=folder / "raw")
    report = client.predict([handle_file(photo)], "", "", "html", api_name="/report")
    shutil.copy(report, folder / "report.html")
    return result


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("photo")
    parser.add_argument("--server", default="http://127.0.0.1:7860")
    parser.add_argument("--out", default="answers")
    given = parser.parse_args()
    ask(given.server, given.photo, given.out)
