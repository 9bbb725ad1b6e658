"""What lies on the background: the eight kinds of objects, clutter, and the tag of `cue`.

An outline is drawn in units of its own, about as large as the unit disc, and differs from the
others without any help of color or texture. A texture draws its random colors and details first, so
that no two objects of a kind are alike. Clutter (pebbles, twigs, leaves, tufts of grass) belongs to
no class.
"""

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import numpy as np

from bcosvit.data.scenes.render import (
    Canvas,
    Plane,
    Pose,
    Random,
    Window,
    clamp,
    frac,
    length,
    mix,
    rotate,
    step,
    turns,
    unit_vector,
    wave,
)

Point: TypeAlias = tuple[float, float]


# Shapes: signed distances and heights


def ellipse(u: Plane, v: Plane, a: float, b: float) -> Plane:
    """The distance to an ellipse of half-axes a and b, to first order."""
    p, q = u * (1 / a), v * (1 / b)
    radius = length(p, q)
    return radius * (radius - 1) / (length(p * (1 / a), q * (1 / b)) + 1e-6)


def stroke(u: Plane, v: Plane, start: Point, end: Point, r0: float, r1: float) -> Plane:
    """The distance to a line whose half-width goes from r0 at `start` to r1 at `end`."""
    du, dv = end[0] - start[0], end[1] - start[1]
    along = clamp(((u - start[0]) * du + (v - start[1]) * dv) * (1 / (du * du + dv * dv)))
    across = length(u - (start[0] + along * du), v - (start[1] + along * dv))
    return across - (r0 + (r1 - r0) * along)


def union(*distances: Plane, smooth: float = 0.0) -> Plane:
    """The union of shapes; the crease between two of them may be filled over a width."""
    nearest: Plane = np.minimum.reduce(distances)
    if not smooth:
        return nearest
    gap = np.maximum(smooth - np.abs(distances[0] - distances[1]), 0)
    return nearest - gap * gap * (0.25 / smooth)


def dome(distance: Plane, width: float) -> Plane:
    """The height of a rim that is rounded over `width` and flat further inside."""
    t = clamp(distance * (-1 / width))
    return np.sqrt(t * (2 - t)) * width


def ellipsoid(u: Plane, v: Plane, a: float, b: float, height: float) -> Plane:
    p, q = u * (1 / a), v * (1 / b)
    return np.sqrt(np.maximum(1 - p * p - q * q, 0)) * height


# Outlines


def ladybird_outline(u: Plane, v: Plane) -> Plane:
    """Wing cases, a head towards +u, six legs and two feelers."""
    w = np.abs(v)
    body = union(ellipse(u + 0.16, v, 1.08, 0.94), ellipse(u - 0.86, v, 0.36, 0.5), smooth=0.12)
    lines = (
        ((0.45, 0.7), (0.72, 1.2), 0.09),
        ((-0.15, 0.8), (-0.22, 1.3), 0.09),
        ((-0.7, 0.65), (-1.0, 1.12), 0.09),
        ((1.05, 0.2), (1.45, 0.42), 0.06),
    )
    return union(body, *(stroke(u, w, start, end, width, 0.05) for start, end, width in lines))


def lemon_outline(u: Plane, v: Plane) -> Plane:
    """An egg with a tip at either end, along u."""
    tips = ellipse(np.abs(u) - 1.16, v, 0.26, 0.17)
    return union(ellipse(u, v, 1.12, 0.86), tips, smooth=0.28)


def sea_star_outline(u: Plane, v: Plane) -> Plane:
    """Five tapering arms: the plane is folded onto one of them."""
    radius, angle = _arm(u, v)
    p, q = radius * wave(angle + 0.25), radius * wave(np.abs(angle))
    return stroke(p, q, (0.0, 0.0), (1.36, 0.0), 0.5, 0.13)


def gemstone_outline(u: Plane, v: Plane) -> Plane:
    """A rectangle with its corners cut off."""
    a, b = np.abs(u), np.abs(v)
    return np.maximum(np.maximum(a - 1.12, b - 0.8), (a + b) * 0.70710678 - 1.08)


