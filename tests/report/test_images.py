"""Colors of maps: their ends and middle, their scales, and files that hold them without loss."""

import io
from functools import partial

import numpy as np
import pytest
import torch
from PIL import Image

from bcosvit.attribution import METHODS
from bcosvit.report.images import (
    Tile,
    contribution_image,
    contribution_scale,
    contribution_scales,
    gradient_css,
    method_image,
    on_white,
    overlay_image,
    panel,
    photo_bytes,
    photo_image,
    png_bytes,
)
from tests.report.support import maps

WHITE, BLUE, RED = [255, 255, 255], [33, 72, 196], [206, 24, 38]


def test_blue_white_red():
    image = contribution_image(torch.tensor([[-3.0, -1.0, 0.0, 1.0, 3.0]]), scale=1.0)
    assert image[0].tolist() == [BLUE, BLUE, WHITE, RED, RED]
    half = contribution_image(torch.tensor([[0.5]]), scale=1.0)[0, 0].astype(int)
    assert np.abs(half - (np.array(WHITE) + RED) / 2).max() <= 1


def test_the_scale_is_the_percentile_of_absolute_values():
    map_ = maps(50, 40)
    expected = np.percentile(np.abs(map_.double().numpy()), 99.9)
    assert contribution_scale(map_) == pytest.approx(expected)
    beyond = (map_.abs() >= expected).numpy()
    full = np.isin(contribution_image(map_).reshape(-1, 3)[:, 0], [BLUE[0], RED[0]])
    assert full.reshape(beyond.shape)[beyond].all()


def test_independent_and_joint_scales():
    two = torch.stack([maps(20, 20), 5 * maps(20, 20)])
    alone = contribution_scales(two, joint=False)
    assert alone[1] == pytest.approx(5 * alone[0])
    one, other = contribution_scales(two, joint=True)
    assert one == other == contribution_scale(two)
    # On its own each looks the same, on one scale the first is pale.
    images = [contribution_image(map_) for map_ in two]
    assert np.array_equal(*images)
    assert contribution_image(two[0], one).mean() > images[0].mean() + 10


def test_jet_is_matplotlibs():
    import matplotlib

    map_ = torch.linspace(0, 1, 64)[None]
    theirs = matplotlib.colormaps["jet"](map_.numpy())[..., :3] * 255
    assert np.abs(method_image("rollout", map_, 1.0) - theirs).max() < 6
    # What is negative has no place on it.
    low = method_image("rollout", torch.tensor([[-2.0, 0.0]]), 1.0)
    assert low[0, 0].tolist() == low[0, 1].tolist() == [0, 0, 128]


def test_methods_have_their_colors():
    map_ = torch.full((2, 2), -1.0)
    for method, explainer in METHODS.items():
        first = method_image(method, map_, 1.0)[0, 0].tolist()
        assert first == ([0, 0, 128] if explainer.colormap == "jet" else BLUE)
        assert gradient_css(method).startswith(f"rgb({first[0]} {first[1]} {first[2]})")


@pytest.mark.parametrize("draw", [contribution_image, partial(method_image, "rollout")])
def test_maps_without_a_scale(draw):
    zero = draw(torch.zeros(4, 4))
    assert len(np.unique(zero.reshape(-1, 3), axis=0)) == 1
    # Fewer pixels than the percentile leaves above it: the scale is zero, and they stand out.
    lone = torch.zeros(60, 60)
    lone[3, 4] = 1e-9
    assert contribution_scale(lone) == 0
    image = draw(lone)
    assert image[3, 4].tolist() == draw(torch.ones(1, 1), 1.0)[0, 0].tolist()
    assert (image.reshape(-1, 3) == image[0, 0]).all(1).sum() == 60 * 60 - 1


def test_overlay_leaves_the_photo_where_nothing_is():
    photo = np.full((2, 2, 3), (200, 100, 50), np.uint8)
    map_ = torch.tensor([[0.0, 1.0], [-1.0, 0.0]])
    image = overlay_image(photo, "inherent", map_, 1.0, alpha=1.0)
    assert image[0, 1].tolist() == RED
    assert image[1, 0].tolist() == BLUE
    # Gray: its own colors would be taken for contributions.
    assert len(set(image[0, 0].tolist())) == 1
    assert np.array_equal(overlay_image(photo, "inherent", map_, 1.0, alpha=0.0)[0, 1], image[0, 0])


