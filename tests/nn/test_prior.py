"""Priors over positions that are interpolated to another grid."""

import pytest
import torch
import torch.nn.functional as F

from bcosvit.nn.prior import resize_embedding, resize_pairs


@pytest.mark.parametrize(("old", "new"), [((2, 3), (4, 5)), ((4, 3), (2, 6)), ((3, 3), (3, 3))])
def test_pairs_are_interpolated_by_key_and_by_query(old, new):
    """A prior of products f(query)·g(key) becomes the products of both, interpolated."""
    count = old[0] * old[1]
    query, key = (torch.randn(2, count, dtype=torch.float64) for _ in range(2))

    def resized(values):
        image = values.view(2, 1, *old)
        return F.interpolate(image, new, mode="bilinear", antialias=True).flatten(1)

    expected = resized(query)[:, :, None] * resized(key)[:, None, :]
    found = resize_pairs(query[:, :, None] * key[:, None, :], old, new)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(resize_embedding(key[..., None], old, new)[..., 0], resized(key))
