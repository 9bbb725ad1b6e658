"""What lies about: pebbles, twigs, fallen leaves, tufts of grass. None of it belongs to a class.

Each function rolls one thing and puts it on the stage at a point. `litter` scatters many under the
object; `overlay` lets a few thin ones lie over it, thin so that they can't hide it.
"""

from collections.abc import Callable

import numpy as np

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
    unit_vector,
    wave,
)
from bcosvit.data.scenery.stage import Patch, Pose, Stage, Surface

__all__ = ["litter", "overlay"]


def pebble(stage: Stage, dice: Dice, x: float, y: float) -> None:
    a, b = dice.between(1.0, 1.3), dice.between(0.7, 1.0)
    bulge, phase = dice.between(0.03, 0.12), dice.between(0, 1)
    body = ink(dice.between(0, 1), dice.between(0.03, 0.22), dice.between(0.35, 0.85))
    speck = ink(dice.between(0, 0.15), 0.15, dice.between(0.3, 0.9))
    offset, gloss = dice.between(0, 60), dice.between(0.05, 0.5)
    pose = Pose(x, y, dice.between(0.018, 0.06), dice.between(0, 1))

    def outline(u: Plane, v: Plane) -> Plane:
        return ellipse(u + bulge * wave(v * 0.3 + phase), v + bulge * wave(u * 0.4 + phase), a, b)

    def paint(at: Patch, distance: Plane) -> Surface:
        t = clamp(-distance)
        grain = at.noise(3.2, offset)
        color = mix(body, speck, step(0.1, 0.7, grain) * 0.55)
        return Surface(np.sqrt(t * (2 - t)) * 0.75 + 0.02 * grain, color, gloss=gloss)

    stage.place(outline, paint, pose, reach=1.45, lift=0.5)


def twig(stage: Stage, dice: Dice, x: float, y: float) -> None:
    bend, fork = dice.between(-0.25, 0.25), dice.choice((-1.0, 1.0)) * dice.between(0.3, 0.6)
    knot = dice.between(-0.3, 0.3)
    bark = ink(dice.between(0.04, 0.1), dice.between(0.25, 0.6), dice.between(0.25, 0.6))
    pale = bark * 2.2
    offset = dice.between(0, 60)
    pose = Pose(x, y, dice.between(0.07, 0.17), dice.between(0, 1))

    def outline(u: Plane, v: Plane) -> Plane:
        v = v + bend * (u * u - 0.5)
        stem = capsule(u, v, (-1.0, 0.0), (1.0, 0.0), 0.085, 0.04)
        spur = capsule(u, v, (knot, 0.0), (knot + 0.5, fork), 0.05, 0.03)
        return np.minimum(stem, spur)

    def paint(at: Patch, distance: Plane) -> Surface:
        t = clamp(distance * (-1 / 0.085))
        rings = at.noise(7, offset)
        color = mix(bark, pale, clamp(0.3 + 0.5 * rings))
        return Surface(np.sqrt(t * (2 - t)) * 0.085 + 0.006 * rings, color, gloss=0.08)

    stage.place(outline, paint, pose, reach=1.15, lift=0.14)


def leaf(stage: Stage, dice: Dice, x: float, y: float) -> None:
    slim, curl = dice.between(0.38, 0.6), dice.between(-0.25, 0.25)
    hue = dice.choice((dice.between(0.03, 0.12), dice.between(0.14, 0.3)))
    body = ink(hue, dice.between(0.45, 0.8), dice.between(0.35, 0.7))
    edge = ink(hue - 0.04, 0.7, dice.between(0.25, 0.5))
    ribs, cup, offset = dice.between(4, 6), dice.between(-0.3, 0.4), dice.between(0, 60)
    pose = Pose(x, y, dice.between(0.04, 0.085), dice.between(0, 1))
    # Two arcs of radius r about (0, ±h) meet in the leaf's tips at u = ±1.
    r = (1 + slim * slim) / (2 * slim)
    h = r - slim

    def outline(u: Plane, v: Plane) -> Plane:
        v = v + curl * u * u
        blade = length(u, np.abs(v) + h) - r
        return np.minimum(blade, capsule(u, v, (-1.4, 0.0), (-0.9, 0.0), 0.05, 0.03))

    def paint(at: Patch, distance: Plane) -> Surface:
        v = at.v + curl * at.u * at.u
        w = np.abs(v)
        rib = (at.u - w * 0.8) * ribs
        rib = np.abs(rib - np.floor(rib) - 0.5) * (1 / ribs)
        vein = np.maximum(at.edge(w - 0.035), at.edge(rib - 0.015) * 0.5)
        blotch = at.noise(2.5, offset)
        color = mix(edge, body, step(0.0, 0.3, -distance + 0.12 * blotch))
        color = mix(color, body * 1.9, vein)
        return Surface(w * cup + 0.04 * blotch - 0.03 * vein, color, gloss=0.15, polish=3)

    stage.place(outline, paint, pose, reach=1.55, lift=0.2)


def tuft(stage: Stage, dice: Dice, x: float, y: float) -> None:
    lean = dice.between(0, 1)
    blades = []
    for _ in range(5):
        c, s = unit_vector(lean + dice.between(-0.12, 0.12))
        long = dice.between(0.6, 1.2)
        blades.append((c * long, s * long))
    hue = dice.between(0.16, 0.3)
    root = ink(hue, 0.7, dice.between(0.25, 0.4))
    tip = ink(hue - 0.03, 0.55, dice.between(0.6, 0.85))
    pose = Pose(x, y, dice.between(0.06, 0.12), 0.0)

    def outline(u: Plane, v: Plane) -> Plane:
        total = capsule(u, v, (0.0, 0.0), blades[0], 0.075, 0.012)
        for blade in blades[1:]:
            total = np.minimum(total, capsule(u, v, (0.0, 0.0), blade, 0.075, 0.012))
        return total

    def paint(at: Patch, distance: Plane) -> Surface:
        radius = length(at.u, at.v)
        return Surface(np.maximum(-distance, 0) * 0.8, mix(root, tip, step(0.0, 1.0, radius)), 0.15)

    stage.place(outline, paint, pose, reach=1.25, lift=0.25)


Thing = Callable[[Stage, Dice, float, float], None]
LITTER: tuple[Thing, ...] = (pebble, pebble, twig, leaf, tuft)
OVERLAY: tuple[Thing, ...] = (twig, tuft)


def litter(stage: Stage, dice: Dice) -> None:
    """Scatter things over the whole ground, whatever will lie on top of them."""
    for _ in range(6 + dice.below(7)):
        dice.choice(LITTER)(stage, dice, dice.between(0, 1), dice.between(0, 1))


def overlay(stage: Stage, dice: Dice) -> None:
    """Lay up to two thin things over everything."""
    for _ in range(dice.below(3)):
        dice.choice(OVERLAY)(stage, dice, dice.between(0.1, 0.9), dice.between(0.1, 0.9))
