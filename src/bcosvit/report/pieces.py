"""What every page about explanations has: a method's map with its scale, and numbers for people."""

from collections.abc import Callable

from torch import Tensor

from bcosvit.attribution import METHODS, method_title
from bcosvit.report.figures import gradient_css, method_image, png_bytes
from bcosvit.report.html import Html, element, figure, picture, scale, text

Frame = Callable[[bytes, str, tuple[int, int]], Html]
"""Puts the bytes of a picture, its text and its size on a page."""


def map_figure(method: str, map: Tensor, full: float, name: str, frame: Frame = picture) -> Html:
    """A method's map [H, W] for a class with its scale; ``full`` is drawn in full color."""
    image = method_image(method, map, full)
    jet = METHODS.get(method).colormap == "jet"
    meaning = "from blue, nothing, to red" if jet else "red for the class, blue against it"
    ends = ("0", f"{full:.2g}") if jet else (f"−{full:.2g}", "0", f"+{full:.2g}")
    alt = f"{method_title(method)} to {name}: {meaning}"
    return figure(
        frame(png_bytes(image), alt, (image.shape[1], image.shape[0])),
        element("b", text(method_title(method))),
        scale(gradient_css(method), ends if full > 0 else ("zero everywhere",)),
    )


def percent(share: float) -> str:
    """``93.1 %``, and no false zero."""
    return "< 0.1 %" if 0 < share < 0.0005 else f"{100 * share:.1f} %"


def signed(value: float) -> str:
    """With a sign that is as wide as a plus."""
    return f"{value:+.4f}".replace("-", "−")
