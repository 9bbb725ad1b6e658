"""Dresses that any outline can wear, for the variants in which only the outline tells the class.

Color, pattern, relief and gloss are rolled from one distribution, whatever the object is.
"""

from collections.abc import Callable

import numpy as np

from bcosvit.data.scenery.dice import Dice
from bcosvit.data.scenery.fields import Plane, clamp, ink, length, mix, step, unit_vector, wave
from bcosvit.data.scenery.stage import Dress, Patch, Surface

__all__ = ["any_material"]

# A pattern is a plane in [0, 1] between two colors, given a patch, a direction and a scale.
Pattern = Callable[[Patch, tuple[float, float], float], Plane]


def _plain(at: Patch, direction: tuple[float, float], scale: float) -> Plane:
    return step(-0.9, 0.9, at.noise(scale * 0.6, scale * 7))


def _stripes(at: Patch, direction: tuple[float, float], scale: float) -> Plane:
    t = at.u * direction[0] + at.v * direction[1]
    return step(-0.25, 0.25, wave(t * scale * 0.8 + 0.08 * at.noise(2, scale)))


def _checks(at: Patch, direction: tuple[float, float], scale: float) -> Plane:
    c, s = direction
    p, q = at.u * c + at.v * s, at.v * c - at.u * s
    return step(-0.2, 0.2, wave(p * scale * 0.6) * wave(q * scale * 0.6))


def _dots(at: Patch, direction: tuple[float, float], scale: float) -> Plane:
    c, s = direction
    p, q = (at.u * c + at.v * s) * scale, (at.v * c - at.u * s) * scale
    row = np.floor(q)
    # Every other row moves by half a dot.
    p = p + 0.5 * (row - 2 * np.floor(row * 0.5))
    return at.edge((length(p - np.floor(p) - 0.5, q - row - 0.5) - 0.28) * (1 / scale))


def _marble(at: Patch, direction: tuple[float, float], scale: float) -> Plane:
    t = at.u * direction[0] + at.v * direction[1]
    return np.abs(wave(t * scale * 0.3 + 0.5 * at.noise(2.2, scale * 5)))


def _blotches(at: Patch, direction: tuple[float, float], scale: float) -> Plane:
    return step(-0.12, 0.12, at.noise(scale, scale * 3) + 0.4 * at.noise(scale * 2.5, scale))


PATTERNS: tuple[Pattern, ...] = (_plain, _stripes, _checks, _dots, _marble, _blotches)


def any_material(dice: Dice, vivid: float = 1.0) -> Dress:
    """Roll a dress that knows nothing of what wears it; `vivid` scales its saturation."""
    hue = dice.between(0, 1)
    first = ink(hue, vivid * dice.between(0.3, 0.95), dice.between(0.45, 1.0))
    other, saturation = hue + dice.between(0.08, 0.92), vivid * dice.between(0.1, 0.9)
    second = ink(other, saturation, dice.between(0.3, 1.0))
    pattern, scale = dice.choice(PATTERNS), dice.between(2.5, 4.5)
    direction = unit_vector(dice.between(0, 1))
    rim, emboss = dice.between(0.22, 0.5), dice.between(-0.03, 0.03)
    rough, offset = dice.choice((0.0, 0.008, 0.016)), dice.between(0, 60)
    gloss, polish = dice.between(0.05, 1.0), 3 + dice.below(3)

    def paint(at: Patch, distance: Plane) -> Surface:
        share = pattern(at, direction, scale)
        t = clamp(distance * (-1 / rim))
        height = np.sqrt(t * (2 - t)) * rim + emboss * share
        if rough:
            height = height + rough * at.noise(8, offset)
        return Surface(height, mix(first, second, share), gloss=gloss, polish=polish)

    return paint
