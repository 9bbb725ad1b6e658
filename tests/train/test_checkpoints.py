"""Checkpoint files: whole, or refused."""

import os
import pickle

import pytest
import torch

from bcosvit.train.checkpoints import (
    ChecksummedIO,
    DamagedError,
    newest_checkpoint,
    read_checkpoint,
)


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "last.ckpt"
    for step in (1, 2, 3):
        ChecksummedIO().save_checkpoint({"global_step": step, "weights": torch.arange(999.0)}, path)
    return path


def test_the_last_two_are_kept(saved):
    assert sorted(path.name for path in saved.parent.iterdir()) == ["last.ckpt", "previous.ckpt"]
    assert read_checkpoint(saved)["global_step"] == 3
    assert read_checkpoint(saved.with_name("previous.ckpt"))["global_step"] == 2
    found = newest_checkpoint(saved.parent)
    assert (found.path, found.step, found.warning) == (saved, 3, None)


def test_torch_reads_them_too(saved):
    assert torch.load(saved, weights_only=True)["weights"].sum() == 999 * 998 / 2


@pytest.mark.parametrize("place", [0.0, 0.3, 0.6, 0.99])
def test_a_single_wrong_byte_is_noticed(saved, place):
    data = bytearray(saved.read_bytes())
    data[int(place * len(data))] ^= 1
    saved.write_bytes(data)
    with pytest.raises(DamagedError, match="do not match the checksum"):
        read_checkpoint(saved)


@pytest.mark.parametrize("length", [0, 1, 70, 4000, -1])
def test_every_cut_is_noticed(saved, length):
    os.truncate(saved, length if length >= 0 else saved.stat().st_size - 1)
    with pytest.raises(DamagedError):
        read_checkpoint(saved)
    assert newest_checkpoint(saved.parent).step == 2


def test_the_moment_between_two_renames_is_survived(saved):
    saved.unlink()
    assert newest_checkpoint(saved.parent).step == 2


def test_before_the_first_there_is_none(tmp_path):
    assert newest_checkpoint(tmp_path) is None


def test_code_in_a_checkpoint_is_never_run(tmp_path):
    path = tmp_path / "last.ckpt"
    ChecksummedIO().save_checkpoint({"global_step": 1, "trap": Trap(tmp_path / "sprung")}, path)
    with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
        ChecksummedIO().load_checkpoint(path)
    assert not (tmp_path / "sprung").exists()


class Trap:
    def __init__(self, path) -> None:
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)
