"""From a conventional CNN to a B-cos network on drawn scenes, in minutes on a CPU.

    python benchmarks/bcosify_scenes.py [--network mobilenet] [--variant hard] [--size 64]
        [--seed 0] [--figure scenes.png]

A small CNN (convolutions, batch norms, ReLU), a ResNet or a MobileNetV2 is trained as usual,
converted by `bcosvit.bcosify`, and fine-tuned with the recipe `bcosify`, taught by itself.
Accuracy, the share of the positive contribution on the object (energy; masks of the validation
scenes), the grid pointing game and the residual's share of the logit are printed for the untouched
conversion (λ = 1, B = 1) and for the fine-tuned network (λ = 0, B = 2).
"""

import argparse
import math
import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bcosvit
import bcosvit.data.scenes as scenes_module
from bcosvit._torchvision import torchvision
from bcosvit.data.images import to_tensor
from bcosvit.data.labeled import labeled_images
from bcosvit.data.scenes import VARIANTS, Scenes
from bcosvit.data.sources import open_source
from bcosvit.data.transforms import EvalTransform
from bcosvit.metrics import GridPointingGame, MaskOverlap, evaluate
from bcosvit.models import Bcosified
from bcosvit.report.images import Tile, contribution_image, panel, photo_image
from bcosvit.train import train

MEAN, STD = (0.5, 0.5, 0.5), (0.25, 0.25, 0.25)
BATCH = 32


def cnn(classes: int) -> nn.Sequential:
    """Five convolutions with batch norms and ReLU; 0.1 million parameters."""
    layers: list[nn.Module] = []
    before = 3
    for width, stride in ((16, 2), (32, 1), (48, 2), (64, 1), (96, 2)):
        layers += [nn.Conv2d(before, width, 3, stride, 1), nn.BatchNorm2d(width), nn.ReLU()]
        before = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(96, classes))


class Block(nn.Module):
    """A residual block of two convolutions."""

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(before, width, 3, stride, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, 1, 1, bias=False),
            nn.BatchNorm2d(width),
        )
        self.skip: nn.Module = nn.Identity()
        if before != width or stride != 1:
            convolution = nn.Conv2d(before, width, 1, stride, bias=False)
            self.skip = nn.Sequential(convolution, nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x) + self.skip(x))


def resnet(classes: int) -> nn.Sequential:
    """A ResNet of seven blocks, 16 convolutions; 0.4 million parameters."""
    layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16)]
    layers += [nn.ReLU(), nn.MaxPool2d(2)]
    before = 16
    for width, stride in ((16, 1), (32, 1), (32, 1), (64, 2), (64, 1), (96, 2), (96, 1)):
        layers.append(Block(before, width, stride))
        before = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(96, classes))


def resnet18(classes: int) -> nn.Sequential:
    """ResNet-18 at half its width: a 7×7 stem, a max pool, eight blocks; 2.8 million parameters."""
    layers: list[nn.Module] = [nn.Conv2d(3, 32, 7, 2, 3, bias=False), nn.BatchNorm2d(32)]
    layers += [nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    before = 32
    for width, stride in zip(
        (32, 32, 64, 64, 128, 128, 256, 256), (1, 1, 2, 1, 2, 1, 2, 1), strict=True
    ):
        layers.append(Block(before, width, stride))
        before = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, classes))


def mobilenet(classes: int) -> nn.Module:
    """MobileNetV2 at 0.35 of its width with a stem of stride 1; 0.4 million parameters."""
    model = torchvision.models.mobilenet_v2(num_classes=classes, width_mult=0.35, dropout=0.0)
    model.features[0][0].stride = (1, 1)
    return model


NETWORKS = {"cnn": cnn, "resnet": resnet, "resnet18": resnet18, "mobilenet": mobilenet}


def normalized(images: Tensor) -> Tensor:
    return (images - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)


