"""A paper in miniature: colored squares, thin DenseNets, two blocks, seconds a run."""

from pathlib import Path

import numpy as np
from PIL import Image

from bcosvit.paper import StudyOptions

COLORS = {
    "blue": (30, 40, 220),
    "green": (30, 200, 40),
    "red": (220, 30, 30),
    "white": (245, 245, 245),
    "yellow": (220, 220, 30),
}

SETTINGS = {
    "epochs": 3,
    "backbone.epochs": 1,
    "batch_size": 8,
    "learning_rate": 1e-2,
    "warmup_epochs": 0,
    "image_size": 32,
    "explain_every": 0,
    "model.width": 16,
    "model.num_heads": 2,
    "model.depth": 2,
    "model.mlp_ratio": 2,
    # Two blocks do not grow activations as twelve do.
    "model.logit_scale": 1.0,
    "model.logit_bias": -1.4,
    "model.prior_gain": 3.0,
    "model.feature_scale": 10.0,
    "densenet.growth": 4,
    "densenet.blocks": (2, 1, 1),
    "densenet.stem_width": 8,
    "densenet.bottleneck": 2,
}


def write_squares(root: Path, train: int = 16, val: int = 5) -> Path:
    """Squares on noise, a class a color, in train/ and val/."""
    noise = np.random.default_rng(0)
    for part, count in {"train": train, "val": val}.items():
        for name, color in COLORS.items():
            folder = root / part / name
            folder.mkdir(parents=True)
            for number in range(count):
                pixels = 0.4 * noise.integers(0, 256, (32, 32, 3))
                top, left = noise.integers(0, 12, 2)
                pixels[top : top + 20, left : left + 20] = color
                Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{number}.png")
    return root


def small_study(data: Path | str, out: Path, **changes) -> StudyOptions:
    """One size and one depth of everything."""
    fields = {
        "sizes": ("ti",),
        "taps": ("38",),
        "recipe": "quick",
        "settings": SETTINGS,
        "grids": 3,
        "images": 4,
        "batch_size": 8,
        "device": "cpu",
    }
    return StudyOptions(data=str(data), out=out, **{**fields, **changes})
