"""The feature cache against direct computation, and against kills, stale data and small disks."""

import dataclasses
import os
import pickle
import signal
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader

from bcosvit import DenseNetConfig, ModelConfig, create_model
from bcosvit.data.dataset import Split
from bcosvit.data.images import ImageError, to_tensor
from bcosvit.models import VisionTransformer
from bcosvit.train import feature_files
from bcosvit.train.data import derive_seed
from bcosvit.train.feature_cache import FeatureCache, SplitViews, bytes_needed, view_of

DENSENET = DenseNetConfig(flavor="v1", growth=4, blocks=(1, 1, 1), stem_width=8, bottleneck=2)
CONFIG = ModelConfig(
    width=16, num_heads=2, depth=1, image_size=32, num_classes=3, tap=1, backbone=DENSENET
)
ROOMY = 10**9
PROBES = {divmod(record, 2) for record in (0, 2, 5, 8, 10, 13, 16, 19)}
"""The views by which a cache of ten images and two views recognizes its pictures."""


class Noise:
    """Random pictures; a view is a function of its numbers."""

    def __init__(self, images=10, size=(32, 32), identity="noise", shift=0):
        self.images, self.size, self.identity, self.shift = images, size, identity, shift
        self.asked: Counter[tuple[int, int]] = Counter()

    def __len__(self) -> int:
        return self.images

    def sample(self, index: int, view: int) -> tuple[Tensor, int]:
        self.asked[index, view] += 1
        generator = torch.Generator().manual_seed(1000 * index + view + self.shift)
        return torch.rand(3, *self.size, generator=generator), index % 3


def tiny(config: ModelConfig = CONFIG, seed: int = 0) -> VisionTransformer:
    torch.manual_seed(seed)
    model = create_model(config).eval()
    assert isinstance(model, VisionTransformer)
    return model


def build(folder: Path, model=None, source=None, **options) -> FeatureCache:
    arguments = {"views": 2, "folder": folder, "max_bytes": ROOMY, "batch_size": 4, **options}
    return FeatureCache.build(model or tiny(), source or Noise(), **arguments)


def direct(model: VisionTransformer, image: Tensor) -> Tensor:
    with torch.no_grad():
        return model.tokenizer.backbone(model.encoding(image[None]))[0]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize(
    "config",
    [
        CONFIG,
        dataclasses.replace(CONFIG, tap=3, patch=1, image_size=(45, 38)),
        ModelConfig(
            width=16,
            num_heads=2,
            depth=1,
            image_size=32,
            num_classes=3,
            family="conventional",
            tap=2,
            backbone=dataclasses.replace(DENSENET, flavor="conventional", stem_width=16),
        ),
    ],
    ids=["bcos", "odd sizes", "conventional"],
)
def test_cached_features_and_logits_are_those_of_the_images(tmp_path, config):
    model, source = tiny(config), Noise(size=config.image_size)
    cache = build(tmp_path, model, source)
    assert len(cache) == 10 and cache.views == 2
    for index, view in [(0, 0), (3, 1), (9, 1)]:
        features, label = cache[index, view]
        image, expected_label = source.sample(index, view)
        expected = direct(model, image)
        assert features.dtype == torch.float32 and features.shape == expected.shape
        assert label == expected_label
        # float16 rounds to 2⁻¹¹ of the value, and far below the largest value to 2⁻²⁵ of that.
        torch.testing.assert_close(
            features, expected, rtol=2**-11, atol=expected.abs().max().item() * 2**-24
        )
        with torch.no_grad():
            logits = model(image[None])
            cached = model.from_features(features[None])
        assert (cached - logits).abs().max() < 5e-3 * logits.abs().max()


def test_nothing_but_the_folder_changes(tmp_path):
    model = tiny().train()
    before = pickle.dumps(model.state_dict())
    state = torch.get_rng_state()
    cache = build(tmp_path, model)
    cache[3, 1], build(tmp_path, model)
    assert torch.equal(torch.get_rng_state(), state)
    assert pickle.dumps(model.state_dict()) == before and model.training