def train_original(network: str, scenes: Scenes, epochs: int) -> nn.Module:
    """Trains the CNN with Adam and softmax cross-entropy on mirrored and shifted scenes."""
    images = torch.stack([to_tensor(scenes[index].image) for index in range(len(scenes))])
    labels = torch.tensor([scenes.label(index) for index in range(len(scenes))])
    model = NETWORKS[network](len(scenes.classes))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    steps = epochs * (len(images) // BATCH)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(epochs):
        for chosen in torch.randperm(len(images)).split(BATCH)[: len(images) // BATCH]:
            batch = images[chosen]
            batch = torch.where(torch.rand(BATCH, 1, 1, 1) < 0.5, batch.flip(3), batch)
            down, right = torch.randint(-4, 5, (2,)).tolist()
            batch = batch.roll((down, right), (2, 3))
            loss = F.cross_entropy(model(normalized(batch)), labels[chosen])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    return model.eval()


def measure(name: str, model: Bcosified, data: str) -> float:
    """Prints one row of the table; returns the energy on the object."""
    size = model.config.image_size[0]
    images = labeled_images(open_source(data), "val", None, EvalTransform(size, 1.0))
    found = evaluate(
        model, images, metrics=[MaskOverlap(), GridPointingGame()], masks=images.masks()
    )
    energy = found["masks"].means["inherent"]["energy"]
    # None where too few images are classified rightly for a grid.
    grids = found["localization"].means.get("inherent")
    pointing = math.nan if grids is None else grids.mean
    some = torch.stack([images[index][0] for index in range(64)])
    explained = bcosvit.explain(model, some)
    assert explained.residual is not None and explained.logit is not None
    share = (explained.residual / explained.logit).abs().median()
    print(
        f"{name:<34} {found.accuracy.top1.mean:8.1%} {energy.mean:8.1%} "
        f"[{energy.low:.1%}, {energy.high:.1%}] {pointing:8.1%} {share:8.2f}",
        flush=True,
    )
    return energy.mean


def draw(path: Path, scenes: Scenes, before: Bcosified, after: Bcosified) -> None:
    """One row of scenes, and the contributions to their class before and after fine-tuning."""
    rows: list[list[Tile]] = [[], [], []]
    for index in range(6):
        scene = scenes[index]
        image = to_tensor(scene.image)
        rows[0].append(Tile(image=photo_image(image), label=scenes.classes[scene.label]))
        for row, model, label in ((1, before, "λ = 1, B = 1"), (2, after, "λ = 0, B = 2")):
            found = bcosvit.explain(model, image[None], scene.label)
            rows[row].append(Tile(image=contribution_image(found.map[0]), label=label))
    panel(rows).save(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--network", choices=NETWORKS, default="cnn")
    parser.add_argument("--variant", choices=VARIANTS, default="plain", help="of scenes")
    parser.add_argument("--size", type=int, default=48, help="pixels a side")
    parser.add_argument("--area", type=float, nargs=2, help="of objects, as shares of the image")
    parser.add_argument("--scenes", type=int, default=2000, help="for training")
    parser.add_argument("--epochs", type=int, default=12, help="of the original")
    parser.add_argument("--tuned-epochs", type=int, default=16, help="of the recipe bcosify")
    parser.add_argument("--mixup", type=float, default=0.5, help="of the recipe bcosify")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--figure", type=Path, help="a picture to write")
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    if options.area is not None:
        scenes_module.AREA = tuple(options.area)
    data = f"scenes:{options.variant}?size={options.size}&train={options.scenes}"
    start = time.perf_counter()
    scenes = Scenes("train", options.variant, options.size, options.scenes)
    original = train_original(options.network, scenes, options.epochs)
    trained = time.perf_counter() - start
    converted = bcosvit.bcosify(original, mean=MEAN, std=STD, image_size=options.size, b=1.0)
    print(f"{'':<34} accuracy   energy {'':<14}   grids  residual / logit (median)")
    before = measure("converted, λ = 1, B = 1", converted, data)
    with tempfile.TemporaryDirectory() as folder:
        weights = Path(folder) / "converted.safetensors"
        bcosvit.save(converted, weights)
        start = time.perf_counter()
        run = train(
            data,
            out=Path(folder) / "run",
            init=weights,
            recipe="bcosify",
            settings={
                "epochs": options.tuned_epochs,
                "batch_size": BATCH,
                "label_weight": 1.0,
                "mixup": options.mixup,
                "crop": (0.6, 1.0),
                "eval_crop": 1.0,
                "num_workers": 0,
                "explain_every": 0,
                "localize_every": 4,
                # An average over the last 50 of some hundred steps.
                "ema": 0.98,
                "seed": options.seed,
            },
            accelerator="cpu",
        )
        tuned = time.perf_counter() - start
        print((run.folder / "metrics.csv").read_text())
        model = bcosvit.load(run.weights)
    assert isinstance(model, Bcosified)
    after = measure("fine-tuned, λ = 0, B = 2", model, data)
    print(f"energy: {after / before:.2f} times that of the untouched conversion")
    print(f"training of the original {trained:.0f} s, fine-tuning {tuned:.0f} s")
    if options.figure is not None:
        draw(options.figure, Scenes("val", options.variant, options.size), converted, model)


if __name__ == "__main__":
    main()
