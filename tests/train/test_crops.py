"""Crops of a batch lie where torchvision would have them, and look as workers would make them."""

import math

import pytest
import torch
from PIL import Image

from bcosvit.data.transforms import TrainTransform
from bcosvit.train.device_images import crop_and_resize, sample_crops

SIZE = 24


class Fixed:
    """In the place of torchvision's crop: one box."""

    def __init__(self, left: int, right: int, top: int, bottom: int) -> None:
        self.box = {"left": left, "top": top, "width": right - left, "height": bottom - top}

    def make_params(self, _: list) -> dict[str, int]:
        return self.box


def by_worker(picture: torch.Tensor, box: list[int], size: int, *, flip: bool) -> torch.Tensor:
    """Levels [size, 3, size] that the transform makes of a picture [h, 3, w] and a box."""
    transform = TrainTransform(image_size=size, rand_augment=(0, 0), flip=float(flip))
    vars(transform)["_crop"] = Fixed(*box)
    image = Image.fromarray(picture.permute(0, 2, 1).contiguous().numpy())
    return transform(image).mul(255).round().transpose(0, 1)


def noise(*shape: int) -> torch.Tensor:
    """What is hardest to resize: every pixel a level of its own, black and white among them."""
    return torch.randint(-100, 356, shape).clamp(0, 255).byte()


def some_boxes(number: int, height: int, width: int) -> torch.Tensor:
    """Any sides from a single pixel to the whole, the whole among them."""
    x, y = (torch.rand(number, 2).sort(1).values * side for side in (width, height))
    boxes = torch.cat((x.floor(), y.floor()), 1)
    boxes[:, 1::2] += 1
    boxes[0] = torch.tensor([0, width, 0, height])
    return boxes


@pytest.mark.parametrize(("height", "width"), [(70, 90), (24, 24), (17, 60)])
@pytest.mark.parametrize("flip", [False, True])
def test_crops_are_those_of_workers_but_for_a_level(height, width, flip):
    number = 60
    pictures, boxes = noise(number, height, 3, width), some_boxes(number, height, width)
    sides = (boxes[:, 1::2] - boxes[:, ::2]) / SIZE
    assert sides.min() < 0.2 and (sides.max() > 2 or max(height, width) < 2 * SIZE)
    edges = boxes[:, [1, 0, 2, 3]] if flip else boxes
    found = crop_and_resize(pictures.float(), edges, SIZE)
    expected = torch.stack(
        [
            by_worker(picture, box, SIZE, flip=flip)
            for picture, box in zip(pictures, boxes.int().tolist(), strict=True)
        ]
    )
    differences = (found - expected).abs()
    assert differences.max() <= 1
    # They round between the axes, too.
    assert differences.mean() < 0.2
    assert torch.equal(found, found.round()) and found.min() == 0 and found.max() == 255


def test_a_crop_of_the_models_size_is_the_picture_itself():
    pictures = noise(2, 40, 3, 50)
    boxes = torch.tensor([[5.0, 29.0, 7.0, 31.0], [29.0, 5.0, 7.0, 31.0]])
    found = crop_and_resize(pictures.float(), boxes, SIZE)
    cut = pictures[:, 7:31, :, 5:29]
    assert torch.equal(found[0], cut[0].float())
    assert torch.equal(found[1], cut[1].flip(-1).float())


def test_nothing_outside_of_a_box_counts():
    pictures, boxes = noise(30, 40, 3, 50), some_boxes(30, 40, 50)
    others = noise(30, 40, 3, 50)
    for picture, other, (left, right, top, bottom) in zip(
        pictures, others, boxes.int().tolist(), strict=True
    ):
        other[top:bottom, :, left:right] = picture[top:bottom, :, left:right]
    assert not torch.equal(pictures, others)
    found = [crop_and_resize(p.float(), boxes, SIZE) for p in (pictures, others)]
    assert torch.equal(*found)


def test_a_crop_is_the_same_in_any_batch():
    # Levels far apart, halfway between which many pixels come to lie.
    pictures, boxes = noise(32, 12, 3, 12).float(), some_boxes(32, 12, 12)
    whole = crop_and_resize(pictures, boxes, SIZE)
    for start, stop in ((0, 1), (3, 8), (31, 32)):
        assert torch.equal(
            crop_and_resize(pictures[start:stop], boxes[start:stop], SIZE), whole[start:stop]
        )


