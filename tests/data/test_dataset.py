"""Splits, unreadable files, registered kinds of data, and the labeled images of an evaluation."""

import pickle
import random
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

from bcosvit.data.dataset import Skipped, SourceError, Split, write_skipped
from bcosvit.data.images import ImageError
from bcosvit.data.labeled import LabeledImages, labeled_images, match_classes
from bcosvit.data.scenes import Scenes
from bcosvit.data.sources import (
    SOURCES,
    Source,
    SourceKind,
    SourceOptions,
    check_source,
    open_source,
    register_source,
    source_syntax,
)
from bcosvit.data.transforms import EvalTransform, TrainTransform
from bcosvit.registry import Registry
from tests.data.support import Halves, folder, keys


def spoil(root: Path, *names: str) -> None:
    for name in names:
        path = root / name
        path.write_bytes(path.read_bytes()[:40])


def test_check_leaves_bad_files_out_and_lists_them(tmp_path: Path) -> None:
    folder(tmp_path / "train", {"a": 30, "b": 30})
    folder(tmp_path / "val", {"a": 5, "b": 5})
    spoil(tmp_path, "train/a/003.png", "train/b/029.png", "val/a/000.png")
    calls: list[tuple[int, int]] = []
    source = open_source(tmp_path, max_skipped=0.1)
    clean, skipped = check_source(source, progress=lambda *c: calls.append(c), num_workers=4)
    assert [item.key for item in skipped] == ["train/a/003.png", "train/b/029.png", "val/a/000.png"]
    assert all("damaged" in item.reason for item in skipped)
    assert (len(clean.train), len(clean.val)) == (58, 9)
    assert not {item.key for item in skipped} & {*keys(clean.train), *keys(clean.val)}
    assert calls[-1] == (70, 70)
    assert check_source(clean)[1] == ()
    assert clean.fingerprint() != source.fingerprint()
    assert clean.classes == source.classes


def test_check_stops_above_the_limit_and_when_a_class_is_lost(tmp_path: Path) -> None:
    folder(tmp_path / "train", {"a": 30, "b": 2})
    folder(tmp_path / "val", {"a": 1, "b": 1})
    spoil(tmp_path, "train/b/000.png", "train/b/001.png")
    with pytest.raises(SourceError, match=r"2 of 32 images .*0\.01.*b/001\.png"):
        check_source(open_source(tmp_path))
    with pytest.raises(SourceError, match=r"left to train on for .* 'b'"):
        check_source(open_source(tmp_path, max_skipped=0.5))


def test_one_bad_file_stops_nobody_who_allows_any(tmp_path: Path) -> None:
    folder(tmp_path / "train", {"a": 3, "b": 3})
    folder(tmp_path / "val", {"a": 1, "b": 1})
    spoil(tmp_path, "train/b/000.png", "val/a/000.png")
    clean, skipped = check_source(open_source(tmp_path))
    assert len(skipped) == 2
    assert (len(clean.train), len(clean.val)) == (5, 1)
    with pytest.raises(SourceError, match="1 of 6 images"):
        check_source(open_source(tmp_path, max_skipped=0))
    with pytest.raises(SourceError, match="1 of 2 images"):
        open_source(tmp_path, max_skipped=0).val[0]
    spoil(tmp_path, "val/b/000.png")
    with pytest.raises(SourceError, match="left to validate on"):
        check_source(open_source(tmp_path, max_skipped=1))


def test_while_training_the_next_readable_picture_stands_in(tmp_path: Path) -> None:
    folder(tmp_path, {"a": 10, "b": 10})
    source = open_source(tmp_path, max_skipped=0.2)
    order = keys(source.train)
    spoil(tmp_path, order[4], order[5], order[-1])
    expected = list(order)
    expected[4] = expected[5] = order[6]
    expected[-1] = order[0]
    assert [source.train[i][2] for i in range(18)] == expected
    assert [item.key for item in source.train.skipped()] == [order[4], order[5], order[-1]]
    # Whatever was met before, in whatever order: the same pictures.
    again = open_source(tmp_path, max_skipped=0.2).train
    shuffled = random.Random(3).sample(range(18), 18)
    assert [again[i][2] for i in shuffled] == [expected[i] for i in shuffled]


def test_training_stops_above_the_limit(tmp_path: Path) -> None:
    folder(tmp_path, {"a": 20, "b": 20})
    source = open_source(tmp_path, max_skipped=0.06)
    order = keys(source.train)
    spoil(tmp_path, order[0], order[1], order[7])
    assert source.train[0][2] == order[2]
    with pytest.raises(SourceError, match="3 of 36 images"):
        source.train[7]


def test_bad_files_met_by_workers_are_known_to_the_main_process(tmp_path: Path) -> None:
    folder(tmp_path, {"a": 10, "b": 10})
    source = open_source(tmp_path, max_skipped=0.2)
    order = keys(source.train)
    spoil(tmp_path, order[2], order[9])
    train = source.train.with_transform(EvalTransform(8))
    loader = DataLoader(train, batch_size=3, num_workers=2)
    seen = [key for _, _, batch in loader for key in batch]
    assert seen[2] == order[3]
    assert seen[9] == order[10]
    assert [item.key for item in source.train.skipped()] == [order[2], order[9]]


