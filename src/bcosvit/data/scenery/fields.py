"""Arithmetic on planes of pixels: waves, edges, noise and signed distances.

Shapes: H, W the rows and columns of a patch of pixels; N the side of the noise lattice.

Only exactly rounded operations are used (see the package's docstring), which is why there is a
`wave` where one expects `np.sin`, and `turns` where one expects `np.arctan2`. Distances are
negative inside a shape.
"""

import math
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "Plane",
    "capsule",
    "clamp",
    "ellipse",
    "ink",
    "length",
    "mix",
    "noise",
    "smooth_max",
    "smooth_min",
    "step",
    "turns",
    "unit_vector",
    "wave",
]

# Always float32. numpy's stubs, unlike numpy, make float64 of a plane minus a Python float.
Plane: TypeAlias = NDArray[Any]


def ink(hue: float, saturation: float, value: float) -> Plane:
    """The linear light [3,1,1] of a screen color; hue in turns (0 red, 1/3 green, 2/3 blue)."""
    channels = []
    for offset in (0.0, 2 / 3, 1 / 3):
        position = (hue + offset) % 1.0 * 6
        ramp = min(max(abs(position - 3) - 1, 0.0), 1.0)
        level = value * (1 - saturation * (1 - ramp))
        channels.append(level * level)
    return np.array(channels, dtype=np.float32).reshape(3, 1, 1)


def unit_vector(turn: float) -> tuple[float, float]:
    """Cosine and sine of an angle in turns: exactly of length one, the angle right to 0.1 %."""
    pair = []
    for t in (turn + 0.25, turn):
        t -= math.floor(t + 0.5)
        y = t * (8 - 16 * abs(t))
        pair.append(y * (0.775 + 0.225 * abs(y)))
    norm = math.sqrt(pair[0] * pair[0] + pair[1] * pair[1])
    return pair[0] / norm, pair[1] / norm


def wave(t: Plane) -> Plane:
    """sin(2πt), right to 0.1 %."""
    t = t - np.floor(t + 0.5)
    y = t * (8 - 16 * np.abs(t))
    return y * (0.775 + 0.225 * np.abs(y))


def turns(x: Plane, y: Plane) -> Plane:
    """The angle of (x, y) in turns, in [0, 1], right to 0.1 %."""
    ax, ay = np.abs(x), np.abs(y)
    ratio = np.minimum(ax, ay) / (np.maximum(ax, ay) + 1e-9)
    angle = ratio * (0.16845 - 0.04345 * ratio)
    angle = np.where(ay > ax, 0.25 - angle, angle)
    angle = np.where(x < 0, 0.5 - angle, angle)
    return np.where(y < 0, 1 - angle, angle)


def length(x: Plane, y: Plane) -> Plane:
    return np.sqrt(x * x + y * y)


def clamp(x: Plane) -> Plane:
    """Between 0 and 1; `np.clip` costs three times as much on a small patch."""
    return np.minimum(np.maximum(x, 0), 1)


def step(low: float, high: float, x: Plane) -> Plane:
    """Rises smoothly from 0 at `low` to 1 at `high`; falls where `low` is the greater."""
    t = clamp((x - low) * (1 / (high - low)))
    return t * t * (3 - 2 * t)


def mix(a: Plane, b: Plane, t: Plane) -> Plane:
    return a + (b - a) * t


def smooth_min(a: Plane, b: Plane, width: float) -> Plane:
    """The union of two distances, with the crease filled over `width`."""
    gap = np.maximum(width - np.abs(a - b), 0)
    return np.minimum(a, b) - gap * gap * (0.25 / width)


def smooth_max(a: Plane, b: Plane, width: float) -> Plane:
    """The intersection of two distances, with the corner rounded over `width`."""
    gap = np.maximum(width - np.abs(a - b), 0)
    return np.maximum(a, b) + gap * gap * (0.25 / width)


def ellipse(u: Plane, v: Plane, a: float, b: float) -> Plane:
    """Distance to an ellipse of half-axes a and b, to first order; exact on the rim."""
    p, q = u * (1 / a), v * (1 / b)
    radius = length(p, q)
    slope = length(p * (1 / a), q * (1 / b))
    return radius * (radius - 1) / (slope + 1e-6)


def capsule(
    u: Plane, v: Plane, start: tuple[float, float], end: tuple[float, float], r0: float, r1: float
) -> Plane:
    """Distance to a stroke whose half-width goes from r0 at `start` to r1 at `end`."""
    du, dv = end[0] - start[0], end[1] - start[1]
    along = ((u - start[0]) * du + (v - start[1]) * dv) * (1 / (du * du + dv * dv))
    along = clamp(along)
    across = length(u - (start[0] + along * du), v - (start[1] + along * dv))
    return across - (r0 + (r1 - r0) * along)


def _blend(table: Plane, position: Plane, axis: int) -> Plane:
    """Cubic B-spline interpolation of a periodic table along one axis."""
    whole = np.floor(position)
    f = position - whole
    index = whole.astype(np.intp)
    g = 1 - f
    weights = (
        g * g * g * (1 / 6),
        (4 - 3 * f * f * (2 - f)) * (1 / 6),
        (4 - 3 * g * g * (2 - g)) * (1 / 6),
        f * f * f * (1 / 6),
    )
    shape = (-1, 1) if axis == 0 else (1, -1)
    total = None
    for tap, weight in enumerate(weights, start=-1):
        part = np.take(table, (index + tap) % table.shape[axis], axis=axis)
        part *= weight.reshape(shape)
        total = part if total is None else np.add(total, part, out=total)
    assert total is not None
    return total


def noise(lattice: Plane, x: Plane, y: Plane) -> Plane:
    """Smooth noise [H,W] of deviation near 0.5 at positions x [W], y [H], in cells of the lattice.

    Rows, then columns: a patch is axis-aligned, so that four taps an axis do the work of sixteen.
    """
    return _blend(_blend(lattice, y, 0), x, 1) * 3.6 - 1.8
