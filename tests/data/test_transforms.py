"""What comes out of the transforms, against slow and independent ways of getting there."""

import pickle
import subprocess
import sys
from dataclasses import FrozenInstanceError
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from bcosvit.data import transforms
from bcosvit.data.images import read_image
from bcosvit.data.transforms import EvalTransform, TrainTransform


def smooth(width: int, height: int, seed: int = 0) -> Image.Image:
    """A picture with structure at several scales, neither flat nor noise."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 255, (12, 16, 3), np.uint8))
    return coarse.resize((width, height), Image.Resampling.BICUBIC)


@pytest.mark.parametrize("size", [(500, 375), (375, 500), (224, 224), (31, 90), (1, 1), (3000, 7)])
@pytest.mark.parametrize("make", [TrainTransform, EvalTransform])
def test_any_picture_gives_a_tensor_of_the_right_kind(make, size: tuple[int, int]) -> None:
    torch.manual_seed(0)
    tensor = make(48)(smooth(*size))
    assert tensor.shape == (3, 48, 48)
    assert tensor.dtype == torch.float32
    assert tensor.is_contiguous()
    assert tensor.min() >= 0
    assert tensor.max() <= 1


@pytest.mark.parametrize("size", [(500, 375), (375, 500), (300, 300), (200, 1000)])
def test_eval_is_pillows_resize_and_centre_crop(size: tuple[int, int]) -> None:
    image = smooth(*size)
    width, height = size
    scale = 256 / min(size)
    resized = image.resize((int(width * scale), int(height * scale)), Image.Resampling.BILINEAR)
    left, top = (resized.width - 224) // 2, (resized.height - 224) // 2
    expected = np.asarray(resized.crop((left, top, left + 224, top + 224))) / 255
    got = EvalTransform(224)(image).permute(1, 2, 0).numpy()
    assert np.abs(got - expected).max() < 1.5 / 255


def test_eval_keeps_the_papers_proportion() -> None:
    assert EvalTransform(224).resize == 256
    assert EvalTransform(48).resize == 55
    assert EvalTransform(48, crop_fraction=1).resize == 48


def test_train_without_chance_is_a_plain_resize() -> None:
    image = smooth(64, 64)
    tensor = TrainTransform(32, rand_augment=(0, 0), flip=0.0, scale=(1.0, 1.0))
    # Of a square picture a crop of the whole area can only be the picture, or slimmer ones fail.
    whole = np.asarray(image.resize((32, 32), Image.Resampling.BILINEAR)) / 255
    torch.manual_seed(0)
    got = tensor(image).permute(1, 2, 0).numpy()
    assert np.abs(got - whole).max() < 1.5 / 255


def test_flip_is_a_mirror_with_the_given_probability() -> None:
    image = smooth(64, 64)
    plain = TrainTransform(32, (0, 0), flip=0.0, scale=(1.0, 1.0))(image)
    mirrored = TrainTransform(32, (0, 0), flip=1.0, scale=(1.0, 1.0))(image)
    assert torch.equal(mirrored, plain.flip(-1))
    assert not torch.equal(mirrored, plain)
    half = TrainTransform(32, (0, 0), flip=0.5, scale=(1.0, 1.0))
    torch.manual_seed(0)
    count = sum(torch.equal(half(image), mirrored) for _ in range(100))
    assert 30 < count < 70


def test_crops_cover_the_given_share_of_the_area() -> None:
    # Red encodes x and green y, so that a crop tells where it came from.
    x, y = np.meshgrid(np.arange(256), np.arange(256))
    image = Image.fromarray(np.stack([x, y, 0 * x], -1).astype(np.uint8))
    transform = TrainTransform(64, (0, 0), scale=(0.2, 0.5))
    torch.manual_seed(0)
    shares = []
    for _ in range(60):
        red, green, _ = transform(image)
        shares.append(float((red.amax() - red.amin()) * (green.amax() - green.amin())))
    assert 0.15 < min(shares) < 0.26
    assert 0.42 < max(shares) < 0.55


def test_augmentation_changes_pictures_and_follows_the_seed() -> None:
    image = smooth(64, 64)
    transform = TrainTransform(32, scale=(1.0, 1.0), flip=0.0)
    outputs = []
    for seed in (0, 1, 2, 3, 0):
        torch.manual_seed(seed)
        outputs.append(transform(image))
    assert torch.equal(outputs[0], outputs[4])
    different = {tuple(output.flatten().tolist()) for output in outputs}
    assert len(different) >= 3


def test_the_input_is_left_alone() -> None:
    image = smooth(40, 30)
    before = image.tobytes()
    torch.manual_seed(0)
    TrainTransform(32)(image)
    EvalTransform(32)(image)
    assert image.tobytes() == before


def test_reduced_decoding_hardly_shows(tmp_path: Path) -> None:
    path = tmp_path / "large.jpg"
    smooth(2400, 1800).save(path, quality=95)
    transform = EvalTransform(224)
    small = read_image(path, at_least=transform.at_least)
    assert small.size == (1200, 900)
    whole = transform(read_image(path))
    assert (transform(small) - whole).abs().mean() < 0.5 / 255


def test_at_least_keeps_the_smallest_crop_from_being_blown_up() -> None:
    transform = TrainTransform(224)
    side = transform.at_least
    torch.manual_seed(0)
    boxes = [transform._crop.make_params([Image.new("RGB", (side, side))]) for _ in range(300)]
    assert min(min(box["width"], box["height"]) for box in boxes) >= 224
    assert side < 1000


@pytest.mark.parametrize(
    "options",
    [
        {"image_size": 0},
        {"image_size": 8, "rand_augment": (-1, 9)},
        {"image_size": 8, "rand_augment": (2, 31)},
        {"image_size": 8, "flip": 1.5},
        {"image_size": 8, "scale": (0.0, 1.0)},
        {"image_size": 8, "scale": (0.9, 0.5)},
    ],
)
def test_impossible_settings_are_refused(options: dict) -> None:
    with pytest.raises(ValueError, match=next(k for k in reversed(options))):
        TrainTransform(**options)


def test_impossible_eval_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="crop_fraction"):
        EvalTransform(32, crop_fraction=1.5)
    with pytest.raises(ValueError, match="image_size is -1"):
        EvalTransform(-1)


def test_they_travel_to_workers_and_show_their_settings() -> None:
    transform = TrainTransform(16, flip=0.25)
    torch.manual_seed(0)
    transform(smooth(20, 20))
    copy = pickle.loads(pickle.dumps(transform))
    assert copy == transform
    assert repr(copy) == (
        "TrainTransform(image_size=16, rand_augment=(2, 9), flip=0.25, scale=(0.08, 1.0))"
    )
    with pytest.raises(FrozenInstanceError):
        transform.flip = 0.5  # type: ignore[misc]
    assert TrainTransform(image_size=16, flip=0.25) == transform


def test_heavy_libraries_are_imported_only_when_needed() -> None:
    code = (
        "import sys, bcosvit.data;"
        "print([m for m in ('torchvision', 'webdataset', 'datasets') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("size", [(1, 9000), (9000, 1), (40, 401), (1200, 100)])
def test_eval_of_a_long_image_resizes_its_middle_alone(
    size: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    touched = []
    resize = transforms._resize

    def counted(image: Image.Image, width: int, height: int) -> Image.Image:
        touched.append((image.width * image.height, width * height))
        return resize(image, width, height)

    monkeypatch.setattr(transforms, "_resize", counted)
    image = smooth(*size)
    got = EvalTransform(56)(image).permute(1, 2, 0).numpy()
    ((pixels, result),) = touched
    assert pixels <= 4 * min(size) ** 2
    assert result <= 4 * 64**2
    scale = 64 / min(size)
    whole = image.resize(
        (round(size[0] * scale), round(size[1] * scale)), Image.Resampling.BILINEAR
    )
    left, top = (whole.width - 56) // 2, (whole.height - 56) // 2
    expected = np.asarray(whole.crop((left, top, left + 56, top + 56))) / 255
    # Half a pixel of the source may be between them.
    assert np.abs(got - expected).mean() < 2 / 255