def test_a_finished_cache_is_opened_without_computing(tmp_path):
    build(tmp_path)
    before, source, seen = contents(tmp_path), Noise(), []
    build(tmp_path, source=source, progress=lambda done, total: seen.append(done))
    assert contents(tmp_path) == before and not seen
    # Only what proves that the pictures are the same ones.
    assert set(source.asked) == PROBES
    assert FeatureCache(tmp_path)[4, 1][1] == 1


def die_while_building(folder: Path, where: str) -> None:
    """Runs in a process of its own, and ends in the middle of its third batch."""
    calls, put = Counter(), feature_files._write_rows

    def deadly(path: Path, rows: np.ndarray, records: list[int]) -> None:
        calls[path.name] += 1
        if calls[path.name] == 3 and path.name == where:
            raw = rows.view(np.uint8).reshape(-1)
            with path.open("r+b") as file:
                file.seek(records[0] * rows.itemsize)
                file.write(raw[: len(raw) // 5].tobytes())
            os.kill(os.getpid(), signal.SIGKILL)
        put(path, rows, records)

    feature_files._write_rows = deadly
    # As loaders' workers do: the threads of the parent process are not here.
    torch.set_num_threads(1)
    build(folder)


# In the middle of a record, and between the records and their marks.
@pytest.mark.parametrize("where", [feature_files.FEATURES, feature_files.DONE])
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_killed_while_writing_it_resumes_to_the_same_bytes(tmp_path, where):
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    process = get_context("fork").Process(target=die_while_building, args=(killed, where))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    finished = feature_files.CacheFolder(killed).done()
    assert finished.sum() == 8
    with pytest.raises(ValueError, match=r"only \d of 20 views"):
        FeatureCache(killed)
    source, seen = Noise(), []
    build(killed, source=source, progress=lambda *numbers: seen.append(numbers))
    pending = {divmod(int(record), 2) for record in np.flatnonzero(finished == 0)}
    assert source.asked.keys() - PROBES == pending - PROBES
    assert seen[-1] == (20, 20)
    build(whole)
    assert contents(killed) == contents(whole)


def test_of_two_builders_one_waits_for_the_other(tmp_path):
    model, sources = tiny(), (Noise(), Noise())
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda source: build(tmp_path, model, source), sources))
    asked = sources[0].asked + sources[1].asked
    assert len(asked) == 20 and all(asked[key] == 1 for key in asked.keys() - PROBES)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model": tiny(seed=1)}, "backbone"),
        ({"model": tiny(dataclasses.replace(CONFIG, image_size=36))}, "image size"),
        ({"source": Noise(identity="other")}, "data, transform or seed"),
        ({"source": Noise(shift=1)}, "pictures"),
        ({"source": Noise(images=11)}, "images"),
        ({"views": 3}, "views"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_a_cache_of_something_else_is_refused(tmp_path, change, named):
    build(tmp_path)
    before = contents(tmp_path)
    if named == "image size":
        change["source"] = Noise(size=(36, 36))
    with pytest.raises(ValueError, match=rf"differs in .*{named}"):
        build(tmp_path, **change)
    assert contents(tmp_path) == before


def test_a_cache_serves_any_transformer_on_the_same_backbone(tmp_path):
    model = tiny()
    build(tmp_path, model)
    wider = tiny(dataclasses.replace(CONFIG, width=32, num_classes=7, depth=2), seed=5)
    wider.tokenizer.backbone.load_state_dict(model.tokenizer.backbone.state_dict())
    assert wider.from_features(build(tmp_path, wider)[0, 0][0][None]).shape == (1, 7)


def test_the_bound_holds(tmp_path):
    needed = bytes_needed(CONFIG, 10, 2)
    with pytest.raises(ValueError, match=f"{needed} bytes .*1 views of every image or 9 images"):
        build(tmp_path / "none", max_bytes=needed - 1)
    assert not (tmp_path / "none").exists()
    build(tmp_path / "fits", max_bytes=needed)
    held = sum(len(data) for data in contents(tmp_path / "fits").values())
    assert needed - feature_files.META_BYTES < held <= needed


def test_what_cannot_be_cached_is_said(tmp_path):
    trained = tiny(dataclasses.replace(CONFIG, train_backbone=True))
    with pytest.raises(ValueError, match="train_backbone=False"):
        build(tmp_path, trained)
    with pytest.raises(ValueError, match="views = 0"):
        build(tmp_path, views=0)
    with pytest.raises(ValueError, match=r"\[3, 16, 16\], but the model takes \[3, 32, 32\]"):
        build(tmp_path, source=Noise(size=(16, 16)))
    dice = Noise()
    dice.sample = lambda index, view: (torch.rand(3, 32, 32), 0)
    with pytest.raises(ValueError, match="same view"):
        build(tmp_path, source=dice)


def test_keys_and_epochs(tmp_path):
    cache = build(tmp_path, views=3)
    for key in [(10, 0), (-1, 0), (0, 3)]:
        with pytest.raises(IndexError):
            cache[key]
    seen = [[view_of(i, epoch=e, views=3, seed=7) for e in range(4, 7)] for i in range(10)]
    assert all(sorted(views) == [0, 1, 2] for views in seen)
    assert len({tuple(views) for views in seen}) > 1


def test_workers_read_and_build_the_same(tmp_path):
    cache, by_workers = build(tmp_path / "a"), build(tmp_path / "b", num_workers=2)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    assert len(pickle.dumps(cache)) < 1000
    cache[0, 0]
    assert len(pickle.dumps(cache)) < 1000
    copied = pickle.loads(pickle.dumps(cache))
    keys = [(index, view_of(index, epoch=1, views=2)) for index in range(10)]
    loader = DataLoader(by_workers, sampler=keys, batch_size=4, num_workers=2)
    found = [part for batch in loader for part in zip(*batch, strict=True)]
    for (features, label), key in zip(found, keys, strict=True):
        assert torch.equal(features, copied[key][0]) and label == key[0] % 3


class Dots:
    """A store of flat pictures, one of them broken."""

    drawn = False

    def __len__(self) -> int:
        return 6

    def key(self, index: int) -> str:
        return f"dot {index}"

    def label(self, index: int) -> int:
        return index

    def image(self, index: int, at_least: int | None) -> Image.Image:
        if index == 3:
            raise ImageError("dot 3 is broken.")
        return Image.new("RGB", (40, 40), (index, 0, 255 - index))


@dataclasses.dataclass(frozen=True)
class Dim:
    """A random transform."""

    least: float

    def __call__(self, image: Image.Image) -> Tensor:
        factor = self.least + (1 - self.least) * torch.rand(())
        return to_tensor(image)[:, :32, :32] * factor


def test_views_of_a_split_are_those_of_the_run_and_bring_their_labels(tmp_path):
    split = Split(Dots(), transform=Dim(0.5))
    source = SplitViews(split=split, data="dots", seed=3)
    state = torch.get_rng_state()
    for view, index in [(0, 1), (2, 1), (1, 4)]:
        # As the data module draws sample `index` of epoch `view`.
        expected, label, _ = split[index, derive_seed(3, view, index)]
        image, found = source.sample(index, view)
        assert torch.equal(image, expected) and found == label == index
    assert torch.equal(torch.get_rng_state(), state)
    cache = build(tmp_path, source=source)
    # Dot 4 stands in for the broken dot 3, under its own label.
    assert [cache[index, 0][1] for index in range(6)] == [0, 1, 2, 4, 4, 5]
    for change in ({"seed": 4}, {"data": "other"}, {"split": split.with_transform(Dim(0.4))}):
        assert dataclasses.replace(source, **change).identity != source.identity
    with pytest.raises(ValueError, match="no transform"):
        dataclasses.replace(source, split=split.with_transform(None)).sample(0, 0)
