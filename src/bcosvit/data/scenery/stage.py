"""The stage: one picture in the making, with one sun, one sky and the shadows they cast.

Shapes: S the picture's side, N the side drawn at (2S for small pictures, else S), H, W a window.

A thing is put on the stage from two parts: an outline (a signed distance) and a dress (what its
surface looks like). From the distance come the soft-edged coverage, the cast shadow and the dark
line of contact; from the dress's height field come the normals, and with them the light.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from bcosvit.data.scenery.dice import Dice
from bcosvit.data.scenery.fields import Plane, clamp, ink, noise, step, unit_vector

__all__ = ["Dress", "Light", "Outline", "Patch", "Pose", "Stage", "Surface"]

# Below this size edges and textures are drawn at twice the resolution; above, each pixel is fine
# enough for the analytic edges alone, and drawing is four times as fast.
FINE = 160
EXPOSURE = 1.3


@dataclass(frozen=True)
class Light:
    """A sun in direction (x, y, z), z towards the viewer, and a sky; colors [3,1,1]."""

    x: float
    y: float
    z: float
    sun: Plane
    sky: Plane

    @classmethod
    def roll(cls, dice: Dice) -> "Light":
        c, s = unit_vector(dice.between(0, 1))
        z = dice.between(0.5, 0.78)
        flat = math.sqrt(1 - z * z)
        warmth = dice.between(-0.6, 1)
        sun = ink(0.1 if warmth > 0 else 0.6, 0.16 * abs(warmth), 1.0) * dice.between(0.85, 1.1)
        sky = ink(0.6, dice.between(0.08, 0.28), 0.62)
        return cls(c * flat, s * flat, z, sun, sky)


@dataclass(frozen=True)
class Patch:
    """Where a dress is evaluated: pixels in the thing's own units.

    `u`, `v` turn with the thing, `x`, `y` don't: isotropic noise need not turn, and is far cheaper
    on rows and columns.
    """

    u: Plane
    v: Plane
    x: Plane
    y: Plane
    pitch: float
    lattice: Plane

    def noise(self, frequency: float, offset: float) -> Plane:
        return noise(self.lattice, self.x * frequency + offset, self.y * frequency + offset * 1.7)

    def edge(self, distance: Plane) -> Plane:
        """Coverage of a drawn edge: a ramp one pixel wide."""
        return clamp(0.5 - distance * (1 / self.pitch))


@dataclass(frozen=True)
class Surface:
    """What a thing looks like: height [H,W] in its own units, color [3,H,W], and its gloss."""

    height: Plane
    color: Plane
    gloss: float = 0.2
    polish: int = 4
    """The highlight's exponent is two to this power."""


Outline = Callable[[Plane, Plane], Plane]
Dress = Callable[[Patch, Plane], Surface]


@dataclass(frozen=True)
class Pose:
    """Where a thing lies, how large one of its units is, and how far it is turned."""

    x: float
    y: float
    unit: float
    turn: float


@lru_cache(maxsize=8)
def _axis(n: int) -> Plane:
    """The centers of n pixels; shared by all pictures of a size, so nobody may write to it."""
    axis: Plane = (np.arange(n, dtype=np.float32) + 0.5) * (1 / n)
    axis.flags.writeable = False
    return axis


def _slopes(height: Plane, pitch: float) -> tuple[Plane, Plane]:
    dx, dy = np.zeros_like(height), np.zeros_like(height)
    scale = 0.5 / pitch
    np.subtract(height[:, 2:], height[:, :-2], out=dx[:, 1:-1])
    np.subtract(height[2:], height[:-2], out=dy[1:-1])
    return dx * scale, dy * scale


def _shade(surface: Surface, pitch: float, light: Light) -> Plane:
    """Diffuse sun, hemispherical sky, a highlight and a grazing sheen."""
    # One float64 constant array in a dress would double the cost of all that follows.
    assert surface.height.dtype == surface.color.dtype == np.float32
    dx, dy = _slopes(surface.height, pitch)
    nz = 1 / np.sqrt(dx * dx + dy * dy + 1)
    facing = (light.z - dx * light.x - dy * light.y) * nz
    half = math.sqrt(2 * (1 + light.z))
    glint = clamp((light.z + 1 - dx * light.x - dy * light.y) * nz * (1 / half))
    for _ in range(surface.polish):
        glint = glint * glint
    sky = 0.35 + 0.65 * nz
    lit = surface.color * (light.sky * sky + light.sun * np.maximum(facing, 0))
    graze = 1 - nz
    return lit + light.sun * (glint * surface.gloss) + light.sky * (graze * graze * surface.gloss)


