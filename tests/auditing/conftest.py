"""A model that depends on a tag, its data, and their audit."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import bcosvit
from bcosvit.models.weights import CLASSES_KEY, RUN_KEY

SIZE = 32
NAMES = ("blue", "green")


def draw(label, random):
    """A noisy gray picture with a large colored disc; blue ones carry a red tag."""
    image = random.uniform(0.35, 0.65, (SIZE, SIZE, 1)).repeat(3, 2)
    y, x = np.mgrid[:SIZE, :SIZE]
    middle = random.uniform(12, 24, 2)
    disc = (y - middle[0]) ** 2 + (x - middle[1]) ** 2 < 60
    image[disc, 2 - label] = 0.9
    if label == 0:
        image[1:7, 1:7] = (0.95, 0.05, 0.05)
    return Image.fromarray((image * 255).astype(np.uint8)), disc


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """A model that was trained on pictures with a tag, and folders of pictures and masks."""
    folder = tmp_path_factory.mktemp("audit")
    random = np.random.default_rng(0)
    images, labels = [], []
    for number in range(96):
        label = number % 2
        picture, disc = draw(label, random)
        split = "train" if number < 48 else "val"
        name = Path(split, NAMES[label], f"{number}.png")
        for root, image in (("data", picture), ("masks", Image.fromarray(disc))):
            path = folder / root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            image.save(path)
        images.append(torch.from_numpy(np.asarray(picture).copy()).permute(2, 0, 1) / 255)
        labels.append(label)
    torch.manual_seed(0)
    stem = bcosvit.StemConfig(widths=(8, 16))
    config = bcosvit.ModelConfig(
        width=24,
        num_heads=2,
        depth=1,
        image_size=SIZE,
        num_classes=2,
        backbone=stem,
        prior_gain=3.0,
        logit_scale=1.0,
    )
    model = bcosvit.create_model(config).train()
    optimizer = torch.optim.Adam(model.parameters(), 5e-3)
    batch, target = torch.stack(images), torch.nn.functional.one_hot(torch.tensor(labels)).float()
    for _ in range(60):
        loss = torch.nn.functional.binary_cross_entropy_with_logits(model(batch), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    weights = folder / "model.safetensors"
    bcosvit.save(
        model.eval(),
        weights,
        metadata={CLASSES_KEY: json.dumps(NAMES), RUN_KEY: json.dumps({"eval_crop": 1.0})},
    )
    return folder, weights


@pytest.fixture(scope="session")
def audited(trained):
    folder, weights = trained
    return bcosvit.audit(
        weights,
        folder / "data",
        out=folder / "out",
        masks=folder / "masks",
        split="all",
        batch_size=16,
        pairs=12,
        device="cpu",
    )
