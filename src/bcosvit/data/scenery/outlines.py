"""The eight outlines that a class can have, as signed distances.

Each is drawn in units of its own, about as large as the unit disc; `objects.KINDS` knows the area
that it covers, so that all are shown equally large. The outlines differ without any help from
color or texture: that is what the `hard` variant asks a model to see.
"""

import numpy as np

from bcosvit.data.scenery.fields import (
    Plane,
    capsule,
    ellipse,
    length,
    smooth_max,
    smooth_min,
    turns,
    unit_vector,
    wave,
)

__all__ = [
    "ball",
    "butterfly",
    "doughnut",
    "gem",
    "ladybird",
    "lemon",
    "scallop",
    "sea_star",
]


def ball(u: Plane, v: Plane) -> Plane:
    return length(u, v) - 1


def doughnut(u: Plane, v: Plane) -> Plane:
    return np.abs(length(u, v) - 0.74) - 0.4


def lemon(u: Plane, v: Plane) -> Plane:
    """An egg with a nipple at either end, along u."""
    body = ellipse(u, v, 1.12, 0.86)
    tips = ellipse(np.abs(u) - 1.16, v, 0.26, 0.17)
    return smooth_min(body, tips, 0.28)


def ladybird(u: Plane, v: Plane) -> Plane:
    """Wing cases, head towards +u, six legs and two feelers."""
    w = np.abs(v)
    body = smooth_min(ellipse(u + 0.16, v, 1.08, 0.94), ellipse(u - 0.86, v, 0.36, 0.5), 0.12)
    for start, end, width in (
        ((0.45, 0.7), (0.72, 1.2), 0.09),
        ((-0.15, 0.8), (-0.22, 1.3), 0.09),
        ((-0.7, 0.65), (-1.0, 1.12), 0.09),
        ((1.05, 0.2), (1.45, 0.42), 0.06),
    ):
        body = np.minimum(body, capsule(u, w, start, end, width, 0.05))
    return body


def sea_star(u: Plane, v: Plane) -> Plane:
    """Five tapering arms: the plane is folded onto one of them."""
    radius = length(u, v)
    sector = turns(u, v) * 5
    angle = (sector - np.floor(sector + 0.5)) * 0.2
    p, q = radius * wave(angle + 0.25), radius * wave(np.abs(angle))
    return capsule(p, q, (0.0, 0.0), (1.36, 0.0), 0.5, 0.13)


def gem(u: Plane, v: Plane) -> Plane:
    """An emerald cut: a rectangle with its corners off."""
    a, b = np.abs(u), np.abs(v)
    return np.maximum(np.maximum(a - 1.12, b - 0.8), (a + b) * 0.70710678 - 1.08)


def scallop(u: Plane, v: Plane) -> Plane:
    """A fan that opens towards +u, with a wavy rim and two ears at the hinge."""
    w = np.abs(v)
    rim = 0.05 * wave(turns(u + 1.1, w) * 30 + 0.25)
    fan = length(u - 0.05, v) - 1.08 - rim
    c, s = unit_vector(0.165)
    fan = smooth_max(fan, w * c - (u + 1.12) * s, 0.25)
    ears = np.maximum(np.abs(u + 0.98) - 0.15, w - 0.46)
    return np.minimum(fan, ears)


def butterfly(u: Plane, v: Plane) -> Plane:
    """Two pairs of wings, a body along u, and feelers towards +u."""
    w = np.abs(v)
    c, s = unit_vector(0.16)
    p, q = u - 0.36, w - 0.72
    p, q = p * c + q * s, q * c - p * s
    # A fore wing is blunt outside and pointed at the body.
    fore = ellipse(p, q * (1.12 - 0.34 * p), 0.84, 0.62)
    hind = ellipse(u + 0.62, w - 0.5, 0.48, 0.5)
    wings = smooth_min(fore, hind, 0.06)
    body = capsule(u, w, (-0.8, 0.0), (0.5, 0.0), 0.08, 0.12)
    feeler = capsule(u, w, (0.56, 0.05), (1.02, 0.26), 0.035, 0.05)
    return np.minimum(wings, np.minimum(body, feeler))
