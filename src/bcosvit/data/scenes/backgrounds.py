"""What a scene lies on: sand, grass, wood, cobbles, cloth or shallow water.

A background is a function of the canvas and its random numbers that returns a height [N,N] and a
color [3,N,N]. It never sees the label, so that it says nothing about the class.
"""

import numpy as np

from bcosvit.data.scenes.render import (
    Canvas,
    Plane,
    Random,
    clamp,
    frac,
    mix,
    rotate,
    step,
    unit_vector,
    wave,
)


def _rotated(canvas: Canvas, turn: float) -> tuple[Plane, Plane]:
    return rotate(canvas.axis, canvas.axis[:, None], *unit_vector(turn))


def _per_cell(canvas: Canvas, *cells: Plane) -> Plane:
    """A random number in [0, 1) for each cell, the same at every pixel of the cell."""
    column, row = (cell.astype(np.int32) for cell in cells)
    flat = canvas.lattice.reshape(-1)
    picked: Plane = flat[(column * 1619 + row * 31337 + ((column * row) << 3)) & (flat.size - 1)]
    return picked


def sand(canvas: Canvas, random: Random) -> tuple[Plane, Plane]:
    """Ripples, grains, and drifts of a second shade."""
    hue, value = random(0.08, 0.13), random(0.82, 1.0)
    drift = canvas.noise(3)
    along, _ = _rotated(canvas, random())
    ripple = wave(along * random(5, 11) + drift * random(0.25, 0.5))
    grain, fine = canvas.noise(90), canvas.noise(190)
    height = ripple * random(0.002, 0.008) + drift * 0.012 + grain * 0.0011
    tone = clamp(0.5 - 0.35 * drift - 0.18 * ripple - 0.22 * grain - 0.3 * fine)
    light, dark = random.color(hue, 0.3, value), random.color(hue - 0.02, 0.45, value * 0.72)
    return height, mix(light, dark, tone)


def grass(canvas: Canvas, random: Random) -> tuple[Plane, Plane]:
    """Five layers of blades; each blade fills a long cell of its layer's rotated grid."""
    lean, hue, value = random(), random(0.19, 0.31), random(0.5, 0.68)
    tone = 0.12 + 0.06 * canvas.noise(24)
    height = np.zeros_like(tone)
    scale = random(0.85, 1.25)
    for layer in range(5):
        along, across = _rotated(canvas, lean + random(-0.13, 0.13))
        across = across * (30 * scale) + random(0, 60)
        along = along * (5.5 * scale) + random(0, 60)
        # A blade bends sideways as it rises.
        across = across + 0.35 * wave(along * 0.31)
        column = np.floor(across)
        along = along + 7 * _per_cell(canvas, column, column)
        row = np.floor(along)
        a, b = along - row, across - column - 0.5
        shade = _per_cell(canvas, column, row)
        width = 0.46 * (1 - a * a) * (0.5 + 0.5 * shade)
        inside = step(0.08, -0.08, np.abs(b) - width)
        blade = (0.22 + 0.14 * layer) * (0.45 + 0.75 * a) * (0.55 + 0.7 * shade) + b * 0.18
        tone = mix(tone, blade, inside)
        height = mix(height, (0.004 + 0.002 * layer) * a, inside)
    tone = clamp(tone + 0.12 * canvas.noise(4))
    dark = random.color(hue + 0.06, 0.75, value * 0.35)
    return height, mix(dark, random.color(hue - 0.03, 0.62, value * 1.3), tone)


def wood(canvas: Canvas, random: Random) -> tuple[Plane, Plane]:
    """Planks with grain and joints, in colors from oak to whitewash."""
    upright = random() < 0.5
    hue, saturation, value = random(0.05, 0.1), random(0.15, 0.6), random(0.5, 0.85)
    count, shift = random(3, 6), random(0, 9)
    y = canvas.axis * count + shift
    plank = _per_cell(canvas, np.floor(y), np.floor(y))[:, None]
    offset = random(0, 60)
    if upright:
        warp, fiber = canvas.noise(16.0, 2.2, offset).T, canvas.noise(150, 9, offset).T
    else:
        warp, fiber = canvas.noise(2.2, 16.0, offset), canvas.noise(9, 150, offset)
    warp = warp + 2 * plank
    rings = wave(warp * random(0.8, 1.5) + canvas.axis[:, None] * random(2, 7))
    gap = step(0.0, 0.035 * count / 4, np.minimum(frac(y), 1 - frac(y)))[:, None]
    height = (gap - 1) * 0.008 + rings * 0.0008 + fiber * 0.0012
    tone = clamp(0.45 + 0.25 * rings + 0.3 * fiber + 0.5 * (plank - 0.5))
    light = random.color(hue, saturation * 0.8, value)
    dark = random.color(hue - 0.015, saturation, value * 0.62)
    color = mix(light, dark, tone) * (0.2 + 0.8 * gap)
    return (height.T, color.transpose(0, 2, 1)) if upright else (height, color)


