"""The color image of W(x) pixel by pixel, in plain loops."""

import math

import numpy as np


def color_image(weights, contributions, smooth=15, percentile=99.5):
    """[6, H, W] and [H, W] -> RGBA [4, H, W]."""
    _, height, width = weights.shape
    out = np.zeros((4, height, width))
    strength = np.zeros((height, width))
    for y in range(height):
        for x in range(width):
            row = [float(value) for value in weights[:, y, x]]
            largest = max(abs(value) for value in row)
            if largest == 0:
                continue
            scaled = [max(value / largest, 0.0) for value in row]
            for channel in range(3):
                both = scaled[channel] + scaled[channel + 3]
                out[channel, y, x] = scaled[channel] / both if both > 0 else 0.0
            if contributions[y, x] >= 0:
                strength[y, x] = math.sqrt(sum(value**2 for value in row))
    before, after = (smooth - 1) // 2, smooth // 2
    for y in range(height):
        for x in range(width):
            total = 0.0
            for v in range(y - before, y + after + 1):
                for u in range(x - before, x + after + 1):
                    if 0 <= v < height and 0 <= u < width:
                        total += strength[v, u]
            out[3, y, x] = total / smooth**2
    full = between(sorted(out[3].flatten()), percentile)
    for y in range(height):
        for x in range(width):
            value = out[3, y, x]
            if full > 0:
                out[3, y, x] = min(value / full, 1.0)
            else:
                out[3, y, x] = 1.0 if value > 0 else 0.0
    return out


def between(ordered, percentile):
    """The percentile of a sorted list, linearly between its neighbors."""
    position = (len(ordered) - 1) * percentile / 100
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (position - below) * (ordered[above] - ordered[below])
