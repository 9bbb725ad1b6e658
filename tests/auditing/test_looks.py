"""Looks are measured, given to other pictures, and found in the rest of their own."""

import torch

from bcosvit.auditing.looks import (
    OCTAVES,
    colors,
    recolored,
    sharpened,
    sharpness,
    told_elsewhere,
)
from tests.auditing.test_repeats import noise


def blurred(images):
    for _ in range(3):
        images = torch.nn.functional.avg_pool2d(images, 3, 1, 1, count_include_pad=False)
    return images


def test_casts_move_black_and_white_points_only():
    images = torch.rand(3, 3, 8, 8, generator=torch.Generator().manual_seed(0)) * 0.5 + 0.2
    black, white = colors(images).unbind(1)
    assert torch.equal(black, images.flatten(2).amin(2))
    new = torch.tensor([[0.1, 0.0, 0.0], [0.9, 0.7, 0.5]]).expand(3, 2, 3)
    changed = recolored(images, new)
    assert torch.allclose(colors(changed), new, atol=1e-6)
    assert torch.allclose(recolored(changed, torch.stack([black, white], 1)), images, atol=1e-6)


def test_a_cast_is_in_the_rest_of_the_picture_and_the_color_of_an_object_is_not():
    light = 0.6 + 0.4 * torch.rand(36, 1, 1, 1, generator=torch.Generator().manual_seed(1))
    images = noise(36, 24) * light
    own, other = images[:12], images[12:]
    rest = torch.ones(36, 24, 24, dtype=torch.bool)
    rest[:, 4:16, 4:16] = False
    cast = own * torch.tensor([1.0, 0.8, 0.6])[:, None, None]
    assert told_elsewhere(colors, cast, other, rest[:12], rest[12:]) > 0.95
    lemons = own.clone()
    lemons[:, :, 4:16, 4:16] = torch.tensor([0.95, 0.85, 0.0])[:, None, None]
    assert told_elsewhere(colors, lemons, other, rest[:12], rest[12:]) < 0.6


def test_blur_takes_the_finest_details_most_and_less_contrast_takes_none():
    images = noise(4, 32)
    sharp, soft = sharpness(images), sharpness(blurred(images))
    assert sharp.shape == (4, OCTAVES - 1)
    assert ((sharp - soft)[:, 0] > (sharp - soft)[:, 1]).all() and (sharp > soft).all()
    assert torch.allclose(sharpness(0.5 * images + 0.2), sharp, atol=0.1)


def test_pictures_can_be_given_the_sharpness_of_others():
    images = 0.3 + 0.4 * noise(4, 32)
    assert torch.allclose(sharpened(images, sharpness(images)), images, atol=1e-5)
    for given in (blurred(images[2:]), images[2:]):
        wanted = sharpness(given)
        before, after = (sharpness(each) for each in (images[:2], sharpened(images[:2], wanted)))
        if given is not images:
            # Octaves overlap, so that they are not met exactly.
            assert ((after - wanted).abs() <= 0.3 + 0.3 * (before - wanted).abs()).all()


def test_blur_is_in_the_rest_of_the_picture_and_a_smooth_object_is_not():
    images = noise(36, 24)
    own, other = images[:12], images[12:]
    rest = torch.ones(36, 24, 24, dtype=torch.bool)
    rest[:, 4:16, 4:16] = False
    assert told_elsewhere(sharpness, blurred(own), other, rest[:12], rest[12:]) > 0.95
    smooth = own.clone()
    smooth[:, :, 6:14, 6:14] = blurred(blurred(own))[:, :, 6:14, 6:14]
    assert told_elsewhere(sharpness, smooth, other, rest[:12], rest[12:]) < 0.6
