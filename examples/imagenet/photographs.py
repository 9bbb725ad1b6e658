"""Decodes photographs once, into arrays that distill.py reads at once.

    python photographs.py train data/ PHOTOGRAPHS... --exclude imagenet/val
    python photographs.py validation data/ imagenet/val

The first command needs no labels and takes any folders. It writes ``photographs.npy``, in random
order, with all photographs at the same size: 176 × 240 pixels (127 kB), portraits on their side,
narrower ones with black on the right; ``photographs-meta.npy`` has their widths and whether they
are portraits. The second takes one folder per class, all 1000, whose names contain ImageNet's
WordNet IDs (``n01440764``), and writes ``validation.npz``.
"""

import argparse
import os
import random
import re
from functools import partial
from multiprocessing import Pool
from pathlib import Path

import numpy as np
from PIL import Image

from bcosvit.data.images import ImageError, list_images, read_image

HEIGHT, WIDTH = 176, 240
VALIDATION_SIZE = 224
NEAR = 34
"""Two of 256-bit hashes that differ in at most so many bits are of the same photograph."""


def decode(path: Path, excluded: np.ndarray | None = None) -> tuple[np.ndarray, int, bool] | None:
    """Reads one photograph.

    Args:
        path: The file.
        excluded: Hashes [m, 256] of photographs to leave out.

    Returns:
        The canvas [176, 240, 3], the width that is used, and whether it lies on its side. None if
        the file cannot be read or is to be left out.
    """
    try:
        image = read_image(path, at_least=HEIGHT)
    except ImageError:
        return None
    if excluded is not None and (excluded @ hashes(image).T).max() >= 256 - 2 * NEAR:
        return None
    portrait = image.height > image.width
    if portrait:
        image = image.transpose(Image.Transpose.TRANSPOSE)
    width = round(image.width * HEIGHT / image.height)
    if image.height != HEIGHT:
        image = image.resize((width, HEIGHT), Image.Resampling.BICUBIC)
    pixels = np.asarray(image)
    start = max(width - WIDTH, 0) // 2
    pixels = pixels[:, start : start + WIDTH]
    canvas = np.zeros((HEIGHT, WIDTH, 3), np.uint8)
    canvas[:, : pixels.shape[1]] = pixels
    return canvas, pixels.shape[1], portrait


def hashes(image: Image.Image) -> np.ndarray:
    """Difference hashes of the center square and of 87.5 % of it, [2, 256] of ±1."""
    found = []
    for share in (1.0, 0.875):
        side = min(image.size) * share
        left, top = (image.width - side) / 2, (image.height - side) / 2
        gray = image.convert("L").resize(
            (17, 16), Image.Resampling.BOX, (left, top, left + side, top + side)
        )
        values = np.asarray(gray, np.int16)
        found.append(np.where(values[:, 1:] > values[:, :-1], 1.0, -1.0).ravel())
    return np.array(found, np.float32)


def decode_validation(path: Path) -> np.ndarray:
    """The center [224, 224, 3] of an image whose shorter side becomes 256 pixels.

    An image of 224 × 224 pixels is kept as it is.
    """
    image = read_image(path)
    if image.size != (VALIDATION_SIZE, VALIDATION_SIZE):
        scale = 256 / min(image.size)
        size = (round(image.width * scale), round(image.height * scale))
        image = image.resize(size, Image.Resampling.BICUBIC)
        left, top = ((side - VALIDATION_SIZE) // 2 for side in image.size)
        image = image.crop((left, top, left + VALIDATION_SIZE, top + VALIDATION_SIZE))
    return np.asarray(image)


def _hash_file(path: Path) -> np.ndarray:
    return hashes(read_image(path))


def pack(folders: list[Path], out: Path, exclude: list[Path], workers: int) -> None:
    """Writes all photographs in ``folders`` but those that also lie in ``exclude``."""
    paths = [path for folder in folders for path in list_images(folder)]
    random.Random(0).shuffle(paths)
    out.mkdir(parents=True, exist_ok=True)
    pixels = np.lib.format.open_memmap(
        out / "photographs.npy", "w+", np.uint8, (len(paths), HEIGHT, WIDTH, 3)
    )
    meta, count = np.zeros((len(paths), 2), np.int32), 0
    with Pool(workers) as pool:
        left_out = [path for folder in exclude for path in list_images(folder)]
        excluded = np.concatenate(pool.map(_hash_file, left_out)) if left_out else None
        for found in pool.imap(partial(decode, excluded=excluded), paths, chunksize=32):
            if found is not None:
                pixels[count], meta[count] = found[0], found[1:]
                count += 1
    pixels.flush()
    # Rows of `pixels` beyond those of `meta` are empty.
    np.save(out / "photographs-meta.npy", meta[:count])
    print(f"{count} of {len(paths)} photographs; the others cannot be read or are excluded.")


def pack_validation(folder: Path, out: Path, workers: int) -> None:
    """Writes labeled photographs; the order of the WordNet IDs gives the labels."""
    classes = {}
    for path in folder.iterdir():
        if path.is_dir() and (found := re.search(r"n\d{8}", path.name)):
            classes[found[0]] = path
    if len(classes) != 1000:
        raise SystemExit(
            f"{folder} has folders of {len(classes)} classes; give one for each of the 1000."
        )
    images = [(i, p) for i, c in enumerate(sorted(classes)) for p in list_images(classes[c])]
    out.mkdir(parents=True, exist_ok=True)
    with Pool(workers) as pool:
        pixels = np.stack(pool.map(decode_validation, [path for _, path in images]))
    np.savez(out / "validation.npz", pixels=pixels, labels=[label for label, _ in images])
    print(f"{len(images)} photographs for validation")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("train", "validation"))
    parser.add_argument("out", type=Path, help="the folder to write to")
    parser.add_argument("folders", type=Path, nargs="+", help="folders with photographs")
    parser.add_argument(
        "--exclude",
        type=Path,
        nargs="+",
        default=[],
        help="folders whose photographs, and near copies of them, are left out of training",
    )
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    options = parser.parse_args()
    if options.what == "train":
        pack(options.folders, options.out, options.exclude, options.workers)
    elif len(options.folders) == 1:
        pack_validation(options.folders[0], options.out, options.workers)
    else:
        parser.error("give one folder, which has one folder per class.")


if __name__ == "__main__":
    main()
