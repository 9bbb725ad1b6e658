"""Pictures of explanations: maps and photos as RGB arrays, overlays and panels of labeled tiles.

Arrays are uint8 RGB [H, W, 3] throughout, so that any picture can be tiled with any other.

The conventions are the paper's: contributions go from blue over white to red, between ± the 99.9th
percentile of their absolute values, and attention maps, which are never negative, go through "jet"
from 0. Each map is normalized on its own, or jointly with those that it is compared with.
"""

import base64
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

from bcosvit.attribution import Attribution, Explainer, describe_method, method_title
from bcosvit.attribution.color import SMOOTH, color_image

RGB = NDArray[np.uint8]

PERCENTILE = 99.9
"""The percentile of absolute contributions that is drawn in full color."""

COARSE = 128
"""Pictures up to this width are shown enlarged, with visible pixels."""

# Matplotlib's own "bwr" has more saturated ends, on which text and lines are hard to see.
_BLUE_WHITE_RED = ("#2148c4", "#ffffff", "#ce1826")
# An odd number, so that zero has a color of its own, and few enough for a palette.
_LEVELS = 255
# Of the gray photo below an overlay: on black, dark red and blue would not be seen.
_FLOOR = 110
_GAP, _MARGIN = 8, 12


@dataclass(frozen=True, kw_only=True)
class Tile:
    """One picture of a panel and the label below it."""

    image: RGB
    label: str = ""


@dataclass(frozen=True, kw_only=True)
class Picture:
    """An encoded picture for a page."""

    data: bytes
    """A PNG or JPEG file."""
    alt: str
    """The text for readers who do not see the picture."""
    width: int
    height: int

    @classmethod
    def of(cls, image: RGB, alt: str, *, photo: bool = True) -> "Picture":
        """Encodes an array [H, W, 3].

        Args:
            image: The array.
            alt: The text for readers who do not see the picture.
            photo: Whether large pictures may be stored as JPEG; maps are stored without loss.

        Returns:
            The picture.
        """
        data = photo_bytes(image) if photo else png_bytes(image)
        return cls(data=data, alt=alt, width=image.shape[1], height=image.shape[0])

    @property
    def coarse(self) -> bool:
        """Whether pixels stay visible when the picture is enlarged: they were measured."""
        return self.width <= COARSE

    @property
    def source(self) -> str:
        """The file as a data URI."""
        kind = "png" if self.data.startswith(b"\x89PNG") else "jpeg"
        return f"data:image/{kind};base64,{base64.b64encode(self.data).decode('ascii')}"


@dataclass(frozen=True, kw_only=True)
class MapFigure:
    """A map with its title and color bar."""

    picture: Picture
    title: str
    gradient: str
    """The colors, as the arguments of CSS's ``linear-gradient``."""
    ends: tuple[str, ...]
    """The numbers below the color bar, lowest first."""


def contribution_scale(maps: Tensor) -> float:
    """Returns the value to draw in full color, the 99.9th percentile of absolute values.

    Args:
        maps: One map or several that are compared with each other.

    Raises:
        ValueError: If a map contains NaN or infinity.
    """
    return float(np.percentile(np.abs(_values(maps)), PERCENTILE))


def contribution_scales(maps: Tensor, *, joint: bool) -> list[float]:
    """Returns the scale of each of several maps [n, H, W]: its own, or one for all (``joint``)."""
    if joint:
        return [contribution_scale(maps)] * len(maps)
    return [contribution_scale(each) for each in maps]


def contribution_image(map: Tensor, scale: float | None = None) -> RGB:
    """Draws contributions from blue (against) over white to red (for).

    Args:
        map: Contributions [H, W].
        scale: The value to draw in full color; by default the map's own `contribution_scale`.

    Returns:
        The picture [H, W, 3].

    Raises:
        ValueError: If ``map`` is not two-dimensional and finite.

    Example:
        >>> import torch
        >>> contribution_image(torch.tensor([[-1.0, 0.0, 1.0]]), scale=1.0).tolist()
        [[[33, 72, 196], [255, 255, 255], [206, 24, 38]]]
    """
    return _colored(_strength(map, scale), Explainer)


def method_image(method: str, map: Tensor, scale: float | None = None) -> RGB:
    """Draws a map [H, W] with the color map of its method; see `contribution_image`."""
    return _colored(_strength(map, scale), describe_method(method))


