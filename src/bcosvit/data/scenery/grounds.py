"""What a scene lies on: sand, grass, wood, cobbles, cloth or shallow water.

A ground is a function of the stage and the dice that lays a height field and a color. It is rolled
before anything is known about the object, so it can tell nothing about the class.
"""

from collections.abc import Callable

import numpy as np

from bcosvit.data.scenery.dice import Dice
from bcosvit.data.scenery.fields import Plane, clamp, ink, mix, step, unit_vector, wave
from bcosvit.data.scenery.stage import Stage

__all__ = ["CALM", "GROUNDS"]


def _turned(stage: Stage, turn: float) -> tuple[Plane, Plane]:
    c, s = unit_vector(turn)
    x, y = stage.x, stage.y[:, None]
    return x * c + y * s, y * c - x * s


def _scatter(stage: Stage, *cells: Plane) -> Plane:
    """A random number in [0, 1) for each cell, the same at every pixel of the cell."""
    column, row = (cell.astype(np.int32) for cell in cells)
    flat = stage.lattice.reshape(-1)
    picked: Plane = flat[(column * 1619 + row * 31337 + ((column * row) << 3)) & (flat.size - 1)]
    return picked


def sand(stage: Stage, dice: Dice) -> None:
    """Ripples that the wind bent, grains, and drifts of a second shade."""
    hue, value = dice.between(0.08, 0.13), dice.between(0.82, 1.0)
    light, dark = ink(hue, 0.3, value), ink(hue - 0.02, 0.45, value * 0.72)
    drift = stage.octave(3, 3, dice.between(0, 60))
    along, _ = _turned(stage, dice.between(0, 1))
    ripple = wave(along * dice.between(5, 11) + drift * dice.between(0.25, 0.5))
    grain = stage.octave(90, 90, dice.between(0, 60))
    fine = stage.octave(190, 190, dice.between(0, 60))
    height = ripple * dice.between(0.002, 0.008) + drift * 0.012 + grain * 0.0011
    tone = clamp(0.5 - 0.35 * drift - 0.18 * ripple - 0.22 * grain - 0.3 * fine)
    stage.lay(height, mix(light, dark, tone))


def grass(stage: Stage, dice: Dice) -> None:
    """Layers of blades; each blade fills a long cell of its layer's own, turned grid."""
    lean = dice.between(0, 1)
    hue, value = dice.between(0.19, 0.31), dice.between(0.5, 0.68)
    tone = 0.12 + 0.06 * stage.octave(24, 24, dice.between(0, 60))
    height = np.zeros_like(tone)
    scale = dice.between(0.85, 1.25)
    for layer in range(5):
        along, across = _turned(stage, lean + dice.between(-0.13, 0.13))
        across = across * (30 * scale) + dice.between(0, 60)
        along = along * (5.5 * scale) + dice.between(0, 60)
        # A blade bends sideways as it rises, hence the across-coordinate depends on the other.
        across = across + 0.35 * wave(along * 0.31)
        column = np.floor(across)
        along = along + 7 * _scatter(stage, column, column)
        row = np.floor(along)
        a, b = along - row, across - column - 0.5
        shade = _scatter(stage, column, row)
        width = 0.46 * (1 - a * a) * (0.5 + 0.5 * shade)
        inside = step(0.08, -0.08, np.abs(b) - width)
        blade = (0.22 + 0.14 * layer) * (0.45 + 0.75 * a) * (0.55 + 0.7 * shade) + b * 0.18
        tone = mix(tone, blade, inside)
        height = mix(height, (0.004 + 0.002 * layer) * a, inside)
    tone = clamp(tone + 0.12 * stage.octave(4, 4, dice.between(0, 60)))
    dark, light = ink(hue + 0.06, 0.75, value * 0.35), ink(hue - 0.03, 0.62, value * 1.3)
    stage.lay(height, mix(dark, light, tone))


def wood(stage: Stage, dice: Dice) -> None:
    """Planks with grain, joints and a finish between oak, walnut and whitewash."""
    upright = dice.chance(0.5)
    hue, saturation = dice.between(0.05, 0.1), dice.between(0.15, 0.6)
    value = dice.between(0.5, 0.85)
    count, shift = dice.between(3, 6), dice.between(0, 9)
    y = stage.y * count + shift
    plank = np.floor(y)
    f = y - plank
    seed = _scatter(stage, plank, plank)[:, None]
    fx, fy = 2.2, 16.0
    offset = dice.between(0, 60)
    if upright:
        warp = stage.octave(fy, fx, offset).T + 2 * seed
        fibre = stage.octave(150, 9, offset).T
    else:
        warp = stage.octave(fx, fy, offset) + 2 * seed
        fibre = stage.octave(9, 150, offset)
    rings = wave(warp * dice.between(0.8, 1.5) + stage.y[:, None] * dice.between(2, 7))
    gap = step(0.0, 0.035 * count / 4, np.minimum(f, 1 - f))[:, None]
    height = (gap - 1) * 0.008 + rings * 0.0008 + fibre * 0.0012
    tone = clamp(0.45 + 0.25 * rings + 0.3 * fibre + 0.5 * (seed - 0.5))
    light, dark = ink(hue, saturation * 0.8, value), ink(hue - 0.015, saturation, value * 0.62)
    color = mix(light, dark, tone) * (0.2 + 0.8 * gap)
    if upright:
        height, color = height.T, color.transpose(0, 2, 1)
    stage.lay(height, color)