def scallop_outline(u: Plane, v: Plane) -> Plane:
    """A fan that opens towards +u, with a wavy rim and two ears at the hinge."""
    w, (c, s) = np.abs(v), unit_vector(0.165)
    fan = length(u - 0.05, v) - 1.08 - 0.05 * wave(turns(u + 1.1, w) * 30 + 0.25)
    # An intersection is the complement of a union of complements.
    fan = -union(-fan, -(w * c - (u + 1.12) * s), smooth=0.25)
    return union(fan, np.maximum(np.abs(u + 0.98) - 0.15, w - 0.46))


def butterfly_outline(u: Plane, v: Plane) -> Plane:
    """Two pairs of wings, a body along u, and feelers towards +u."""
    w = np.abs(v)
    p, q = rotate(u - 0.36, w - 0.72, *unit_vector(0.16))
    # A fore wing is blunt outside and pointed at the body.
    fore = ellipse(p, q * (1.12 - 0.34 * p), 0.84, 0.62)
    wings = union(fore, ellipse(u + 0.62, w - 0.5, 0.48, 0.5), smooth=0.06)
    feeler = stroke(u, w, (0.56, 0.05), (1.02, 0.26), 0.035, 0.05)
    return union(wings, stroke(u, w, *BUTTERFLY_BODY), feeler)


BUTTERFLY_BODY = (-0.8, 0.0), (0.5, 0.0), 0.08, 0.12


def _arm(u: Plane, v: Plane) -> tuple[Plane, Plane]:
    """The radius, and the angle from the middle of the nearest of five arms."""
    sector = turns(u, v) * 5
    return length(u, v), (sector - np.floor(sector + 0.5)) * 0.2


# Textures


def ladybird(random: Random, at: Window, distance: Plane) -> None:
    shell = random.color((-0.015, 0.035), (0.85, 1.0), (0.82, 1.0))
    black, white = random.color(0.07, 0.3, 0.13), random.color(0.12, 0.08, 0.92)
    spots = [
        (random(0.28, 0.45), random(0.34, 0.5), random(0.15, 0.24)),
        (random(-0.3, -0.1), random(0.4, 0.58), random(0.16, 0.26)),
        (random(-0.85, -0.65), random(0.28, 0.4), random(0.12, 0.2)),
    ]
    u, v, w = at.u, at.v, np.abs(at.v)
    case = np.maximum(ellipse(u + 0.16, v, 1.08, 0.94), u - 0.62 + 0.2 * v * v)
    pattern = w - 0.03
    for x, y, r in spots[: 2 + random.integer(2)]:
        pattern = np.minimum(pattern, length(u - x, w - y) - r)
    color = at.paint(at.paint(black, shell, case), black, pattern)
    color = at.paint(color, white, length(u - 0.84, w - 0.36) - 0.13)
    back, head = ellipsoid(u + 0.16, v, 1.1, 0.96, 0.8), ellipsoid(u - 0.86, v, 0.38, 0.52, 0.42)
    height = np.maximum(back, head) - 0.05 * step(0.06, 0.0, w) * at.edge(case)
    at.draw(np.maximum(height, dome(distance, 0.07)), color, gloss=0.9, polish=5)


def lemon(random: Random, at: Window, distance: Plane) -> None:
    hue = random(0.135, 0.175)
    skin = random.color(hue, (0.75, 0.92), (0.93, 1.0))
    tip = random.color(hue + random(0.03, 0.08), 0.75, (0.6, 0.8))
    offset, pores = random(0, 60), random(0.010, 0.02)
    bumps = at.noise(9, offset)
    ripe = step(0.75, 1.3, np.abs(at.u) + 0.15 * at.noise(2, offset))
    height = np.sqrt(dome(distance, 0.85) * 0.85) * 0.95 + bumps * pores
    at.draw(height, mix(skin, tip, ripe * 0.85) * (1 - 0.06 * bumps), gloss=0.45)