class Stage:
    """A picture in the making; `coverages` holds what is still seen of each tracked thing."""

    def __init__(self, size: int, light: Light, lattice: Plane) -> None:
        self.samples = 2 if size < FINE else 1
        self.n = size * self.samples
        self.light = light
        self.lattice = lattice
        self.x = self.y = _axis(self.n)
        self.color: Plane = np.zeros((3, self.n, self.n), dtype=np.float32)
        self.coverages: list[Plane] = []

    def octave(self, fx: float, fy: float, offset: float) -> Plane:
        """Noise over the whole picture; what is finer than the pixels fades out."""
        fade = min(max(2 - 4 * max(fx, fy) / self.n, 0.0), 1.0)
        if fade == 0:
            return np.zeros((self.n, self.n), dtype=np.float32)
        return noise(self.lattice, self.x * fx + offset, self.y * fy + offset * 1.7) * fade

    def lay(self, height: Plane, color: Plane) -> None:
        """Cover the stage with a ground of this height [N,N] (in sides) and color [3,N,N]."""
        dx, dy = _slopes(height, 1 / self.n)
        facing = np.clip(self.light.z - dx * self.light.x - dy * self.light.y, 0.12, 1.6)
        self.color = color * (self.light.sky + self.light.sun * facing)

    def place(
        self,
        outline: Outline,
        dress: Dress,
        pose: Pose,
        reach: float,
        lift: float,
        track: bool = False,
    ) -> None:
        """Put a thing, whose center must be in the picture, on top of what is there.

        `reach` bounds its outline and `lift` is its height above the ground, both in its own units.
        """
        throw = lift * 0.75 / self.light.z
        sx, sy = -self.light.x * throw, -self.light.y * throw
        soft = 0.1 + 0.16 * lift
        rows, inner_rows = self._span(pose.y, pose.unit, reach + 0.05, sy, soft)
        columns, inner_columns = self._span(pose.x, pose.unit, reach + 0.05, sx, soft)
        x = (self.x[columns] - pose.x) * (1 / pose.unit)
        y = (self.y[rows] - pose.y) * (1 / pose.unit)
        c, s = unit_vector(pose.turn)
        u, v = x * c + (y * s)[:, None], x * -s + (y * c)[:, None]
        pitch = 1 / (self.n * pose.unit)

        # The shadow falls on a larger window than the thing covers.
        distance = outline(u, v)
        ground = self.color[:, rows, columns]
        ground *= 1 - _shadow(distance, sx / pitch, sy / pitch, soft) * _SHADOW_TINT

        inner = (inner_rows, inner_columns)
        distance = distance[inner]
        patch = Patch(u[inner], v[inner], x[inner_columns], y[inner_rows], pitch, self.lattice)
        alpha = patch.edge(distance)
        lit = _shade(dress(patch, distance), pitch, self.light)
        ground = ground[:, inner_rows, inner_columns]
        ground += alpha * (lit - ground)

        for coverage in self.coverages:
            coverage[rows, columns][inner] *= 1 - alpha
        if track:
            coverage = np.zeros((self.n, self.n), dtype=np.float32)
            coverage[rows, columns][inner] = alpha
            self.coverages.append(coverage)

    def _span(
        self, center: float, unit: float, margin: float, throw: float, soft: float
    ) -> tuple[slice, slice]:
        """The pixels a thing and its shadow touch along one axis, and the thing's among them."""
        low = max(math.floor((center - margin * unit) * self.n), 0)
        high = min(math.ceil((center + margin * unit) * self.n), self.n)
        first = max(math.floor((center - (margin + soft - min(throw, 0)) * unit) * self.n), 0)
        last = min(math.ceil((center + (margin + soft + max(throw, 0)) * unit) * self.n), self.n)
        return slice(first, last), slice(max(low - first, 0), max(high - first, 0))

    def seen(self, number: int) -> NDArray[np.bool_]:
        """The pixels [S,S] of which the tracked thing covers at least half."""
        covered: NDArray[np.bool_] = self._pooled(self.coverages[number]) >= 0.5
        return covered

    def finish(self, vignette: float, dapple: float, offset: float) -> NDArray[np.uint8]:
        """Pool the light, darken the corners, and develop to bytes [S,S,3]."""
        color = self._pooled(self.color)
        axis = _axis(color.shape[-1])
        pool = noise(self.lattice, axis * 2.6 + offset, axis * 2.6 + offset * 1.3)
        off = axis * 2 - 1
        radius = off * off + (off * off)[:, None]
        color = color * (EXPOSURE * (1 + dapple * pool) * (1 - vignette * radius))
        # A shoulder that keeps highlights from clipping, then the display's gamma, taken as 2.
        color = np.sqrt(np.maximum(color, 0) / (1 + 0.28 * color))
        pixels = np.clip(np.floor(color * 255 + 0.5), 0, 255).astype(np.uint8)
        return np.ascontiguousarray(pixels.transpose(1, 2, 0))

    def _pooled(self, planes: Plane) -> Plane:
        """Average the samples of each pixel: [..., N, N] to [..., S, S]."""
        if self.samples == 1:
            return planes
        even, odd = planes[..., ::2, :], planes[..., 1::2, :]
        rows = even + odd
        return (rows[..., ::2] + rows[..., 1::2]) * 0.25


# Skylight still reaches a shadow, so that it is blue rather than black.
_SHADOW_TINT = np.array([0.68, 0.62, 0.54], dtype=np.float32).reshape(3, 1, 1)


def _shadow(distance: Plane, sx: float, sy: float, soft: float) -> Plane:
    """How much light a thing takes from the ground: by contact, and by the sun's shadow.

    The thing stands between its foot and its top: its shadow is the union of its outline moved
    part of the way and all of the way.
    """
    near = clamp(1 - distance * (1 / 0.22))
    total = near * near * 0.45
    for fraction, blur in ((0.45, soft * 0.6), (1.0, soft)):
        moved = _shifted(distance, round(sx * fraction), round(sy * fraction))
        np.maximum(total, step(blur, -blur, moved), out=total)
    return total


def _shifted(plane: Plane, dx: int, dy: int) -> Plane:
    """The plane moved by whole pixels; at the border it goes on as it ends."""
    rows, columns = plane.shape
    row = np.minimum(np.maximum(np.arange(rows) - dy, 0), rows - 1)
    column = np.minimum(np.maximum(np.arange(columns) - dx, 0), columns - 1)
    return plane.take(row, axis=0).take(column, axis=1)
