"""Pictures of explanations: contributions as colors, and panels of labeled pictures.

Arrays are uint8 RGB [H, W, 3] throughout, so that whatever makes a picture can be tiled with
whatever else does.

The paper's conventions: contributions go from blue over white to red, between ± the 99.9th
percentile of their absolute values; methods that read attention, which is never negative, go
through "jet" from 0. A map is normalized on its own, or with those that it is compared with.
"""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from bcosvit.attribution import METHODS, Attribution
from bcosvit.attribution.color import SMOOTH, color_image

RGB = NDArray[np.uint8]

PERCENTILE = 99.9
"""Of the absolute contributions: what is drawn in full color."""

COARSE = 128
"""Pictures up to so many pixels wide are shown enlarged, pixel by pixel."""

_BLUE, _WHITE, _RED = (33, 72, 196), (255, 255, 255), (206, 24, 38)
# Jet, as matplotlib has it: where each channel bends, and its value there.
_JET = (
    ((0, 0.35, 0.66, 0.89, 1), (0, 0, 1, 1, 0.5)),
    ((0, 0.125, 0.375, 0.64, 0.91, 1), (0, 0, 1, 1, 0, 0)),
    ((0, 0.11, 0.34, 0.65, 1), (0.5, 1, 1, 0, 0)),
)
# An odd number, so that zero has a color of its own, and few enough for a palette.
_LEVELS = 255
_GAP, _MARGIN, _LINE, _TEXT = 8, 12, 18, 13


@dataclass(frozen=True, kw_only=True)
class Tile:
    """One picture of a panel and what stands under it."""

    image: RGB
    label: str = ""


def contribution_scale(maps: Tensor) -> float:
    """The contribution to draw in full color: give it to several maps to compare them."""
    return float(np.percentile(np.abs(_values(maps)), PERCENTILE))


def contribution_scales(maps: Tensor, *, joint: bool) -> list[float]:
    """The scale of each of several maps [n, H, W] of one method: its own, or one for all."""
    if joint:
        return [contribution_scale(maps)] * len(maps)
    return [contribution_scale(each) for each in maps]


def contribution_image(map: Tensor, scale: float | None = None) -> RGB:
    """Contributions [H, W] from blue (against) over white to red (for).

    Without ``scale`` the map is normalized on its own, at ± its 99.9th percentile.
    """
    return _colored(_strength(map, scale), -1, _BLUE_WHITE_RED)


def attention_image(map: Tensor, scale: float | None = None) -> RGB:
    """A map [H, W] without a negative side through jet, from 0 to its 99.9th percentile."""
    return _colored(_strength(map, scale), 0, _JET_COLORS)


def method_image(method: str, map: Tensor, scale: float | None = None) -> RGB:
    """A map [H, W] in the colors of its method."""
    draw = attention_image if METHODS.get(method).colormap == "jet" else contribution_image
    return draw(map, scale)


def overlay_image(
    photo: RGB, method: str, map: Tensor, scale: float | None = None, *, alpha: float = 0.75
) -> RGB:
    """A map [H, W] in its colors on the grayed photo, ``alpha`` opaque where it is strongest."""
    if photo.shape[:2] != map.shape:
        raise ValueError(
            f"A map of shape {list(map.shape)} does not lie on a photo of {list(photo.shape[:2])} "
            f"pixels; give both for the same picture."
        )
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha = {alpha} is not allowed: give 0 (photo alone) to 1.")
    # Colors of the photo's own would be taken for contributions.
    gray = (photo @ np.array([0.299, 0.587, 0.114]))[..., None]
    cover = alpha * np.abs(_strength(map, scale))[..., None]
    return np.rint((1 - cover) * gray + cover * method_image(method, map, scale)).astype(np.uint8)


def colors(found: Attribution, row: int) -> Tensor:
    """The color image [4, H, W] of one class's row of W(x).

    Opacity is smoothed over the same share of a picture whatever its size: 15 pixels of 224.
    """
    assert found.weights is not None
    smooth = max(1, round(SMOOTH * found.map.shape[-1] / 224))
    return color_image(found.weights[row], found.map[row], smooth=smooth)


def on_white(rgba: Tensor) -> RGB:
    """A color image [4, H, W] with values in [0, 1], laid on white."""
    values = rgba.detach().clamp(0, 1).double().cpu()
    return photo_image(values[3] * values[:3] + (1 - values[3]))