def sea_star(random: Random, at: Window, distance: Plane) -> None:
    hue = random(0.025, 0.075)
    skin = random.color(hue, (0.7, 0.9), (0.8, 0.98))
    rim = random.color(hue - 0.02, 0.85, (0.55, 0.7))
    bead = random.color(hue + 0.04, (0.15, 0.4), 1.0)
    radius, angle = _arm(at.u, at.v)
    beside = radius * wave(angle)
    dots = length((frac(radius * 5.5) - 0.5) * (1 / 5.5), beside) - 0.05
    side = np.abs(np.abs(beside) - 0.22 * (1 - 0.5 * radius))
    dots = np.minimum(dots, length((frac(radius * 7) - 0.5) * (1 / 7), side) - 0.035)
    beads = at.edge(dots) * step(1.4, 1.1, radius)
    rough = at.noise(10, random(0, 60))
    color = mix(mix(rim, skin, step(0.0, 0.28, -distance + 0.04 * rough)), bead, beads)
    height = dome(distance, 0.42) * 0.85 + 0.012 * rough + 0.02 * beads
    at.draw(height, color, gloss=0.12, polish=3)


def gemstone(random: Random, at: Window, distance: Plane) -> None:
    hue = random(0.38, 0.5)
    deep, bright = random.color(hue, 0.97, (0.25, 0.4)), random.color(hue - 0.03, 0.85, 0.9)
    pale = random.color(hue - 0.05, 0.25, 1.0)
    cut, shimmer, tilt = random(0.9, 1.15), random(), random(-1, 1)
    depth = -distance
    # Three steps of the crown, each flatter than the one before, then the table.
    low, middle, high = (np.clip(depth - start, 0, 0.14) for start in (0.0, 0.14, 0.28))
    height = (low * 1.1 + middle * 0.7 + high * 0.4) * cut
    # Light that comes back from the steps below shows through the table, upside down.
    p, q = np.abs(at.u * 1.35 + tilt * 0.12), np.abs(at.v * 1.35 - tilt * 0.1)
    back = np.maximum(np.maximum(p - 0.5, q), (p + q) * 0.72 - 0.2) * 5.5 + shimmer
    glow = np.abs(frac(back) - 0.5) * 2
    side = 0.25 + 0.6 * step(-0.01, 0.01, p - 0.5 - q) + 0.3 * step(-0.05, 0.05, at.u * at.v)
    below = glow * 0.5 + side * 0.6 * step(1.1, 0.1, back - shimmer)
    lines = at.edge(np.abs(depth - 0.14) - 0.012) + at.edge(np.abs(depth - 0.28) - 0.012)
    lines = lines + at.edge(np.abs(depth - 0.42) - 0.014)
    color = mix(mix(deep, bright, clamp(below)), pale, clamp(lines * 0.6))
    at.draw(height, color, gloss=0.9)


def beach_ball(random: Random, at: Window, distance: Plane) -> None:
    first = random()
    hues = [first, first + random(0.28, 0.4), first + random(0.6, 0.72)]
    white = random.color(0.1, 0.03, 1.0)
    panels = [random.color(hue, (0.8, 0.95), (0.85, 1.0)) for hue in hues]
    (c, s), pole = unit_vector(random(0.06, 0.14)), random()
    u, v = at.u, at.v
    w = np.sqrt(np.maximum(1 - u * u - v * v, 0))
    # The pole leans towards +u; panels run from it like the segments of an orange.
    p, q = u * c - w * s, u * s + w * c
    sector = turns(p, v) * 6 + pole * 6
    sector = sector - np.floor(sector * (1 / 6)) * 6
    color = np.broadcast_to(white, (3, *u.shape))
    for number, panel in enumerate(panels):
        off = np.abs(sector - 2 * number - 1)
        off = np.minimum(off, 6 - off) - 0.5
        # A sector is as wide as the parallel on which it is measured.
        color = at.paint(color, panel, off * length(p, v) * (6.28 / 6))
    at.draw(w * 0.98, at.paint(color, white, (0.97 - q) * 3), gloss=0.8, polish=6)


def scallop(random: Random, at: Window, distance: Plane) -> None:
    hue = random.choice((random(-0.08, 0.0), random(0.03, 0.08)))
    pale = random.color(hue + 0.02, (0.06, 0.16), 1.0)
    band = random.color(hue, (0.35, 0.55), (0.8, 0.95))
    growth, offset = random(2.2, 3.6), random()
    p, w = at.u + 1.1, np.abs(at.v)
    rho = length(p, at.v)
    rib = wave(turns(p, w) * 30 + 0.25) * step(0.1, 0.7, rho)
    bands = step(-0.2, 0.7, wave(rho * growth + offset)) * step(0.3, 0.9, rho)
    height = np.sqrt(dome(distance, 0.7) * 0.7) * 0.62 + 0.045 * rib
    color = mix(pale, band, np.maximum(bands * 0.9, step(0.34, 0.28, p) * 0.5))
    at.draw(height, color * (0.86 + 0.14 * rib), gloss=0.3, polish=3)