def test_skipped_is_written_at_once(tmp_path: Path) -> None:
    path = tmp_path / "skipped.txt"
    path.write_text("old")
    odd = Skipped(key="a\nb\tc\udcff.png", reason="is damaged.")
    write_skipped(path, [Skipped(key="ü/1.png", reason="is empty."), odd])
    assert path.read_text("utf-8").splitlines() == [
        "ü/1.png\tis empty.",
        "a\\nb\\tc\\udcff.png\tis damaged.",
    ]

    def fails():
        yield odd
        raise RuntimeError("disk full")

    with pytest.raises(RuntimeError):
        write_skipped(path, fails())
    assert path.read_text("utf-8").startswith("ü/1.png")
    assert [p.name for p in tmp_path.iterdir()] == ["skipped.txt"]


def test_pairs_of_position_and_seed_make_a_run_reproducible(tmp_path: Path) -> None:
    folder(tmp_path, {"a": 10, "b": 10})
    train = open_source(tmp_path).train.with_transform(TrainTransform(8))
    pairs = [(position, 1000 + position) for position in range(12)]
    torch.manual_seed(5)
    before = torch.default_generator.get_state()
    alone = {pair: train[pair][0] for pair in pairs}
    assert torch.equal(torch.default_generator.get_state(), before)
    # The middle of an epoch, with other workers and another batch size, is the same middle.
    for workers in (0, 2):
        loader = DataLoader(train, batch_size=4, sampler=pairs[4:], num_workers=workers)
        batches = torch.cat([images for images, _, _ in loader])
        assert torch.equal(batches, torch.stack([alone[pair] for pair in pairs[4:]]))
    assert not torch.equal(train[3, 1][0], train[3, 2][0])


def test_a_split_is_a_sequence_and_can_be_pickled(tmp_path: Path) -> None:
    folder(tmp_path, {"a": 3, "b": 3})
    train = open_source(tmp_path).train
    assert len(list(train)) == len(train) == 4
    assert train[-1][2] == train.key(3)
    with pytest.raises(IndexError):
        train[4]
    copy = pickle.loads(pickle.dumps(train))
    assert [copy[i][2] for i in range(4)] == keys(train)
    assert repr(train) == "Split(4 images, transform=None)"


# Kinds of data


@pytest.fixture
def sources(monkeypatch: pytest.MonkeyPatch) -> Registry[SourceKind]:
    """The registered kinds of data; what a test adds is removed afterwards."""
    for part in ("_items", "_origins"):
        monkeypatch.setattr(SOURCES, part, dict(getattr(SOURCES, part)))
    return SOURCES


def test_a_registered_kind_of_data_is_opened_and_listed(sources: Registry[SourceKind]) -> None:
    @register_source("few", syntax="few:DATA")
    def open_few(data: str, options: SourceOptions) -> Source:
        source = open_source(data.removeprefix("few:"), seed=options.seed)
        return replace(source, name=data, train=source.train.select(range(3)))

    source = open_source("few:scenes?size=32&train=9&val=8", seed=4)
    assert keys(source.train) == [f"scenes/train/{i}" for i in range(3)]
    assert source.train[0][0] == open_source("scenes?size=32", seed=4).train[0][0]
    assert "few:DATA" in source_syntax()
    with pytest.raises(SourceError, match="few:DATA"):
        open_source("nowhere")


def test_the_kind_registered_last_is_asked_first(
    tmp_path: Path, sources: Registry[SourceKind]
) -> None:
    folder(tmp_path, {"a": 2, "b": 2})
    (tmp_path / "list.csv").touch()

    @register_source("csv", syntax="a folder with list.csv", matches=has_list)
    def open_csv(data: str, options: SourceOptions) -> Source:
        return open_source("scenes?size=32&train=8&val=8")

    assert open_source(tmp_path).name.startswith("scenes")
    with pytest.raises(ValueError, match="'folder' already"):
        register_source("folder", syntax="a folder")(open_csv)


def has_list(data: str | Path) -> bool:
    return Path(data, "list.csv").exists()


# Labeled images

SCENES = "scenes?size=32&train=8&val=40"


def test_labels_are_matched_by_name() -> None:
    source = open_source(SCENES)
    names = tuple(reversed((*source.classes, "unicorn")))
    images = labeled_images(source, "val", names, EvalTransform(16))
    assert [names[images[i][1]] for i in range(9)] == [source.classes[i % 8] for i in range(9)]
    with pytest.raises(ValueError, match="'ladybird' is none that the model knows"):
        labeled_images(source, "val", ("lemon", "unicorn"), EvalTransform(16))


NAMES, IDS = ("tench", "golf ball", "great white shark"), ("n01", "n03", "n02")