def cobbles(canvas: Canvas, random: Random) -> tuple[Plane, Plane]:
    """Rounded stones in staggered rows, with moss or earth between them."""
    x, y = _rotated(canvas, random())
    wobble, rows = random(0.1, 0.2), random(5, 8)
    x = x * (rows * 0.8) + wobble * 2 * canvas.noise(7) + 20
    y = y * rows + wobble * 2 * canvas.noise(7) + 20
    row = np.floor(y)
    x = x + 3 * _per_cell(canvas, row, row)
    shade = _per_cell(canvas, np.floor(x), row)
    # A superellipse: round in the corners, flat on the sides.
    a, b = np.abs(frac(x) - 0.5) * 2, np.abs(frac(y) - 0.5) * 2
    a, b = a * a, b * b
    dome = np.sqrt(clamp(1.02 - (a * a * a + b * b * b)))
    rough = canvas.noise(40) + canvas.noise(110, offset=3.0)
    height = dome * random(0.012, 0.022) + rough * 0.0014
    hue, saturation, value = random(), random(0.02, 0.14), random(0.5, 0.75)
    light = random.color(hue, saturation, value * 1.15)
    dark = random.color(hue + 0.05, saturation * 1.5, value * 0.6)
    joint = random.color((0.08, 0.27), 0.5, value * 0.42)
    stone = mix(light, dark, clamp(shade * 0.9 + 0.14 * rough))
    return height, mix(joint, stone, step(0.0, 0.5, dome))


def cloth(canvas: Canvas, random: Random) -> tuple[Plane, Plane]:
    """A checked weave with folds."""
    x, y = _rotated(canvas, random())
    fold = canvas.noise(2.5)
    x, y = x + fold * 0.02 + 2, y - fold * 0.02 + 2
    threads = random(34, 44)
    weave = wave(x * threads) * wave(y * threads)
    hue, saturation, value = random(), random(0.1, 0.6), random(0.5, 0.9)
    base, pale = random.color(hue, saturation, value), random.color(hue, 0.06, 0.95)
    other = hue + random.choice((0.0, 0.08, 0.5))
    check = random.color(other, saturation, value * random(0.5, 0.8))
    count, share = random(3, 6), random(-0.4, 0.3)
    bands = [step(share - 0.1, share + 0.1, wave(t * count)) for t in (x, y)]
    lines = [step(0.93, 0.98, wave(t * count + 0.5)) for t in (x, y)]
    color = mix(base, check, (bands[0] + bands[1]) * 0.5)
    color = mix(color, pale, np.maximum(*lines) * random.choice((0.0, 0.7)))
    height = fold * random(0.012, 0.035) + weave * 0.0007
    return height, color * (0.9 + 0.1 * weave)


def water(canvas: Canvas, random: Random) -> tuple[Plane, Plane]:
    """A shallow bed of sand under ripples and the net of light that they make."""
    depth, f = random(0.3, 0.8), random(5, 8)
    first, second, third = canvas.noise(f), canvas.noise(f), canvas.noise(f * 1.9)
    nets = [1 - np.abs(t) * 1.5 for t in (first + 0.35 * third, second - 0.35 * third)]
    net = clamp(np.maximum(*nets))
    net = net * net
    net = net * net
    bed = canvas.noise(30) + canvas.noise(95, offset=9.0)
    shallow, deep = random.color(0.12, 0.22, 0.95), random.color((0.45, 0.57), 0.62, 0.85)
    tone = clamp(depth + 0.25 * canvas.noise(2.5, offset=5.0) + 0.08 * bed)
    color = mix(shallow, deep, tone) * (0.7 + 0.75 * net + 0.07 * bed)
    return first * 0.01 + bed * 0.0008, color


BACKGROUNDS = (sand, grass, wood, cobbles, cloth, water)

PALE_BACKGROUNDS = (sand, wood, cobbles)
"""Those without strong colors, on which a small model soon finds what is yellow or blue."""