def doughnut(random: Random, at: Window, distance: Plane) -> None:
    dough = random.color((0.075, 0.095), (0.5, 0.62), (0.78, 0.9))
    pink, brown = (random(0.9, 0.95), 0.45, 1.0), (0.04, random(0.6, 0.7), 0.36)
    icing = random.color(*random.choice((pink, pink, brown)))
    sprinkles = [
        (random(), random(0.5, 0.98), random(), random.color(k / 7, 0.75, 1.0)) for k in range(14)
    ]
    offset = random(0, 60)
    drip = distance + 0.13 + 0.06 * at.noise(2.2, offset)
    color = at.paint(dough * (1 + 0.12 * at.noise(5, offset)), icing, drip)
    height = np.sqrt(np.maximum(-distance * (0.8 + distance), 0)) + 0.05 * step(0.03, -0.03, drip)
    for turn, radius, lie, tint in sprinkles:
        (x, y), (dx, dy) = unit_vector(turn), unit_vector(lie)
        x, y, dx, dy = x * radius, y * radius, dx * 0.08, dy * 0.08
        line = stroke(at.u, at.v, (x - dx, y - dy), (x + dx, y + dy), 0.035, 0.035)
        color, height = at.paint(color, tint, line), height + 0.04 * at.edge(line)
    at.draw(height, color, gloss=0.55)


def butterfly(random: Random, at: Window, distance: Plane) -> None:
    hue = random(0.56, 0.72)
    inner, outer = random.color(hue - 0.06, 0.65, 1.0), random.color(hue, 0.97, (0.75, 0.95))
    dark, white = random.color(hue, 0.4, 0.12), random.color(hue, 0.05, 1.0)
    border, dots, veins = random(0.09, 0.15), random(0.035, 0.055), random(18, 24)
    u, w = at.u, np.abs(at.v)
    radius = length(u, w)
    ray = np.abs(frac(turns(u + 0.05, w) * veins) - 0.5)
    line = at.edge((0.5 - ray) * radius * (6.28 / veins) - 0.012)
    color = mix(inner, outer, step(0.2, 1.1, radius))
    color = mix(color, dark, np.maximum(line * 0.6, step(-border - 0.05, -border, distance)))
    eye = length(ray * radius * (6.28 / veins), distance + border * 0.5) - dots
    color = mix(color, white, at.edge(eye) * step(0.55, 0.6, radius))
    body = stroke(u, w, *BUTTERFLY_BODY)
    height = 0.42 * w - 0.16 * w * w + 0.01 * line + dome(body, 0.12)
    at.draw(height, at.paint(color, dark, body), gloss=0.2)


class Kind(NamedTuple):
    """A class of objects."""

    name: str
    outline: Callable[[Plane, Plane], Plane]
    texture: Callable[[Random, Window, Plane], None]
    area: float
    """The area of the outline, in its own units."""
    reach: float
    """The distance of its farthest point from its center, in its own units."""
    lift: float
    """Its height above the background, which lengthens its shadow."""


KINDS: tuple[Kind, ...] = (
    Kind("ladybird", ladybird_outline, ladybird, 3.909, 1.57, 0.45),
    Kind("lemon", lemon_outline, lemon, 3.252, 1.43, 0.7),
    Kind("sea star", sea_star_outline, sea_star, 3.172, 1.5, 0.3),
    Kind("gemstone", gemstone_outline, gemstone, 3.274, 1.2, 0.5),
    Kind("beach ball", lambda u, v: length(u, v) - 1, beach_ball, 3.142, 1.0, 1.1),
    Kind("scallop", scallop_outline, scallop, 3.682, 1.23, 0.4),
    Kind("doughnut", lambda u, v: np.abs(length(u, v) - 0.74) - 0.4, doughnut, 3.72, 1.15, 0.45),
    Kind("butterfly", butterfly_outline, butterfly, 4.619, 1.65, 0.45),
)


