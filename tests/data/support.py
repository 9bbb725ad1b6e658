"""Small data sets for the tests, written where they are asked for."""

import io
import tarfile
from pathlib import Path

import numpy as np
from PIL import Image

from bcosvit.data.dataset import Split
from bcosvit.data.scenes import Scenes


def color(number: int) -> tuple[int, int, int]:
    """A color of its own for every picture, so that a picture tells which file it came from."""
    return (number * 37 % 256, number * 11 % 256, number % 256)


def png(number: int = 0) -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", (16, 12), color(number)).save(stream, "PNG")
    return stream.getvalue()


def folder(root: Path, counts: dict[str, int], start: int = 0) -> Path:
    number = start
    for name, count in counts.items():
        (root / name).mkdir(parents=True)
        for i in range(count):
            (root / name / f"{i:03d}.png").write_bytes(png(number))
            number += 1
    return root


def tar(path: Path, members: dict[str, bytes], **options) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", **options) as archive:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return path


def keys(split: Split) -> list[str]:
    return [split.key(i) for i in range(len(split))]


def class_folders(prefix: str, counts: dict[str, int], start: int = 0) -> dict[str, bytes]:
    names = [f"{prefix}{c}/{i}.png" for c, n in counts.items() for i in range(n)]
    return {name: png(start + i) for i, name in enumerate(names)}


class Halves:
    """Scenes whose objects fill the left half and are unknown in every third image."""

    drawn = True

    def __init__(self, length: int) -> None:
        self.scenes = Scenes("val", size=32, length=length)
        self.key, self.label, self.image = self.scenes.key, self.scenes.label, self.scenes.image

    def __len__(self) -> int:
        return len(self.scenes)

    def mask(self, index: int) -> np.ndarray | None:
        if index % 3 == 2:
            return None
        mask = np.zeros((32, 32), np.bool_)
        mask[:, :16] = True
        return mask
