"""A small software renderer for the drawn scenes, in NumPy alone.

Two rules make a scene the same bits on every machine. Random numbers are derived from the raw
output of PCG64, because NumPy may change its distributions. Pixels come from operations that
IEEE 754 rounds exactly (+ - × ÷ √, comparisons, rounding); functions whose last bit depends on the
processor are replaced by polynomials: `wave` stands for a sine and `turns` for ``np.arctan2``.

Lengths are fractions of the image's side, x to the right and y down, so that a scene is the same at
every size. Angles are in turns. Distances to an outline are negative inside. Colors are linear
light. Shapes: S is the side of the image, N the side at which it is drawn, H and W a window of it.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

T = TypeVar("T")

# Always float32. NumPy's stubs, unlike NumPy, make float64 of a plane minus a Python float.
Plane: TypeAlias = NDArray[Any]

# Smaller images are drawn at twice their size, which makes edges and textures smooth.
FINE = 160
EXPOSURE = 1.3
# Skylight still reaches a shadow, so that it is blue rather than black.
SHADOW_TINT = np.array([0.68, 0.62, 0.54], dtype=np.float32).reshape(3, 1, 1)


class Random:
    """A stream of random numbers that is determined by a tuple of integers."""

    def __init__(self, *key: int) -> None:
        self._generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence(key)))

    def __call__(self, low: float = 0.0, high: float = 1.0) -> float:
        return low + (high - low) * self._generator.random()

    def integer(self, count: int) -> int:
        return int(self._generator.random() * count)

    def choice(self, options: Sequence[T]) -> T:
        return options[self.integer(len(options))]

    def table(self, *shape: int) -> Plane:
        return self._generator.random(shape).astype(np.float32)

    def color(self, *hsv: float | tuple[float, float]) -> Plane:
        """The linear light [3,1,1] of hue, saturation and value, each a number or a range."""
        hue, saturation, value = (self(*x) if isinstance(x, tuple) else x for x in hsv)
        ramps = (abs((hue + offset) % 1.0 * 6 - 3) - 1 for offset in (0.0, 2 / 3, 1 / 3))
        levels = [value * (1 - saturation * (1 - min(max(ramp, 0.0), 1.0))) for ramp in ramps]
        return np.array([level * level for level in levels], dtype=np.float32).reshape(3, 1, 1)


def wave(t: Plane) -> Plane:
    """sin(2πt), with an error of 0.1 %."""
    t = t - np.floor(t + 0.5)
    y = t * (8 - 16 * np.abs(t))
    return y * (0.775 + 0.225 * np.abs(y))


def turns(x: Plane, y: Plane) -> Plane:
    """The angle of (x, y) in [0, 1], with an error of 0.1 %."""
    ax, ay = np.abs(x), np.abs(y)
    ratio = np.minimum(ax, ay) / (np.maximum(ax, ay) + 1e-9)
    angle = ratio * (0.16845 - 0.04345 * ratio)
    angle = np.where(ay > ax, 0.25 - angle, angle)
    angle = np.where(x < 0, 0.5 - angle, angle)
    return np.where(y < 0, 1 - angle, angle)


def unit_vector(turn: float) -> tuple[float, float]:
    """Cosine and sine of an angle; its length is exactly 1."""
    x, y = (float(value) for value in wave(np.array([turn + 0.25, turn])))
    norm = math.sqrt(x * x + y * y)
    return x / norm, y / norm


def rotate(x: Plane, y: Plane, c: float, s: float) -> tuple[Plane, Plane]:
    return x * c + y * s, y * c - x * s


def frac(x: Plane) -> Plane:
    return x - np.floor(x)


def length(x: Plane, y: Plane) -> Plane:
    return np.sqrt(x * x + y * y)


def clamp(x: Plane) -> Plane:
    """Between 0 and 1; `np.clip` takes three times as long on a small window."""
    return np.minimum(np.maximum(x, 0), 1)


def step(low: float, high: float, x: Plane) -> Plane:
    """Rises smoothly from 0 at `low` to 1 at `high`; falls if `low` is the greater one."""
    t = clamp((x - low) * (1 / (high - low)))
    return t * t * (3 - 2 * t)


def mix(a: Plane, b: Plane, t: Plane) -> Plane:
    return a + (b - a) * t


def noise(lattice: Plane, x: Plane, y: Plane) -> Plane:
    """Smooth noise [H,W] at positions x [W], y [H] on a periodic lattice, as a cubic B-spline."""
    for position, axis in ((y, 0), (x, 1)):
        whole = np.floor(position)
        f = position - whole
        g, index = 1 - f, whole.astype(np.intp)
        near, far = (4 - 3 * f * f * (2 - f)) * (1 / 6), (4 - 3 * g * g * (2 - g)) * (1 / 6)
        weights = (g * g * g * (1 / 6), near, far, f * f * f * (1 / 6))
        total = None
        for tap, weight in enumerate(weights, start=-1):
            part = np.take(lattice, index + tap, axis=axis, mode="wrap")
            part *= weight if axis else weight[:, None]
            total = part if total is None else np.add(total, part, out=total)
        assert total is not None
        lattice = total
    return lattice * 3.6 - 1.8


class Pose(NamedTuple):
    """Where an object is, the size of its unit, and its angle."""

    x: float
    y: float
    unit: float
    turn: float


class Canvas:
    """An image that is being drawn, lit by a sun and a sky."""

    def __init__(self, size: int, random: Random) -> None:
        self.samples = 2 if size < FINE else 1
        self.n = size * self.samples
        self.axis = _centers(self.n)
        self.random = random
        c, s = unit_vector(random())
        z = random(0.5, 0.78)
        flat = math.sqrt(1 - z * z)
        self.light = c * flat, s * flat, z
        warmth = random(-0.6, 1)
        self.sun = random.color(0.1 if warmth > 0 else 0.6, 0.16 * abs(warmth), 1.0)
        self.sun = self.sun * random(0.85, 1.1)
        self.sky = random.color(0.6, (0.08, 0.28), 0.62)
        self.lattice = random.table(64, 64)
        self.color: Plane = np.zeros((3, self.n, self.n), dtype=np.float32)
        self.coverages: list[Plane] = []
        """[N,N], how much is visible of each tracked object."""

    def noise(self, fx: float, fy: float | None = None, offset: float | None = None) -> Plane:
        """Noise [N,N] with a random offset by default; what is finer than the pixels fades out."""
        fy = fx if fy is None else fy
        offset = self.random(0, 60) if offset is None else offset
        fade = min(max(2 - 4 * max(fx, fy) / self.n, 0.0), 1.0)
        if fade == 0:
            return np.zeros((self.n, self.n), dtype=np.float32)
        return noise(self.lattice, self.axis * fx + offset, self.axis * fy + offset * 1.7) * fade

    def fill(self, height: Plane, color: Plane) -> None:
        """Draws a background of a height [N,N] and a color [3,N,N]."""
        x, y, z = self.light
        dx, dy = _slopes(height, 1 / self.n)
        self.color = color * (self.sky + self.sun * np.clip(z - dx * x - dy * y, 0.12, 1.6))

    def visible(self) -> list[NDArray[np.bool_]]:
        """For each tracked object, the pixels [S,S] of which it covers at least half."""
        return [self._pooled(coverage) >= 0.5 for coverage in self.coverages]

    def finish(self, vignette: float, dapple: float, offset: float) -> NDArray[np.uint8]:
        """Returns the image [S,S,3] with dark corners and patches of light."""
        color = self._pooled(self.color)
        axis = _centers(color.shape[-1])
        pool = noise(self.lattice, axis * 2.6 + offset, axis * 2.6 + offset * 1.3)
        off = axis * 2 - 1
        radius = off * off + (off * off)[:, None]
        color = color * (EXPOSURE * (1 + dapple * pool) * (1 - vignette * radius))
        # A shoulder that keeps highlights from clipping, then the display's gamma, taken as 2.
        color = np.sqrt(np.maximum(color, 0) / (1 + 0.28 * color))
        pixels = np.clip(np.floor(color * 255 + 0.5), 0, 255).astype(np.uint8)
        return np.ascontiguousarray(pixels.transpose(1, 2, 0))

    def _pooled(self, planes: Plane) -> Plane:
        """Averages the samples of each pixel: [..., N, N] to [..., S, S]."""
        if self.samples == 1:
            return planes
        rows = planes[..., ::2, :] + planes[..., 1::2, :]
        return (rows[..., ::2] + rows[..., 1::2]) * 0.25


class Window:
    """The pixels [H,W] of an object, which is drawn over everything so far.

    An object is drawn from a distance to its outline, which gives its soft edge and its shadow, and
    from its height, which gives the normals. Coordinates are in the object's own units: `u` and `v`
    rotate with it; `x` [W] and `y` [H] do not, which makes noise cheap.

    Args:
        canvas: The image.
        pose: Where the object is.
        reach: A bound of its outline, in its own units.
        lift: Its height above the background, which lengthens its shadow.
        track: Whether the canvas keeps how much of it is visible.
    """

    def __init__(
        self, canvas: Canvas, pose: Pose, reach: float, lift: float, track: bool = False
    ) -> None:
        self.canvas, self.track = canvas, track
        self.pitch = 1 / (canvas.n * pose.unit)
        throw = lift * 0.75 / canvas.light[2]
        self.shadow = -canvas.light[0] * throw, -canvas.light[1] * throw
        self.soft = 0.1 + 0.16 * lift
        columns, inner_columns = self._span(pose.x, pose.unit, reach + 0.05, self.shadow[0])
        rows, inner_rows = self._span(pose.y, pose.unit, reach + 0.05, self.shadow[1])
        self.window, self.inner = (..., rows, columns), (..., inner_rows, inner_columns)
        self.x = (canvas.axis[columns] - pose.x) * (1 / pose.unit)
        self.y = (canvas.axis[rows] - pose.y) * (1 / pose.unit)
        c, s = unit_vector(pose.turn)
        self.u = self.x * c + (self.y * s)[:, None]
        self.v = self.x * -s + (self.y * c)[:, None]

    def _span(self, center: float, unit: float, margin: float, throw: float) -> tuple[slice, slice]:
        """The pixels of an object and its shadow along one axis, and the object's among them."""

        def pixels(before: float, after: float) -> tuple[int, int]:
            n = self.canvas.n
            low, high = (center - before * unit) * n, (center + after * unit) * n
            return max(math.floor(low), 0), min(math.ceil(high), n)

        low, high = pixels(margin, margin)
        outer = margin + self.soft
        first, last = pixels(outer - min(throw, 0), outer + max(throw, 0))
        return slice(first, last), slice(max(low - first, 0), max(high - first, 0))

    def cut(self, distance: Plane) -> Plane:
        """Draws the shadow of an outline and leaves only the pixels that the object can cover.

        The background is dark where the object touches it. The sun's shadow is the outline, moved
        part of the way for the object's foot and all of the way for its top.
        """
        near = clamp(1 - distance * (1 / 0.22))
        shade = near * near * 0.45
        dx, dy = (offset / self.pitch for offset in self.shadow)
        rows, columns = (np.arange(count) for count in distance.shape)
        for fraction, blur in ((0.45, self.soft * 0.6), (1.0, self.soft)):
            moved = distance.take(rows - round(dy * fraction), axis=0, mode="clip")
            moved = moved.take(columns - round(dx * fraction), axis=1, mode="clip")
            np.maximum(shade, step(blur, -blur, moved), out=shade)
        self.canvas.color[self.window] *= 1 - shade * SHADOW_TINT

        self.u, self.v, distance = self.u[self.inner], self.v[self.inner], distance[self.inner]
        self.x, self.y = self.x[self.inner[2]], self.y[self.inner[1]]
        self.alpha = self.edge(distance)
        return distance

    def noise(self, frequency: float, offset: float) -> Plane:
        x, y = self.x * frequency + offset, self.y * frequency + offset * 1.7
        return noise(self.canvas.lattice, x, y)

    def edge(self, distance: Plane) -> Plane:
        """The share of each pixel that is inside of an outline: a ramp of one pixel."""
        return clamp(0.5 - distance * (1 / self.pitch))

    def paint(self, color: Plane, other: Plane, distance: Plane) -> Plane:
        """The first color outside of an outline and the other one inside."""
        return mix(color, other, self.edge(distance))

    def draw(self, height: Plane, color: Plane, gloss: float = 0.2, polish: int = 4) -> None:
        """Draws a surface with diffuse sun, hemispherical sky, a highlight and a grazing sheen.

        Args:
            height: [H,W], in the object's own units.
            color: [3,H,W].
            gloss: The strength of the highlight.
            polish: The exponent of the highlight is two to this power.
        """
        # One float64 constant in a texture would double the cost of all that follows.
        assert height.dtype == color.dtype == np.float32
        (x, y, z), sun, sky = self.canvas.light, self.canvas.sun, self.canvas.sky
        dx, dy = _slopes(height, self.pitch)
        nz = 1 / np.sqrt(dx * dx + dy * dy + 1)
        facing = np.maximum((z - dx * x - dy * y) * nz, 0)
        glint = clamp((z + 1 - dx * x - dy * y) * nz * (1 / math.sqrt(2 * (1 + z))))
        for _ in range(polish):
            glint = glint * glint
        graze = 1 - nz
        lit = color * (sky * (0.35 + 0.65 * nz) + sun * facing)
        lit = lit + sun * (glint * gloss) + sky * (graze * graze * gloss)
        below = self.canvas.color[self.window][self.inner]
        below += self.alpha * (lit - below)

        coverages = self.canvas.coverages
        for coverage in coverages:
            coverage[self.window][self.inner] *= 1 - self.alpha
        if self.track:
            coverages.append(np.zeros((self.canvas.n, self.canvas.n), dtype=np.float32))
            coverages[-1][self.window][self.inner] = self.alpha


def _centers(n: int) -> Plane:
    """The centers of n pixels."""
    return (np.arange(n, dtype=np.float32) + 0.5) * (1 / n)


def _slopes(height: Plane, pitch: float) -> tuple[Plane, Plane]:
    dx, dy = np.zeros_like(height), np.zeros_like(height)
    dx[:, 1:-1] = (height[:, 2:] - height[:, :-2]) * (0.5 / pitch)
    dy[1:-1] = (height[2:] - height[:-2]) * (0.5 / pitch)
    return dx, dy