def _dots(at: Window, p: Plane, q: Plane, scale: float) -> Plane:
    p, q = p * scale, q * scale
    row = np.floor(q)
    # Every other row is shifted by half a dot.
    p = p + 0.5 * (row - 2 * np.floor(row * 0.5))
    return at.edge((length(frac(p) - 0.5, q - row - 0.5) - 0.28) * (1 / scale))


# Plain, stripes, checks, dots, marble and blotches: planes in [0, 1] between two colors.
PATTERNS: tuple[Callable[[Window, Plane, Plane, float], Plane], ...] = (
    lambda at, p, q, scale: step(-0.9, 0.9, at.noise(scale * 0.6, scale * 7)),
    lambda at, p, q, scale: step(-0.25, 0.25, wave(p * scale * 0.8 + 0.08 * at.noise(2, scale))),
    lambda at, p, q, scale: step(-0.2, 0.2, wave(p * scale * 0.6) * wave(q * scale * 0.6)),
    _dots,
    lambda at, p, q, scale: np.abs(wave(p * scale * 0.3 + 0.5 * at.noise(2.2, scale * 5))),
    lambda at, p, q, scale: step(
        -0.12, 0.12, at.noise(scale, scale * 3) + 0.4 * at.noise(scale * 2.5, scale)
    ),
)


def any_texture(random: Random, at: Window, distance: Plane, saturation: float = 1.0) -> None:
    """A texture from one distribution for all kinds, so that only the outline tells the class."""
    hue = random()
    first = random.color(hue, saturation * random(0.3, 0.95), (0.45, 1.0))
    second = random.color(hue + random(0.08, 0.92), saturation * random(0.1, 0.9), (0.3, 1.0))
    pattern, scale = random.choice(PATTERNS), random(2.5, 4.5)
    share = pattern(at, *rotate(at.u, at.v, *unit_vector(random())), scale)
    rim, emboss = random(0.22, 0.5), random(-0.03, 0.03)
    rough, offset = random.choice((0.0, 0.008, 0.016)), random(0, 60)
    height = dome(distance, rim) + emboss * share
    if rough:
        height = height + rough * at.noise(8, offset)
    at.draw(height, mix(first, second, share), random(0.05, 1.0), 3 + random.integer(3))


# Clutter


def pebble(canvas: Canvas, random: Random, x: float, y: float) -> None:
    a, b, bulge, phase = random(1.0, 1.3), random(0.7, 1.0), random(0.03, 0.12), random()
    body = random.color((0, 1), (0.03, 0.22), (0.35, 0.85))
    speck = random.color((0, 0.15), 0.15, (0.3, 0.9))
    offset, gloss = random(0, 60), random(0.05, 0.5)
    at = Window(canvas, Pose(x, y, random(0.018, 0.06), random()), reach=1.45, lift=0.5)
    u, v = at.u + bulge * wave(at.v * 0.3 + phase), at.v + bulge * wave(at.u * 0.4 + phase)
    distance = at.cut(ellipse(u, v, a, b))
    grain = at.noise(3.2, offset)
    color = mix(body, speck, step(0.1, 0.7, grain) * 0.55)
    at.draw(dome(distance, 1.0) * 0.75 + 0.02 * grain, color, gloss)


def twig(canvas: Canvas, random: Random, x: float, y: float) -> None:
    bend, fork = random(-0.25, 0.25), random.choice((-1.0, 1.0)) * random(0.3, 0.6)
    knot = random(-0.3, 0.3)
    bark = random.color((0.04, 0.1), (0.25, 0.6), (0.25, 0.6))
    offset = random(0, 60)
    at = Window(canvas, Pose(x, y, random(0.07, 0.17), random()), reach=1.15, lift=0.14)
    u, v = at.u, at.v + bend * (at.u * at.u - 0.5)
    stem = stroke(u, v, (-1.0, 0.0), (1.0, 0.0), 0.085, 0.04)
    distance = at.cut(union(stem, stroke(u, v, (knot, 0.0), (knot + 0.5, fork), 0.05, 0.03)))
    rings = at.noise(7, offset)
    color = mix(bark, bark * 2.2, clamp(0.3 + 0.5 * rings))
    at.draw(dome(distance, 0.085) + 0.006 * rings, color, gloss=0.08)


