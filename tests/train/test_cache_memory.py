"""Memory of the feature cache, in a process that does nothing else: it must not grow with it."""

import json
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from bcosvit import ModelConfig, StemConfig, create_model
from bcosvit.train.feature_cache import FeatureCache, bytes_needed

CONFIG = ModelConfig(
    width=16,
    num_heads=2,
    depth=1,
    image_size=64,
    patch=8,
    backbone=StemConfig(widths=(64,)),
    train_backbone=False,
)
VIEWS = 6


class Noise:
    """Random pictures."""

    identity = "noise"

    def __init__(self, images: int) -> None:
        self.images = images

    def __len__(self) -> int:
        return self.images

    def sample(self, index: int, view: int) -> tuple[Tensor, int]:
        generator = torch.Generator().manual_seed(VIEWS * index + view)
        return torch.rand(3, 64, 64, generator=generator), 0


def status(name: str) -> int:
    """A number of this process, in bytes."""
    text = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(rf"{name}:\s+(\d+)", text)[1])


def build(folder: str, images: int) -> FeatureCache:
    return FeatureCache.build(
        create_model(CONFIG),
        Noise(images),
        views=VIEWS,
        folder=Path(folder, str(images)),
        max_bytes=bytes_needed(CONFIG, images, VIEWS),
        batch_size=4,
    )


def report(folder: str) -> None:
    """Prints a large cache's bytes, and what building and reading it took beyond a small one."""
    build(folder, 5)
    before = status("VmHWM")
    cache = build(folder, 40)
    building = status("VmHWM") - before
    # Pages of the mapped file count towards the peak, but are the system's to take back.
    before, highest = status("RssAnon"), 0
    keys = [(index, view) for index in range(40) for view in range(VIEWS)]
    random.Random(0).shuffle(keys)
    for key in keys:
        # Held while measuring.
        sample = cache[key]
        highest = max(highest, status("RssAnon"))
        del sample
    print(json.dumps([bytes_needed(CONFIG, 40, VIEWS), building, highest - before]))


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
def test_memory_does_not_grow_with_the_cache(tmp_path):
    code = f"import test_cache_memory; test_cache_memory.report({str(tmp_path)!r})"
    command = [sys.executable, "-c", code]
    output = subprocess.run(command, cwd=Path(__file__).parent, check=True, capture_output=True)
    needed, building, reading = json.loads(output.stdout)
    assert needed > 30_000_000
    # One batch is the same for both; the allowance is for what malloc keeps of earlier ones.
    assert building < 8_000_000
    # A view in float16 and in float32: 0.4 MB.
    assert reading < 1_500_000
