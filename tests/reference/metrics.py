"""The metrics, pixel by pixel and in plain NumPy, as the paper describes them."""

import numpy as np


def sigmoid(logits):
    return 1 / (1 + np.exp(-np.asarray(logits, float)))


def softmax(logits):
    powers = np.exp(np.asarray(logits, float) - np.max(logits))
    return powers / powers.sum()


def shrunk_grid(images):
    """Four images [c, h, w] in reading order as one of the same size, by averaging 2×2 pixels."""
    c, h, w = images[0].shape
    large = np.zeros((c, 2 * h, 2 * w))
    for cell, image in enumerate(images):
        for y in range(h):
            for x in range(w):
                large[:, y + h * (cell // 2), x + w * (cell % 2)] = image[:, y, x]
    small = np.zeros((c, h, w))
    for y in range(h):
        for x in range(w):
            for dy in (0, 1):
                for dx in (0, 1):
                    small[:, y, x] += large[:, 2 * y + dy, 2 * x + dx] / 4
    return small


def positive_share(attribution, inside):
    """Σ positive attribution inside / Σ positive attribution; 0 where there is none."""
    right = everything = 0.0
    for value, weight in zip(attribution.ravel(), np.asarray(inside).ravel(), strict=True):
        if value > 0:
            right += value * weight
            everything += value
    return right / everything if everything else 0.0


def cell_score(attribution, cell):
    """The share of an even-sided map's positive attribution in one quarter."""
    h, w = attribution.shape
    inside = np.zeros((h, w))
    top, left = (cell // 2) * h // 2, (cell % 2) * w // 2
    inside[top : top + h // 2, left : left + w // 2] = 1
    return positive_share(attribution, inside)


def perturbation(encoded, attribution, confidence, share, points):
    """Confidences with the most, and with the least, important pixels zeroed.

    ``confidence`` is a function of the encoded image [c, h, w]; attributions must all differ.
    """
    c, h, w = encoded.shape
    pixels = [(y, x) for y in range(h) for x in range(w)]
    curves = []
    for sign in (-1, 1):
        order = sorted(pixels, key=lambda pixel: sign * attribution[pixel])
        curve = []
        for point in range(points):
            image = encoded.copy()
            for y, x in order[: round(share * point / (points - 1) * h * w)]:
                for channel in range(c):
                    image[channel, y, x] = 0
            curve.append(float(confidence(image)))
        curves.append(curve)
    return curves


def area_between_curves(curves, share):
    """From the curves of all images: mean, divide by the start, area of least over most."""
    most = [np.mean([image[0][p] for image in curves]) for p in range(len(curves[0][0]))]
    least = [np.mean([image[1][p] for image in curves]) for p in range(len(curves[0][0]))]
    most, least = [v / most[0] for v in most], [v / least[0] for v in least]
    step, area = share / (len(most) - 1), 0.0
    for p in range(len(most) - 1):
        area += step * ((least[p] - most[p]) + (least[p + 1] - most[p + 1])) / 2
    return area