def map_figure(method: str, map: Tensor, scale: float, class_name: str) -> MapFigure:
    """Draws a map with its title and color bar.

    Args:
        method: The method's name.
        map: The map [H, W].
        scale: The value that is drawn in full color.
        class_name: The class that the map explains.

    Returns:
        The figure, for the templates' macro ``map_figure``.
    """
    symmetric, title = _symmetric(describe_method(method)), method_title(method)
    meaning = "red for the class, blue against it" if symmetric else "from nothing, blue, to red"
    ends = (f"−{scale:.2g}", "0", f"+{scale:.2g}") if symmetric else ("0", f"{scale:.2g}")
    return MapFigure(
        picture=Picture.of(
            method_image(method, map, scale), f"{title} to {class_name}: {meaning}", photo=False
        ),
        title=title,
        gradient=gradient_css(method),
        ends=ends if scale > 0 else (_blank(method),),
    )


def _blank(method: str) -> str:
    why = describe_method(method).blank
    return f"zero everywhere: {why}" if why else "zero everywhere"


def overlay_image(
    photo: RGB, method: str, map: Tensor, scale: float | None = None, *, alpha: float = 0.75
) -> RGB:
    """Draws a map on the photo in gray, more opaque where the map is stronger.

    Args:
        photo: The photo [H, W, 3].
        method: The method's name.
        map: The map [H, W].
        scale: The value to draw in full color; by default the map's own.
        alpha: The opacity of full color, from 0 (the photo alone) to 1.

    Returns:
        The picture [H, W, 3].

    Raises:
        ValueError: If photo and map differ in size, or ``alpha`` is out of range.
    """
    if photo.shape[:2] != map.shape:
        raise ValueError(
            f"A map of shape {list(map.shape)} does not fit a photo of {list(photo.shape[:2])} "
            f"pixels; give both for the same picture."
        )
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha = {alpha} is not allowed: give 0 (photo alone) to 1.")
    # Gray, since the photo's own colors would be mistaken for contributions.
    gray = _FLOOR + (1 - _FLOOR / 255) * (photo @ np.array([0.299, 0.587, 0.114]))[..., None]
    strength = _strength(map, scale)
    cover = alpha * np.abs(strength)[..., None]
    if _symmetric(describe_method(method)):
        # In full color: a pale one that is almost transparent could not be seen.
        strength = np.sign(strength)
    color = _colored(strength, describe_method(method))
    return np.rint((1 - cover) * gray + cover * color).astype(np.uint8)


def colors(attribution: Attribution, row: int) -> Tensor:
    """Draws one class's row of W(x) in color.

    Args:
        attribution: An inherent explanation of several classes of one image.
        row: Which of the classes.

    Returns:
        RGBA [4, H, W] in [0, 1]. Opacity is smoothed over the same share of a picture at all
        sizes: 15 pixels of 224.
    """
    assert attribution.weights is not None
    smooth = max(1, round(SMOOTH * attribution.map.shape[-1] / 224))
    return color_image(attribution.weights[row], attribution.map[row], smooth=smooth)


def on_white(rgba: Tensor) -> RGB:
    """Draws RGBA [4, H, W] with values in [0, 1] on a white background."""
    values = rgba.detach().clamp(0, 1).double().cpu()
    return photo_image(values[3] * values[:3] + (1 - values[3]))


def weight_image(attribution: Attribution | None, row: int) -> RGB | None:
    """Draws `colors` on a white background; None where there is no row of W(x)."""
    if attribution is None or attribution.weights is None:
        return None
    return on_white(colors(attribution, row))