@pytest.mark.parametrize("level", [0, 255])
def test_weak_contributions_are_seen_on_dark_and_bright_photos(level):
    photo = np.full((1, 2, 3), level, np.uint8)
    empty, weak = overlay_image(photo, "inherent", torch.tensor([[0.0, 0.3]]), 1.0)[0].astype(int)
    # A third of the strength is more than a fifth of the way to full red.
    assert np.abs(weak - empty).sum() > 0.2 * np.abs(np.array(RED) - empty).sum()
    assert weak[0] - weak[1] > 30


def test_color_images_are_laid_on_white():
    rgba = torch.tensor([[1.0, 1.0, 1.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0], [0.0, 0.5, 1.0]])
    image = on_white(rgba.view(4, 1, 3))
    assert image[0].tolist() == [[255, 255, 255], [255, 128, 128], [255, 0, 0]]


@pytest.mark.parametrize("colors", [3, 4])
@pytest.mark.parametrize("many", [False, True])
def test_png_is_without_loss(colors, many):
    generator = np.random.default_rng(0)
    image = generator.integers(0, 255 if many else 5, (37, 29, colors), np.uint8)
    again = Image.open(io.BytesIO(png_bytes(image)))
    assert np.array_equal(np.array(again.convert("RGBA" if colors == 4 else "RGB")), image)


def test_maps_are_stored_with_a_palette():
    image = contribution_image(maps(64, 64))
    assert Image.open(io.BytesIO(png_bytes(image))).mode == "P"


def test_photos_are_jpeg_unless_small():
    large = photo_image(torch.rand(3, 200, 200))
    assert photo_bytes(large).startswith(b"\xff\xd8")
    assert len(photo_bytes(large)) < len(png_bytes(large))
    assert photo_bytes(photo_image(torch.rand(3, 32, 32))).startswith(b"\x89PNG")


def test_panels_have_room_for_all():
    tile = Tile(image=np.zeros((4, 4, 3), np.uint8), label="a label that is far too long for it")
    picture = panel([[tile, tile], [tile]], cell=50)
    assert picture.width > 100
    assert picture.height > 100
    with pytest.raises(ValueError, match="at least one row"):
        panel([])


def test_long_labels_are_wrapped_rather_than_cut():
    tile = np.full((20, 20, 3), 255, np.uint8)

    def drawn(label):
        return panel([[Tile(image=tile, label=label)]], cell=224)

    wrapped = drawn("Egyptian cat rather than tiger cat")
    assert wrapped.tobytes() != drawn("Egyptian cat rather than tiger").tobytes()
    assert wrapped.height > drawn("Egyptian cat").height
    file = "holidays_2026_number_00000293.jpg"
    assert drawn(file).tobytes() != drawn(file.replace(".jpg", ".png")).tobytes()


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: contribution_image(torch.zeros(2, 3, 4)), "not a picture"),
        (lambda: contribution_image(torch.full((2, 2), torch.nan)), "NaN"),
        (lambda: contribution_scale(torch.full((2, 2), torch.inf)), "infinity"),
        (
            lambda: overlay_image(np.zeros((3, 3, 3), np.uint8), "ixg", torch.zeros(2, 2)),
            "does not fit",
        ),
        (
            lambda: overlay_image(np.zeros((2, 2, 3), np.uint8), "ixg", torch.ones(2, 2), alpha=2),
            "alpha = 2",
        ),
    ],
)
def test_mistakes(call, says):
    with pytest.raises(ValueError, match=says):
        call()


def test_labels_of_many_languages_are_legible():
    """No two of these look alike, as they would if a font did not know them."""
    tile = np.full((20, 20, 3), 255, np.uint8)
    drawn = {
        label: panel([[Tile(image=tile, label=label)]], cell=40).tobytes() for label in "×÷éüłжλ�"
    }
    assert len(set(drawn.values())) == len(drawn)
