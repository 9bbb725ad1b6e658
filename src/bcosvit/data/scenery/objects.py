"""The eight kinds of object: each an outline and a family of dresses.

A dress is rolled once (its colors and pattern), then painted on however many pixels the picture
has. A kind varies within its family: a ladybird is scarlet to orange with four to eight spots, a
doughnut has pink, brown or minty icing; no two are alike.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from bcosvit.data.scenery import outlines
from bcosvit.data.scenery.dice import Dice
from bcosvit.data.scenery.fields import (
    Plane,
    capsule,
    clamp,
    ellipse,
    ink,
    length,
    mix,
    step,
    turns,
    unit_vector,
    wave,
)
from bcosvit.data.scenery.stage import Dress, Outline, Patch, Surface

__all__ = ["KINDS", "Kind"]


@dataclass(frozen=True)
class Kind:
    """A class of object."""

    name: str
    outline: Outline
    area: float
    """What the outline covers, in its own square units."""
    reach: float
    """The distance of its farthest point from its center, in its own units."""
    lift: float
    """Its height above the ground, which lengthens its shadow."""
    roll: Callable[[Dice], Dress]


def _dome(distance: Plane, width: float) -> Plane:
    """A rim rounded over `width`, flat further inside."""
    t = clamp(distance * (-1 / width))
    return np.sqrt(t * (2 - t)) * width


def _cap(u: Plane, v: Plane, a: float, b: float, height: float) -> Plane:
    """Half an ellipsoid."""
    p, q = u * (1 / a), v * (1 / b)
    return np.sqrt(np.maximum(1 - p * p - q * q, 0)) * height


def ladybird(dice: Dice) -> Dress:
    shell = ink(dice.between(-0.015, 0.035), dice.between(0.85, 1.0), dice.between(0.82, 1.0))
    black = ink(0.07, 0.3, 0.13)
    white = ink(0.12, 0.08, 0.92)
    spots = [
        (dice.between(0.28, 0.45), dice.between(0.34, 0.5), dice.between(0.15, 0.24)),
        (dice.between(-0.3, -0.1), dice.between(0.4, 0.58), dice.between(0.16, 0.26)),
        (dice.between(-0.85, -0.65), dice.between(0.28, 0.4), dice.between(0.12, 0.2)),
    ]
    spots = spots[: 2 + dice.below(2)]

    def paint(at: Patch, distance: Plane) -> Surface:
        u, v = at.u, at.v
        w = np.abs(v)
        back = ellipse(u + 0.16, v, 1.08, 0.94)
        case = np.maximum(back, u - 0.62 + 0.2 * v * v)
        pattern = w - 0.03
        for x, y, r in spots:
            pattern = np.minimum(pattern, length(u - x, w - y) - r)
        color = mix(black, shell, at.edge(case))
        color = mix(color, black, at.edge(pattern))
        color = mix(color, white, at.edge(length(u - 0.84, w - 0.36) - 0.13))
        height = np.maximum(_cap(u + 0.16, v, 1.1, 0.96, 0.8), _cap(u - 0.86, v, 0.38, 0.52, 0.42))
        height = height - 0.05 * step(0.06, 0.0, w) * at.edge(case)
        return Surface(np.maximum(height, _dome(distance, 0.07)), color, gloss=0.9, polish=5)

    return paint


def lemon(dice: Dice) -> Dress:
    hue = dice.between(0.135, 0.175)
    skin = ink(hue, dice.between(0.75, 0.92), dice.between(0.93, 1.0))
    tip = ink(hue + dice.between(0.03, 0.08), 0.75, dice.between(0.6, 0.8))
    offset, pores = dice.between(0, 60), dice.between(0.010, 0.02)

    def paint(at: Patch, distance: Plane) -> Surface:
        bumps = at.noise(9, offset)
        ripe = step(0.75, 1.3, np.abs(at.u) + 0.15 * at.noise(2, offset))
        height = np.sqrt(_dome(distance, 0.85) * 0.85) * 0.95 + bumps * pores
        color = mix(skin, tip, ripe * 0.85) * (1 - 0.06 * bumps)
        return Surface(height, color, gloss=0.45, polish=4)

    return paint


def sea_star(dice: Dice) -> Dress:
    hue = dice.between(0.025, 0.075)
    skin = ink(hue, dice.between(0.7, 0.9), dice.between(0.8, 0.98))
    rim = ink(hue - 0.02, 0.85, dice.between(0.55, 0.7))
    bead = ink(hue + 0.04, dice.between(0.15, 0.4), 1.0)
    offset = dice.between(0, 60)

    def paint(at: Patch, distance: Plane) -> Surface:
        radius = length(at.u, at.v)
        sector = turns(at.u, at.v) * 5
        across = (sector - np.floor(sector + 0.5)) * 0.2
        beside = radius * wave(across)
        along = radius * 5.5
        dots = length((along - np.floor(along) - 0.5) * (1 / 5.5), beside) - 0.05
        rows = radius * 7
        side = np.abs(np.abs(beside) - 0.22 * (1 - 0.5 * radius))
        dots = np.minimum(dots, length((rows - np.floor(rows) - 0.5) * (1 / 7), side) - 0.035)
        beads = at.edge(dots) * step(1.4, 1.1, radius)
        rough = at.noise(10, offset)
        color = mix(rim, skin, step(0.0, 0.28, -distance + 0.04 * rough))
        color = mix(color, bead, beads)
        height = _dome(distance, 0.42) * 0.85 + 0.012 * rough + 0.02 * beads
        return Surface(height, color, gloss=0.12, polish=3)

    return paint


def gem(dice: Dice) -> Dress:
    hue = dice.between(0.38, 0.5)
    deep, bright = ink(hue, 0.97, dice.between(0.25, 0.4)), ink(hue - 0.03, 0.85, 0.9)
    pale = ink(hue - 0.05, 0.25, 1.0)
    cut = dice.between(0.9, 1.15)
    shimmer, tilt = dice.between(0, 1), dice.between(-1, 1)

    def paint(at: Patch, distance: Plane) -> Surface:
        depth = -distance
        # Three steps of the crown, each flatter than the one before, then the table.
        height = (
            np.minimum(np.maximum(depth, 0), 0.14) * 1.1
            + np.clip(depth - 0.14, 0, 0.14) * 0.7
            + np.clip(depth - 0.28, 0, 0.14) * 0.4
        ) * cut
        # Light that comes back from the steps below shows through the table, upside down.
        p, q = np.abs(at.u * 1.35 + tilt * 0.12), np.abs(at.v * 1.35 - tilt * 0.1)
        back = np.maximum(np.maximum(p - 0.5, q), (p + q) * 0.72 - 0.2) * 5.5 + shimmer
        glow = np.abs(back - np.floor(back) - 0.5) * 2
        side = 0.25 + 0.6 * step(-0.01, 0.01, p - 0.5 - q) + 0.3 * step(-0.05, 0.05, at.u * at.v)
        below = glow * 0.5 + side * 0.6 * step(1.1, 0.1, back - shimmer)
        lines = at.edge(np.abs(depth - 0.14) - 0.012) + at.edge(np.abs(depth - 0.28) - 0.012)
        lines = lines + at.edge(np.abs(depth - 0.42) - 0.014)
        color = mix(deep, bright, clamp(below))
        color = mix(color, pale, clamp(lines * 0.6))
        return Surface(height, color, gloss=0.9, polish=4)

    return paint


def beach_ball(dice: Dice) -> Dress:
    first = dice.between(0, 1)
    hues = [first, first + dice.between(0.28, 0.4), first + dice.between(0.6, 0.72)]
    white = ink(0.1, 0.03, 1.0)
    panels = [ink(hue, dice.between(0.8, 0.95), dice.between(0.85, 1.0)) for hue in hues]
    (c, s), pole = unit_vector(dice.between(0.06, 0.14)), dice.between(0, 1)

    def paint(at: Patch, distance: Plane) -> Surface:
        u, v = at.u, at.v
        w = np.sqrt(np.maximum(1 - u * u - v * v, 0))
        # The pole leans towards +u; panels run from it like an orange's.
        p, q = u * c - w * s, u * s + w * c
        sector = turns(p, v) * 6 + pole * 6
        sector = sector - np.floor(sector * (1 / 6)) * 6
        color = np.broadcast_to(white, (3, *u.shape))
        for number, panel in enumerate(panels):
            off = np.abs(sector - 2 * number - 1)
            off = np.minimum(off, 6 - off) - 0.5
            # A sector is as wide as the parallel it is measured on.
            color = mix(color, panel, at.edge(off * length(p, v) * (6.28 / 6)))
        color = mix(color, white, at.edge((0.97 - q) * 3))
        return Surface(w * 0.98, color, gloss=0.8, polish=6)

    return paint


def scallop(dice: Dice) -> Dress:
    hue = dice.choice((dice.between(-0.08, 0.0), dice.between(0.03, 0.08)))
    pale = ink(hue + 0.02, dice.between(0.06, 0.16), 1.0)
    band = ink(hue, dice.between(0.35, 0.55), dice.between(0.8, 0.95))
    growth, offset = dice.between(2.2, 3.6), dice.between(0, 1)

    def paint(at: Patch, distance: Plane) -> Surface:
        p, w = at.u + 1.1, np.abs(at.v)
        rho = length(p, at.v)
        rib = wave(turns(p, w) * 30 + 0.25) * step(0.1, 0.7, rho)
        bands = step(-0.2, 0.7, wave(rho * growth + offset)) * step(0.3, 0.9, rho)
        ears = step(0.34, 0.28, p)
        height = np.sqrt(_dome(distance, 0.7) * 0.7) * 0.62 + 0.045 * rib
        color = mix(pale, band, np.maximum(bands * 0.9, ears * 0.5))
        color = color * (0.86 + 0.14 * rib)
        return Surface(height, color, gloss=0.3, polish=3)

    return paint


def doughnut(dice: Dice) -> Dress:
    dough = ink(dice.between(0.075, 0.095), dice.between(0.5, 0.62), dice.between(0.78, 0.9))
    pink, brown = (dice.between(0.9, 0.95), 0.45, 1.0), (0.04, dice.between(0.6, 0.7), 0.36)
    icing = ink(*dice.choice((pink, pink, brown)))
    sprinkles = [
        (dice.between(0, 1), dice.between(0.5, 0.98), dice.between(0, 1), ink(k / 7, 0.75, 1.0))
        for k in range(14)
    ]
    offset = dice.between(0, 60)

    def paint(at: Patch, distance: Plane) -> Surface:
        drip = distance + 0.13 + 0.06 * at.noise(2.2, offset)
        color = mix(dough * (1 + 0.12 * at.noise(5, offset)), icing, at.edge(drip))
        height = np.sqrt(np.maximum(-distance * (0.8 + distance), 0))
        height = height + 0.05 * step(0.03, -0.03, drip)
        for turn, radius, lie, tint in sprinkles:
            (x, y), (dx, dy) = unit_vector(turn), unit_vector(lie)
            x, y, dx, dy = x * radius, y * radius, dx * 0.08, dy * 0.08
            stroke = capsule(at.u, at.v, (x - dx, y - dy), (x + dx, y + dy), 0.035, 0.035)
            sprinkle = at.edge(stroke)
            color = mix(color, tint, sprinkle)
            height = height + 0.04 * sprinkle
        return Surface(height, color, gloss=0.55, polish=4)

    return paint


def butterfly(dice: Dice) -> Dress:
    hue = dice.between(0.56, 0.72)
    inner, outer = ink(hue - 0.06, 0.65, 1.0), ink(hue, 0.97, dice.between(0.75, 0.95))
    dark, white = ink(hue, 0.4, 0.12), ink(hue, 0.05, 1.0)
    border, dots = dice.between(0.09, 0.15), dice.between(0.035, 0.055)
    veins = dice.between(18, 24)

    def paint(at: Patch, distance: Plane) -> Surface:
        u, w = at.u, np.abs(at.v)
        radius = length(u, w)
        vein = turns(u + 0.05, w) * veins
        ray = np.abs(vein - np.floor(vein) - 0.5)
        color = mix(inner, outer, step(0.2, 1.1, radius))
        line = at.edge((0.5 - ray) * radius * (6.28 / veins) - 0.012)
        color = mix(color, dark, np.maximum(line * 0.6, step(-border - 0.05, -border, distance)))
        eye = length(ray * radius * (6.28 / veins), distance + border * 0.5) - dots
        color = mix(color, white, at.edge(eye) * step(0.55, 0.6, radius))
        body = capsule(u, w, (-0.8, 0.0), (0.5, 0.0), 0.08, 0.12)
        color = mix(color, dark, at.edge(body))
        height = 0.42 * w - 0.16 * w * w + 0.01 * line + _dome(body, 0.12)
        return Surface(height, color, gloss=0.2, polish=4)

    return paint


KINDS: tuple[Kind, ...] = (
    Kind("ladybird", outlines.ladybird, 3.909, 1.57, 0.45, ladybird),
    Kind("lemon", outlines.lemon, 3.252, 1.43, 0.7, lemon),
    Kind("sea star", outlines.sea_star, 3.172, 1.5, 0.3, sea_star),
    Kind("gemstone", outlines.gem, 3.274, 1.2, 0.5, gem),
    Kind("beach ball", outlines.ball, 3.142, 1.0, 1.1, beach_ball),
    Kind("scallop", outlines.scallop, 3.682, 1.23, 0.4, scallop),
    Kind("doughnut", outlines.doughnut, 3.72, 1.15, 0.45, doughnut),
    Kind("butterfly", outlines.butterfly, 4.619, 1.65, 0.45, butterfly),
)