def gradient_css(method: str) -> str:
    """The colors of a method, lowest first, as the argument of CSS's ``linear-gradient``."""
    colors = _JET_COLORS if METHODS.get(method).colormap == "jet" else _BLUE_WHITE_RED
    stops = (
        colors[:: (_LEVELS - 1) // 8]
        if METHODS.get(method).colormap == "jet"
        else colors[:: _LEVELS // 2]
    )
    return ", ".join(f"rgb({r} {g} {b})" for r, g, b in stops)


def photo_image(image: Tensor) -> RGB:
    """An image [3, H, W] with values in [0, 1]."""
    bytes_ = image.detach().clamp(0, 1).mul(255).round().to(torch.uint8)
    return bytes_.permute(1, 2, 0).cpu().numpy()


def png_bytes(image: NDArray[np.uint8]) -> bytes:
    """RGB or RGBA [H, W, 3 or 4] as a PNG file, without loss."""
    height, width, channels = image.shape
    picture = Image.fromarray(image)
    if channels == 3:
        packed = image.astype(np.uint32) @ np.array([1 << 16, 1 << 8, 1], np.uint32)
        colors, indices = np.unique(packed, return_inverse=True)
        # A palette needs a third of the bytes, and maps have few colors.
        if len(colors) <= 256:
            picture = Image.fromarray(indices.reshape(height, width).astype(np.uint8))
            parts = np.stack([colors >> 16, colors >> 8 & 255, colors & 255], 1)
            picture.putpalette(parts.astype(np.uint8).tobytes())
    return _encoded(picture, format="PNG", optimize=True)


def photo_bytes(image: RGB) -> bytes:
    """A photo as a JPEG file, a fraction of a PNG's size; small ones without loss, as PNG."""
    if image.shape[1] <= COARSE:
        return png_bytes(image)
    return _encoded(Image.fromarray(image), format="JPEG", quality=90, subsampling=0)


def panel(rows: Sequence[Sequence[Tile]], *, cell: int = 192) -> Image.Image:
    """Tiles in rows on white, each scaled to ``cell`` pixels on its longer side."""
    if not rows or not all(rows):
        raise ValueError("A panel needs at least one row, and a tile in each.")
    font = _font()
    columns = max(len(row) for row in rows)
    line = _LINE if any(tile.label for row in rows for tile in row) else 0
    step_x, step_y = cell + _GAP, cell + line + _GAP
    size = (2 * _MARGIN + columns * step_x - _GAP, 2 * _MARGIN + len(rows) * step_y - _GAP)
    canvas = Image.new("RGB", size, "white")
    draw = ImageDraw.Draw(canvas)
    for y, row in enumerate(rows):
        for x, tile in enumerate(row):
            left, top = _MARGIN + x * step_x, _MARGIN + y * step_y
            picture = _scaled(tile.image, cell)
            canvas.paste(
                picture, (left + (cell - picture.width) // 2, top + (cell - picture.height) // 2)
            )
            text = _shortened(tile.label, cell, font)
            draw.text((left + cell / 2, top + cell + 3), text, "#333333", font, anchor="ma")
    return canvas


def _values(maps: Tensor) -> NDArray[np.float64]:
    if not maps.isfinite().all():
        raise ValueError("A map contains NaN or infinity, which have no color.")
    return maps.detach().double().cpu().numpy()


def _strength(map: Tensor, scale: float | None) -> NDArray[np.float64]:
    """Values [H, W] in units of the scale, from −1 to 1."""
    if map.ndim != 2:
        raise ValueError(f"A map of shape {list(map.shape)} is not a picture; give one [H, W].")
    values = _values(map)
    scale = contribution_scale(map) if scale is None else scale
    # A scale of zero is below whatever is not zero.
    return np.clip(values / scale, -1, 1) if scale > 0 else np.sign(values)


def _colored(strength: NDArray[np.float64], low: int, colors: RGB) -> RGB:
    """Strengths from ``low`` to 1 looked up in as many colors as there are levels."""
    share = (np.maximum(strength, low) - low) / (1 - low)
    return colors[np.rint(share * (_LEVELS - 1)).astype(np.intp)]


def _palette(*channels: tuple[Sequence[float], Sequence[float]]) -> RGB:
    share = np.linspace(0, 1, _LEVELS)
    return np.rint(255 * np.stack([np.interp(share, *each) for each in channels], 1)).astype(
        np.uint8
    )


_JET_COLORS = _palette(*_JET)
_BLUE_WHITE_RED = _palette(
    *(
        ((0, 0.5, 1), tuple(value / 255 for value in channel))
        for channel in zip(_BLUE, _WHITE, _RED, strict=True)
    )
)


def _encoded(picture: Image.Image, **options: Any) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, **options)
    return buffer.getvalue()


def _scaled(image: RGB, cell: int) -> Image.Image:
    picture = Image.fromarray(image)
    factor = cell / max(picture.size)
    size = (round(picture.width * factor), round(picture.height * factor))
    # Enlarged pixels stay visible as such: they are what was measured.
    how = Image.Resampling.NEAREST if factor > 1 else Image.Resampling.LANCZOS
    return picture.resize(size, how)


@cache
def _font() -> ImageFont.FreeTypeFont:
    """DejaVu Sans, which comes with matplotlib: Pillow's own knows neither é nor ×."""
    import matplotlib

    return ImageFont.truetype(Path(matplotlib.get_data_path(), "fonts/ttf/DejaVuSans.ttf"), _TEXT)


def _shortened(label: str, width: int, font: ImageFont.FreeTypeFont) -> str:
    if font.getlength(label) <= width:
        return label
    while label and font.getlength(label + "…") > width:
        label = label[:-1]
    return label + "…"