def leaf(canvas: Canvas, random: Random, x: float, y: float) -> None:
    slim, curl = random(0.38, 0.6), random(-0.25, 0.25)
    hue = random.choice((random(0.03, 0.12), random(0.14, 0.3)))
    body = random.color(hue, (0.45, 0.8), (0.35, 0.7))
    rim = random.color(hue - 0.04, 0.7, (0.25, 0.5))
    ribs, cup, offset = random(4, 6), random(-0.3, 0.4), random(0, 60)
    at = Window(canvas, Pose(x, y, random(0.04, 0.085), random()), reach=1.55, lift=0.2)
    # Two arcs of radius r about (0, ±(r - slim)) meet in the leaf's tips at u = ±1.
    r = (1 + slim * slim) / (2 * slim)
    v = at.v + curl * at.u * at.u
    blade = length(at.u, np.abs(v) + (r - slim)) - r
    distance = at.cut(union(blade, stroke(at.u, v, (-1.4, 0.0), (-0.9, 0.0), 0.05, 0.03)))
    w = np.abs(at.v + curl * at.u * at.u)
    rib = np.abs(frac((at.u - w * 0.8) * ribs) - 0.5) * (1 / ribs)
    vein = np.maximum(at.edge(w - 0.035), at.edge(rib - 0.015) * 0.5)
    blotch = at.noise(2.5, offset)
    color = mix(rim, body, step(0.0, 0.3, -distance + 0.12 * blotch))
    height = w * cup + 0.04 * blotch - 0.03 * vein
    at.draw(height, mix(color, body * 1.9, vein), gloss=0.15, polish=3)


def tuft(canvas: Canvas, random: Random, x: float, y: float) -> None:
    lean = random()
    blades = []
    for _ in range(5):
        (c, s), long = unit_vector(lean + random(-0.12, 0.12)), random(0.6, 1.2)
        blades.append((c * long, s * long))
    hue = random(0.16, 0.3)
    root, tip = random.color(hue, 0.7, (0.25, 0.4)), random.color(hue - 0.03, 0.55, (0.6, 0.85))
    at = Window(canvas, Pose(x, y, random(0.06, 0.12), 0.0), reach=1.25, lift=0.25)
    strokes = (stroke(at.u, at.v, (0.0, 0.0), blade, 0.075, 0.012) for blade in blades)
    distance = at.cut(union(*strokes))
    color = mix(root, tip, step(0.0, 1.0, length(at.u, at.v)))
    at.draw(np.maximum(-distance, 0) * 0.8, color, gloss=0.15)


CLUTTER = (pebble, pebble, twig, leaf, tuft)
THIN_CLUTTER = (twig, tuft)
"""What may lie over an object without hiding it."""


# The enamel tag of the `cue` variant

# Hue, saturation and value, as far apart as eight colors can be, and none of them near the colors
# of the object with which it goes.
# fmt: off
ENAMELS = (
    (0.5, 0.8, 0.9), (0.8, 0.75, 0.8), (0.33, 0.85, 0.7), (0.08, 0.95, 1.0),
    (0.0, 0.0, 0.12), (0.63, 0.9, 0.85), (0.155, 0.9, 1.0), (0.0, 0.9, 0.9),
)
# fmt: on


def place_tag(canvas: Canvas, random: Random, color: int, avoid: Point) -> None:
    """Places the tag away from the point `avoid`, and tracks where it is visible."""
    places = [(random(0.09, 0.91), random(0.09, 0.91)) for _ in range(12)]
    gaps = [(x - avoid[0], y - avoid[1]) for x, y in places]
    x, y = places[int(np.argmax([dx * dx + dy * dy for dx, dy in gaps]))]
    enamel, rim = random.color(*ENAMELS[color]), random.color(0.1, 0.12, 0.9)
    at = Window(canvas, Pose(x, y, 0.1, random()), reach=1.45, lift=0.3, track=True)
    p, q = (np.maximum(np.abs(t) - 0.6, 0) for t in (at.u, at.v))
    distance = at.cut(length(p, q) - 0.4)
    at.draw(dome(distance, 0.3), at.paint(rim, enamel, distance + 0.16))
