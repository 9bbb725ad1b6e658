"""Draws images of classes that the shipped model knows, so that no photographs are needed.

    python examples/drawings.py pictures/

writes images of a golf ball, of a parachute, and of both side by side.
"""

import math
import sys
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFilter

SIDE = 256


def golf_ball(seed: int = 0) -> Image.Image:
    """Draws a lit sphere with dimples on grass."""
    grass = _grass(np.random.default_rng(seed))
    y, x = np.mgrid[:SIDE, :SIDE]
    u, v = (x - 128) / 70, (y - 140) / 70
    depth = np.sqrt(np.clip(1 - u**2 - v**2, 0, 1))
    light = np.clip(0.25 + 0.75 * (0.7 * depth - 0.4 * u - 0.6 * v), 0, 1)
    # Dimples form rows on the sphere; every other row is shifted by half a dimple.
    across, down = 9 * np.arcsin(np.clip(u, -1, 1)), 10.3 * np.arcsin(np.clip(v, -1, 1))
    dx, dy = (across + 0.5 * (np.floor(down) % 2)) % 1 - 0.5, down % 1 - 0.5
    dimple = np.where(np.hypot(dx, dy) < 0.38, 0.8 + 0.2 * dx + 0.4 * dy, 1)
    picture = np.asarray(grass).astype(float)
    picture[((x - 138) / 85) ** 2 + ((y - 206) / 22) ** 2 < 1] *= 0.45
    ball = u**2 + v**2 < 1
    picture[ball] = (245 * light * dimple)[ball, None] * [1, 1, 0.98]
    return _image(picture, blur=0.6)


def parachute() -> Image.Image:
    """Draws a striped canopy with its lines and a person below it, in front of the sky."""
    y, _ = np.mgrid[:SIDE, :SIDE]
    sky = _image(np.stack([90 + 0.35 * y, 150 + 0.25 * y, np.full(y.shape, 225.0)], -1))
    pen = ImageDraw.Draw(sky)
    stripes = [(220, 30, 40), (250, 250, 250), (30, 60, 180), (250, 200, 20)] * 2

    def rim(share: float, height: float) -> tuple[float, float]:
        angle = math.pi * (1 - share)
        return 128 + 80 * math.cos(angle), 110 - height * math.sin(angle)

    for i, color in enumerate(stripes):
        left, right = i / len(stripes), (i + 1) / len(stripes)
        arc = [rim(share, 70) for share in np.linspace(left, right, 8)]
        pen.polygon([*arc, rim(right, -4 / 70), rim(left, -4 / 70)], fill=color)
    for i in range(len(stripes) + 1):
        pen.line([rim(i / len(stripes), 0), (128, 200)], fill=(60, 60, 70))
    pen.ellipse([122, 198, 134, 210], fill=(70, 50, 40))
    pen.rectangle([121, 208, 135, 232], fill=(40, 40, 60))
    for foot in (120, 137):
        pen.line([128, 230, foot, 246], fill=(40, 40, 60), width=4)
    return sky.filter(ImageFilter.GaussianBlur(0.8))


def both() -> Image.Image:
    """Draws the golf ball on the left and the parachute on the right."""
    picture = Image.new("RGB", (SIDE, SIDE))
    picture.paste(golf_ball().resize((SIDE // 2, SIDE)), (0, 0))
    picture.paste(parachute().resize((SIDE // 2, SIDE)), (SIDE // 2, 0))
    return picture


def draw(folder: Path) -> None:
    """Writes all drawings as PNG files."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, picture in {
        "golf ball": golf_ball(),
        "parachute": parachute(),
        "both": both(),
    }.items():
        picture.save(folder / f"{name}.png")


def _grass(rng: np.random.Generator) -> Image.Image:
    picture = Image.new("RGB", (SIDE, SIDE), (60, 110, 40))
    pen = ImageDraw.Draw(picture)
    for x, y, lean, height, green in zip(
        *rng.integers([0, 0, -3, 4, 70], [SIDE, SIDE, 4, 14, 190], (9000, 5)).T.tolist(),
        strict=True,
    ):
        pen.line([x, y, x + lean, y - height], fill=(green // 2, green, green // 4))
    return picture.filter(ImageFilter.GaussianBlur(0.7))


def _image(values: np.ndarray, blur: float = 0) -> Image.Image:
    picture = Image.fromarray(values.clip(0, 255).astype("uint8"))
    return picture.filter(ImageFilter.GaussianBlur(blur)) if blur else picture


if __name__ == "__main__":
    draw(Path(sys.argv[1] if len(sys.argv) > 1 else "pictures"))