@pytest.mark.parametrize(
    "folders",
    [
        ["golf ball", "tench"],
        ["Golf_Ball", "tench"],
        ["n03", "N01"],
        ["1", "0"],
        ["001", "000"],
        ["001_n03", "000_n01"],
        ["1-golf-ball", "0. tench"],
    ],
)
def test_class_folders_are_named_in_any_usual_way(folders: list[str]) -> None:
    assert match_classes(folders, NAMES, IDS) == [1, 0]


@pytest.mark.parametrize(
    "folders",
    [
        ["tench", "unicorn"],
        # Counted from 1.
        ["001_tench", "002_golf_ball"],
        ["2", "3"],
        # One way for all folders.
        ["n01", "golf ball"],
        # Two folders for one class.
        ["tench", "Tench"],
    ],
)
def test_class_folders_that_fit_no_class_are_an_error(folders: list[str]) -> None:
    with pytest.raises(ValueError, match="none that the model knows"):
        match_classes(folders, NAMES, IDS)


def test_a_validation_split_alone_can_be_evaluated(tmp_path: Path) -> None:
    for name in ("n01", "n03"):
        (tmp_path / "data" / "val" / name).mkdir(parents=True)
        for number in range(2):
            path = tmp_path / "data" / "val" / name / f"{number}.png"
            Image.new("RGB", (16, 16)).save(path)
    with tarfile.open(tmp_path / "val-0.tar", "w") as archive:
        archive.add(tmp_path / "data" / "val", "val")
    for data in (tmp_path / "data", tmp_path / "val-0.tar"):
        with pytest.raises(SourceError):
            open_source(data)
        source = open_source(data, only_val=True)
        assert (len(source.train), len(source.val)) == (0, 4)
        images = labeled_images(source, "val", NAMES, EvalTransform(16), class_ids=IDS)
        assert [images[n][1] for n in range(4)] == [0, 0, 1, 1]


def test_labels_are_positions_where_the_model_has_no_names() -> None:
    source = open_source(SCENES)
    images = labeled_images(source, "val", None, EvalTransform(16), num_classes=9)
    assert [images[i][1] for i in range(9)] == [*range(8), 0]
    with pytest.raises(ValueError, match=r"8 classes .*knows 5"):
        labeled_images(source, "val", None, EvalTransform(16), num_classes=5)


def test_splits_and_limits_of_labeled_images() -> None:
    source = open_source(SCENES)

    def images(split: str) -> LabeledImages:
        return labeled_images(source, split, source.classes, EvalTransform(16))

    assert [len(images(split)) for split in ("val", "train", "all")] == [40, 8, 48]
    with pytest.raises(ValueError, match="val, train, all"):
        images("test")
    few = images("all").limit(6, seed=1)
    every = [key for _, _, key in images("all")]
    found = [key for _, _, key in few]
    assert len(few) == 6
    assert found == sorted(found, key=every.index)
    assert found != [key for _, _, key in images("all").limit(6, seed=2)]
    assert few.num_classes() == len({label for _, label, _ in few})
    with pytest.raises(ValueError, match="limit is 0"):
        images("val").limit(0)


def test_masks_are_cropped_as_the_images_are(tmp_path: Path) -> None:
    split = Split(Halves(9))
    source = Source(name="halves", classes=Scenes.classes, train=split, val=split)
    mask = labeled_images(source, "val", source.classes, EvalTransform(16)).masks()
    assert mask is not None
    assert mask(2) is None
    expected = torch.zeros(16, 16, dtype=torch.bool)
    expected[:, :8] = True
    assert torch.equal(mask(0), expected)
    folder(tmp_path, {"a": 2, "b": 2})
    plain = open_source(tmp_path)
    assert labeled_images(plain, "val", None, EvalTransform(16)).masks() is None


def test_where_an_image_cannot_be_read_the_mask_is_that_of_the_one_shown() -> None:
    class Stored(Halves):
        drawn = False

        def __init__(self, length: int) -> None:
            super().__init__(length)
            self.image = self.stored

        def stored(self, index: int, at_least: int | None) -> Image.Image:
            if index == 2:
                raise ImageError("The image 2 is damaged.")
            return self.scenes.image(index)

    split = Split(Stored(9))
    source = Source(name="stored", classes=Scenes.classes, train=split, val=split)
    images = labeled_images(source, "val", source.classes, EvalTransform(16))
    assert images[2][2] == images[3][2]
    mask = images.masks()
    # The image 2 has no mask of its own, the one in its place has.
    assert mask is not None and torch.equal(mask(2), mask(3))


def test_unreadable_images_of_an_evaluation_are_listed(tmp_path: Path) -> None:
    folder(tmp_path, {"a": 10, "b": 10})
    images = labeled_images(open_source(tmp_path), "train", None, EvalTransform(16))
    spoil(tmp_path, images.splits[0].key(3))
    assert images[3][2] == images.splits[0].key(4)
    assert [item.key for item in images.skipped()] == [images.splits[0].key(3)]