def gradient_css(method: str) -> str:
    """Returns a method's colors, lowest first, as the arguments of CSS's ``linear-gradient``."""
    explainer = describe_method(method)
    steps = 2 if explainer.colormap == "bwr" else 8
    stops = _palette(explainer.colormap)[:: _LEVELS // steps]
    return ", ".join(f"rgb({r} {g} {b})" for r, g, b in stops)


def photo_image(image: Tensor) -> RGB:
    """Converts an image [3 or 4, H, W] with values in [0, 1] to an array [H, W, 3 or 4]."""
    bytes_ = image.detach().clamp(0, 1).mul(255).round().to(torch.uint8)
    return bytes_.permute(1, 2, 0).cpu().numpy()


def png_bytes(image: NDArray[np.uint8]) -> bytes:
    """Encodes RGB or RGBA [H, W, 3 or 4] as a PNG file, without loss."""
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
    """Encodes a photo as a JPEG file, or as PNG where it is small."""
    if image.shape[1] <= COARSE:
        return png_bytes(image)
    return _encoded(Image.fromarray(image), format="JPEG", quality=90, subsampling=0)


def panel(rows: Sequence[Sequence[Tile]], *, cell: int = 192) -> Image.Image:
    """Draws tiles in rows on a white background.

    Args:
        rows: The tiles of each row.
        cell: The longer side of each tile in pixels; its picture is scaled to fit.

    Returns:
        The picture.

    Raises:
        ValueError: If there is no row, or a row without a tile.
    """
    if not rows or not all(rows):
        raise ValueError("A panel needs at least one row, and a tile in each.")
    text = max(13, cell // 13)
    font, line = _font(text), round(1.4 * text)
    labels = [[_lines(tile.label, cell, font) for tile in row] for row in rows]
    lines = max(len(each) for row in labels for each in row)
    columns = max(len(row) for row in rows)
    step_x, step_y = cell + _GAP, cell + lines * line + _GAP
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
            for place, part in enumerate(labels[y][x]):
                at = (left + cell / 2, top + cell + 3 + place * line)
                draw.text(at, part, "#333333", font, anchor="ma")
    return canvas


def _values(maps: Tensor) -> NDArray[np.float64]:
    if not maps.isfinite().all():
        raise ValueError("A map contains NaN or infinity, which have no color.")
    return maps.detach().double().cpu().numpy()


def _strength(map: Tensor, scale: float | None) -> NDArray[np.float64]:
    """Values [H, W] relative to the scale, from −1 to 1."""
    if map.ndim != 2:
        raise ValueError(f"A map of shape {list(map.shape)} is not a picture; give one [H, W].")
    values = _values(map)
    scale = contribution_scale(map) if scale is None else scale
    # With a scale of zero everything else is in full color.
    return np.clip(values / scale, -1, 1) if scale > 0 else np.sign(values)


def _symmetric(explainer: Explainer | type[Explainer]) -> bool:
    """Whether zero is in the middle of the color map, not at its lower end."""
    return explainer.signed or explainer.colormap == "bwr"


def _colored(strength: NDArray[np.float64], explainer: Explainer | type[Explainer]) -> RGB:
    low = -1 if _symmetric(explainer) else 0
    share = (np.maximum(strength, low) - low) / (1 - low)
    return _palette(explainer.colormap)[np.rint(share * (_LEVELS - 1)).astype(np.intp)]


@cache
def _palette(colormap: str) -> RGB:
    """The colors [levels, 3] of a matplotlib color map, lowest first."""
    import matplotlib
    from matplotlib.colors import Colormap, LinearSegmentedColormap

    if colormap == "bwr":
        found: Colormap = LinearSegmentedColormap.from_list("bwr", _BLUE_WHITE_RED, N=_LEVELS)
    else:
        found = matplotlib.colormaps[colormap].resampled(_LEVELS)
    return np.rint(255 * found(np.linspace(0, 1, _LEVELS))[:, :3]).astype(np.uint8)


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
def _font(size: int) -> ImageFont.FreeTypeFont:
    """DejaVu Sans, which comes with matplotlib: Pillow's own font has neither é nor ×."""
    import matplotlib

    return ImageFont.truetype(Path(matplotlib.get_data_path(), "fonts/ttf/DejaVuSans.ttf"), size)


def _lines(label: str, width: int, font: ImageFont.FreeTypeFont) -> list[str]:
    """A label in up to two lines, the second of which is shortened where it is too long."""
    if font.getlength(label) <= width:
        return [label] if label else []
    fits = next(n for n in range(len(label), 0, -1) if n == 1 or font.getlength(label[:n]) <= width)
    # Between two words, else within a long one.
    fits = label.rfind(" ", 0, fits + 1) if " " in label[: fits + 1] else fits
    first, rest = label[:fits], label[fits:].strip()
    if font.getlength(rest) > width:
        while rest and font.getlength(rest + "…") > width:
            rest = rest[:-1]
        rest += "…"
    return [first, rest]