def test_halves_are_rounded_up_however_they_are_summed():
    # On a ramp that is shrunk to a sixth every mean lies between two levels, edges aside.
    pictures = torch.arange(256.0).expand(100, 6, 3, -1)
    left = torch.arange(100.0)
    boxes = torch.stack((left, left + 6 * SIZE, 0 * left, 0 * left + 6), 1)
    means = left[:, None] + 6 * torch.arange(SIZE) + 2.5
    found, expected = crop_and_resize(pictures, boxes, SIZE), (means + 0.5)[:, None, None]
    assert torch.equal(found[..., 1:-1], expected[..., 1:-1].expand(-1, SIZE, 3, -1))


def test_boxes_between_pixels_never_miss_them_all():
    boxes = torch.tensor([[3.1, 3.2, 4.9, 5.1], [3.45, 3.55, 0.0, 0.01]])
    found = crop_and_resize(torch.full((2, 9, 3, 9), 70.0), boxes, SIZE)
    assert torch.equal(found, torch.full_like(found, 70))


def drawn(width: int, height: int, number: int, **options) -> torch.Tensor:
    sizes = torch.tensor([[width, height]], dtype=torch.float64).expand(number, 2)
    return sample_crops(sizes, **{"scale": (0.08, 1.0), "flip": 0.0, "seed": 1, **options})


def by_torchvision(width: int, height: int, number: int, scale: tuple[float, float]):
    crop = TrainTransform(image_size=8, scale=scale)._crop
    boxes = [crop.make_params([Image.new("RGB", (width, height))]) for _ in range(number)]
    sides = {key: torch.tensor([float(box[key]) for box in boxes]) for key in boxes[0]}
    left, top = sides["left"], sides["top"]
    return torch.stack((left, left + sides["width"], top, top + sides["height"]), 1).double()


def measures(boxes: torch.Tensor) -> dict[str, torch.Tensor]:
    left, right, top, bottom = boxes.T
    wide, tall = right - left, bottom - top
    return {"area": wide * tall, "ratio": wide / tall, "left": left, "right": right, "top": top}


def apart(one: torch.Tensor, other: torch.Tensor) -> float:
    """Kolmogorov and Smirnov's statistic: how far apart two samples' distributions are."""
    values = torch.cat((one, other)).unique()
    shares = [
        torch.searchsorted(x.sort().values, values, right=True) / len(x) for x in (one, other)
    ]
    return float((shares[0] - shares[1]).abs().max())


NUMBER = 2000
BOUND = math.sqrt(-math.log(0.001 / 2) / 2) * math.sqrt(2 / NUMBER)
"""Exceeded by one in a thousand pairs of samples of one distribution."""


@pytest.mark.parametrize(
    ("width", "height", "scale"),
    [
        (64, 64, (0.08, 1.0)),
        (100, 60, (0.08, 1.0)),
        (30, 80, (0.3, 1.0)),
        # Most fall back.
        (300, 100, (0.35, 1.0)),
    ],
)
def test_boxes_are_distributed_as_torchvisions(width, height, scale):
    mine = measures(drawn(width, height, NUMBER, scale=scale))
    theirs = measures(by_torchvision(width, height, NUMBER, scale))
    for name in mine:
        assert apart(mine[name], theirs[name]) < BOUND, name


@pytest.mark.parametrize(("width", "height"), [(100, 20), (21, 100)])
def test_what_never_fits_is_cut_from_the_middle(width, height):
    scale = (0.95, 1.0)
    mine, theirs = drawn(width, height, 5, scale=scale), by_torchvision(width, height, 5, scale)
    assert torch.equal(mine, theirs)


def test_boxes_lie_in_their_pictures():
    sizes = torch.randint(1, 40, (3000, 2)).double()
    left, right, top, bottom = sample_crops(sizes, scale=(0.01, 1.0), flip=0, seed=0).T
    assert left.min() == 0 and top.min() == 0
    assert (left < right).all() and (right <= sizes[:, 0]).all()
    assert (top < bottom).all() and (bottom <= sizes[:, 1]).all()


def test_boxes_follow_from_the_seed_alone():
    torch.manual_seed(1)
    one = drawn(50, 40, 20)
    torch.manual_seed(2)
    assert torch.equal(one, drawn(50, 40, 20))
    assert not torch.equal(one, drawn(50, 40, 20, seed=2))
    assert len(one.unique(dim=0)) > 15


def test_mirrored_boxes_are_the_same_ones_from_right_to_left():
    plain, mirrored, some = (drawn(50, 40, NUMBER, flip=flip) for flip in (0.0, 1.0, 0.3))
    assert torch.equal(mirrored[:, [1, 0, 2, 3]], plain)
    share = float((some[:, 0] > some[:, 1]).double().mean())
    # Four standard deviations.
    assert abs(share - 0.3) < 4 * math.sqrt(0.3 * 0.7 / NUMBER)