def cobbles(stage: Stage, dice: Dice) -> None:
    """Rounded stones in staggered rows, wobbling, with moss or earth between them."""
    x, y = _turned(stage, dice.between(0, 1))
    wobble = dice.between(0.1, 0.2)
    rows = dice.between(5, 8)
    x = x * (rows * 0.8) + wobble * 2 * stage.octave(7, 7, dice.between(0, 60)) + 20
    y = y * rows + wobble * 2 * stage.octave(7, 7, dice.between(0, 60)) + 20
    row = np.floor(y)
    x = x + 3 * _scatter(stage, row, row)
    column = np.floor(x)
    shade = _scatter(stage, column, row)
    # A superellipse: round in the corners, flat on the sides.
    a, b = np.abs(x - column - 0.5) * 2, np.abs(y - row - 0.5) * 2
    a, b = a * a, b * b
    fill = clamp(1.02 - (a * a * a + b * b * b))
    dome = np.sqrt(fill)
    rough = stage.octave(40, 40, dice.between(0, 60)) + stage.octave(110, 110, 3.0)
    height = dome * dice.between(0.012, 0.022) + rough * 0.0014
    hue, saturation = dice.between(0, 1), dice.between(0.02, 0.14)
    value = dice.between(0.5, 0.75)
    light, dark = ink(hue, saturation, value * 1.15), ink(hue + 0.05, saturation * 1.5, value * 0.6)
    joint = ink(dice.between(0.08, 0.27), 0.5, value * 0.42)
    stone = mix(light, dark, clamp(shade * 0.9 + 0.14 * rough))
    stage.lay(height, mix(joint, stone, step(0.0, 0.5, dome)))


def cloth(stage: Stage, dice: Dice) -> None:
    """A checked weave with folds."""
    x, y = _turned(stage, dice.between(0, 1))
    fold = stage.octave(2.5, 2.5, dice.between(0, 60))
    x, y = x + fold * 0.02 + 2, y - fold * 0.02 + 2
    threads = dice.between(34, 44)
    p, q = wave(x * threads), wave(y * threads)
    weave = p * q
    hue = dice.between(0, 1)
    saturation, value = dice.between(0.1, 0.6), dice.between(0.5, 0.9)
    base = ink(hue, saturation, value)
    check = ink(hue + dice.choice((0.0, 0.08, 0.5)), saturation, value * dice.between(0.5, 0.8))
    pale = ink(hue, 0.06, 0.95)
    count, share = dice.between(3, 6), dice.between(-0.4, 0.3)
    bands = [step(share - 0.1, share + 0.1, wave(t * count)) for t in (x, y)]
    lines = [step(0.93, 0.98, wave(t * count + 0.5)) for t in (x, y)]
    color = mix(base, check, (bands[0] + bands[1]) * 0.5)
    color = mix(color, pale, np.maximum(*lines) * dice.choice((0.0, 0.7)))
    height = fold * dice.between(0.012, 0.035) + weave * 0.0007
    stage.lay(height, color * (0.9 + 0.1 * weave))


def water(stage: Stage, dice: Dice) -> None:
    """A shallow bed of sand under ripples, with the net of light they throw."""
    depth = dice.between(0.3, 0.8)
    f = dice.between(5, 8)
    first, second = stage.octave(f, f, dice.between(0, 60)), stage.octave(f, f, dice.between(0, 60))
    third = stage.octave(f * 1.9, f * 1.9, dice.between(0, 60))
    net = 1 - np.abs(first + 0.35 * third) * 1.5
    web = 1 - np.abs(second - 0.35 * third) * 1.5
    net = clamp(np.maximum(net, web))
    net = net * net
    net = net * net
    bed = stage.octave(30, 30, dice.between(0, 60)) + stage.octave(95, 95, 9.0)
    hue = dice.between(0.45, 0.57)
    shallow, deep = ink(0.12, 0.22, 0.95), ink(hue, 0.62, 0.85)
    tone = clamp(depth + 0.25 * stage.octave(2.5, 2.5, 5.0) + 0.08 * bed)
    color = mix(shallow, deep, tone) * (0.7 + 0.75 * net + 0.07 * bed)
    stage.lay(first * 0.01 + bed * 0.0008, color)


GROUNDS: tuple[Callable[[Stage, Dice], None], ...] = (sand, grass, wood, cobbles, cloth, water)

CALM = (sand, wood, cobbles)
"""Those without strong colors, on which a small model soon finds what is yellow or blue."""
