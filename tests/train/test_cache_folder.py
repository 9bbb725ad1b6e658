"""What is written into a cache's folder comes back, and damage, full disks and bounds are said."""

import errno
import os
import pickle
import re
from pathlib import Path

import pytest
import torch

from bcosvit.train import feature_files
from bcosvit.train.feature_files import CacheFolder, Layout, check_space

LAYOUT = Layout(images=4, views=2, shape=(3, 5, 7))
RECORDS = list(range(8))


def filled(folder: Path, features: torch.Tensor) -> CacheFolder:
    kept = CacheFolder.create(folder, LAYOUT, {"backbone": "a"})
    kept.write(RECORDS[:5], RECORDS[:5], features[:5])
    kept.write(RECORDS[5:], RECORDS[5:], features[5:])
    return kept


@pytest.fixture
def features() -> torch.Tensor:
    """Values over a dozen orders of magnitude."""
    return torch.randn(8, 3, 5, 7, generator=torch.Generator().manual_seed(0)) ** 5


@pytest.mark.parametrize("magnitude", [1e-25, 1e-9, 1.0, 1e9, 1e25])
def test_tiny_and_huge_features_survive(tmp_path, features, magnitude):
    features = features * magnitude
    kept = filled(tmp_path, features)
    for record in RECORDS:
        found, label = kept.read(*divmod(record, 2))
        assert label == record and found.dtype == torch.float32
        # Half a unit in the last of 11 bits; at the bottom of float16, 2⁻²⁵ of the 2¹⁴ at its top.
        lost = features[record].abs().max().item() * 2**-39
        torch.testing.assert_close(found, features[record], rtol=2**-11, atol=lost)


def test_scales_follow_each_record(tmp_path, features):
    features = features * 10.0 ** torch.arange(-20, 20, 5).view(-1, 1, 1, 1)
    kept = filled(tmp_path, features)
    for record in RECORDS:
        found, _ = kept.read(*divmod(record, 2))
        lost = features[record].abs().max().item() * 2**-39
        torch.testing.assert_close(found, features[record], rtol=2**-11, atol=lost)


def test_zeros_are_kept_and_what_is_not_finite_is_refused(tmp_path, features):
    kept = filled(tmp_path / "zeros", torch.zeros_like(features))
    assert not kept.read(1, 1)[0].any()
    for bad in (float("nan"), float("inf")):
        features[3, 0, 0, 1] = bad
        with pytest.raises(ValueError, match=r"image 1, view 1.*not finite"):
            filled(tmp_path / "bad", features)
    assert not CacheFolder(tmp_path / "bad").done().any()


def test_a_store_of_something_else_is_refused_and_named(tmp_path, features):
    filled(tmp_path, features)
    assert CacheFolder.create(tmp_path, LAYOUT, {"backbone": "a"}).done().all()
    with pytest.raises(ValueError, match="differs in backbone"):
        CacheFolder.create(tmp_path, LAYOUT, {"backbone": "b"})
    with pytest.raises(ValueError, match="differs in views"):
        CacheFolder.create(tmp_path, Layout(images=4, views=3, shape=(3, 5, 7)), {"backbone": "a"})


def test_without_its_description_nothing_is_trusted(tmp_path, features):
    filled(tmp_path, features)
    (tmp_path / feature_files.META).unlink()
    with pytest.raises(ValueError, match="no feature cache"):
        CacheFolder(tmp_path)
    assert not CacheFolder.create(tmp_path, LAYOUT, {"backbone": "a"}).done().any()


def test_damaged_files_are_refused(tmp_path, features):
    kept = filled(tmp_path, features)
    for name in (feature_files.FEATURES, feature_files.DONE):
        whole = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(whole[:-1])
        with pytest.raises(ValueError, match="damaged"):
            kept.done()
        (tmp_path / name).write_bytes(whole)
    meta = (tmp_path / feature_files.META).read_text()
    for broken in (meta[:-5], "{}", "[]", meta.replace('"format": 1', '"format": 9')):
        (tmp_path / feature_files.META).write_text(broken)
        with pytest.raises(ValueError, match="cannot be read"):
            CacheFolder(tmp_path)


def test_a_full_disk_loses_nothing(tmp_path, features, monkeypatch):
    kept = CacheFolder.create(tmp_path, LAYOUT, {})
    kept.write([0], [0], features[:1])

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="disk is full"):
            kept.write([1], [0], features[1:2])
    assert kept.done().tolist() == [1, 0, 0, 0, 0, 0, 0, 0]


def test_the_bound_is_exact_and_says_what_fits(tmp_path, features):
    with pytest.raises(ValueError, match=f"needs {LAYOUT.bytes} bytes") as caught:
        check_space(tmp_path, LAYOUT, LAYOUT.bytes - 1)
    fit = re.search(r"(\d+) views of every image or (\d+) images", str(caught.value))
    assert (fit[1], fit[2]) == ("1", "3")
    assert f"max_bytes = {LAYOUT.bytes - 1}" in str(caught.value)
    check_space(tmp_path, LAYOUT, LAYOUT.bytes)
    filled(tmp_path, features)
    held = sum(path.stat().st_size for path in tmp_path.iterdir())
    assert LAYOUT.bytes - feature_files.META_BYTES < held <= LAYOUT.bytes


def test_a_disk_without_room_is_refused_unless_the_bytes_are_there(tmp_path, features, monkeypatch):
    usage = type("Usage", (), {"free": 1500})
    monkeypatch.setattr(feature_files.shutil, "disk_usage", lambda path: usage)
    missing = Layout(images=40, views=2, shape=(3, 5, 7))
    with pytest.raises(ValueError, match=r"1\.5 KiB left"):
        check_space(tmp_path / "not" / "there", missing, 10**9)
    assert not (tmp_path / "not").exists()


def test_a_pickled_store_opens_the_file_again(tmp_path, features):
    kept = filled(tmp_path, features)
    kept.read(0, 0)
    pickled = pickle.dumps(kept)
    assert len(pickled) < 1000
    assert torch.equal(pickle.loads(pickled).read(2, 1)[0], kept.read(2, 1)[0])
