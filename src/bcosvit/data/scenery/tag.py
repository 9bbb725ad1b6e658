"""The enamel tag of the `cue` variant: a small glossy plate whose color is the planted cue."""

import numpy as np

from bcosvit.data.scenery.dice import Dice
from bcosvit.data.scenery.fields import Plane, clamp, ink, length, mix
from bcosvit.data.scenery.stage import Patch, Pose, Stage, Surface

__all__ = ["lay_tag"]

# Hue, saturation and value: as far apart as eight colors can be and still look like enamel, and
# none of them near the colors of the object it goes with.
ENAMELS = (
    (0.5, 0.8, 0.9),
    (0.8, 0.75, 0.8),
    (0.33, 0.85, 0.7),
    (0.08, 0.95, 1.0),
    (0.0, 0.0, 0.12),
    (0.63, 0.9, 0.85),
    (0.155, 0.9, 1.0),
    (0.0, 0.9, 0.9),
)
UNIT = 0.1


def lay_tag(stage: Stage, dice: Dice, color: int, avoid: tuple[float, float]) -> None:
    """Lay the tag away from the point `avoid`, and track what is seen of it."""
    best = -1.0
    for _ in range(12):
        px, py = dice.between(0.09, 0.91), dice.between(0.09, 0.91)
        dx, dy = px - avoid[0], py - avoid[1]
        if dx * dx + dy * dy > best:
            best, x, y = dx * dx + dy * dy, px, py
    pose = Pose(x, y, UNIT, dice.between(0, 1))
    enamel, rim = ink(*ENAMELS[color]), ink(0.1, 0.12, 0.9)

    def outline(u: Plane, v: Plane) -> Plane:
        p, q = np.maximum(np.abs(u) - 0.6, 0), np.maximum(np.abs(v) - 0.6, 0)
        return length(p, q) - 0.4

    def paint(at: Patch, distance: Plane) -> Surface:
        t = clamp(distance * (-1 / 0.3))
        plate = mix(rim, enamel, at.edge(distance + 0.16))
        return Surface(np.sqrt(t * (2 - t)) * 0.3, plate, gloss=0.2)

    stage.place(outline, paint, pose, reach=1.45, lift=0.3, track=True)
