"""Tar shards in every layout that is accepted, and every mistake that is refused."""

import io
import json
import os
import tarfile
from pathlib import Path

import pytest

from bcosvit.data.dataset import SourceError
from bcosvit.data.sources import check_source, open_source
from tests.data.support import class_folders, color, folder, keys, png, tar


def test_shards_of_class_folders(tmp_path: Path) -> None:
    tar(tmp_path / "train-0.tar", class_folders("train/", {"b": 2, "a": 1}))
    tar(tmp_path / "train-1.tar", class_folders("./train/", {"ü": 3}, start=20))
    tar(tmp_path / "val-0.tar", class_folders("val/", {"a": 1, "b": 1, "ü": 1}, start=40))
    source = open_source(tmp_path)
    assert source.classes == ("a", "b", "ü")
    assert source.train.labels() == [1, 1, 0, 2, 2, 2]
    assert keys(source.val) == [f"val-0.tar/val/{c}/0.png" for c in ("a", "b", "ü")]
    for split, numbers in ((source.train, [0, 1, 2, 20, 21, 22]), (source.val, [40, 41, 42])):
        assert [image.getpixel((0, 0)) for image, _, _ in split] == [color(n) for n in numbers]


def test_brace_pattern_and_splits_by_shard_name(tmp_path: Path) -> None:
    for i in range(3):
        tar(tmp_path / f"train-{i:03d}.tar", class_folders("", {"a": 2, "b": 2}))
    tar(tmp_path / "val-000.tar", class_folders("", {"a": 1, "b": 1}))
    source = open_source(f"{tmp_path}/{{train-{{000..002}},val-000}}.tar")
    assert len(source.train) == 12
    assert keys(source.val) == ["val-000.tar/a/0.png", "val-000.tar/b/0.png"]
    only = open_source(f"{tmp_path}/train-{{000..001}}.tar", val_fraction=0.25)
    assert (len(only.train), len(only.val)) == (6, 2)
    with pytest.raises(SourceError, match=r"1 of 4 shards are missing.*train-003\.tar"):
        open_source(f"{tmp_path}/train-{{000..003}}.tar")


def test_no_image_is_there_twice(tmp_path: Path) -> None:
    for i in range(3):
        tar(tmp_path / f"{i}.tar", class_folders("", {"a": 4, "b": 4}, start=8 * i))
    # As `tar --append` does it.
    with tarfile.open(tmp_path / "2.tar", "a") as archive:
        info = tarfile.TarInfo("a/0.png")
        info.size = len(png(99))
        archive.addfile(info, io.BytesIO(png(99)))
    source = open_source(f"{tmp_path}/{{0..1}}.tar::{tmp_path}/{{1..2}}.tar", val_fraction=0.3)
    found = keys(source.train) + keys(source.val)
    assert len(found) == len(set(found)) == 24
    for split in (source.train, source.val):
        for image, _, key in split:
            if key == "2.tar/a/0.png":
                assert image.getpixel((0, 0)) == color(99)


@pytest.mark.parametrize(
    "pattern", ["{0..999999999}.tar", "{0..9}" * 9 + ".tar", "{a,b}" * 30 + ".tar"]
)
def test_a_pattern_that_stands_for_too_many_shards(tmp_path: Path, pattern: str) -> None:
    with pytest.raises(SourceError, match="are allowed"):
        open_source(f"{tmp_path}/{pattern}")
    with pytest.raises(SourceError, match="3 of 3 shards are missing"):
        open_source(f"{tmp_path}/{{a,{{b,c}}}}.tar")


def test_shards_in_train_and_val_folders_have_keys_of_their_own(tmp_path: Path) -> None:
    for part, count in (("train", 1), ("val", 3)):
        tar(tmp_path / part / "0.tar", class_folders("", {"a": count, "b": count}))
    source = open_source(tmp_path)
    assert keys(source.train) == ["train/0.tar/a/0.png", "train/0.tar/b/0.png"]
    assert len(source.val) == 6
    assert keys(source.val)[0] == "val/0.tar/a/0.png"


def test_a_packed_folder_is_like_the_folder(tmp_path: Path) -> None:
    folder(tmp_path / "pets", {"cat": 4, "dog": 4})
    with tarfile.open(tmp_path / "x.tar", "w") as archive:
        archive.add(tmp_path / "pets", "pets")
    source = open_source(tmp_path / "x.tar")
    assert source.classes == ("cat", "dog")
    assert len(source.train) == 6


def test_webdataset_labels(tmp_path: Path) -> None:
    members: dict[str, bytes] = {}
    for i in range(12):
        members[f"{i:03d}.png"] = png(i)
        members[f"{i:03d}.cls"] = str([10, 2][i % 2]).encode()
        members[f"{i:03d}.json"] = json.dumps({"label": 77, "text": "…"}).encode()
    source = open_source(tar(tmp_path / "x.tar", members))
    assert source.classes == ("2", "10")
    for image, label, key in source.train:
        number = int(key[-7:-4])
        assert label == 1 - number % 2
        assert image.getpixel((0, 0)) == color(number)


def test_webdataset_json_names_and_dots(tmp_path: Path) -> None:
    members = {
        "d/a.1.png": png(),
        "d/a.1.json": b'{"label": "x"}',
        "d/a.2.png": png(),
        "d/a.2.json": b'{"cls": "y"}',
        "d/b.left.png": png(),
        "d/b.right.PNG": png(),
        "d/b.json": b'{"class": "x", "caption": "two views"}',
        "d/c.png": png(),
        "d/c.json": b'{"caption": "the folder names the class"}',
        "d/._c.png": b"resource fork",
    }
    source = open_source(tar(tmp_path / "x.tar", members), val_fraction=0.01)
    labels = {
        s.key(i): source.classes[s.label(i)]
        for s in (source.train, source.val)
        for i in range(len(s))
    }
    assert labels == {
        "x.tar/d/a.1.png": "x",
        "x.tar/d/a.2.png": "y",
        "x.tar/d/b.left.png": "x",
        "x.tar/d/b.right.PNG": "x",
        "x.tar/d/c.png": "d",
    }


def test_classes_txt_names_the_numbers(tmp_path: Path) -> None:
    members = {
        f"{i}.{e}": d for i in range(6) for e, d in (("png", png(i)), ("cls", str(i % 2).encode()))
    }
    path = tar(tmp_path / "x.tar", members)
    (tmp_path / "classes.txt").write_text("tench\nchurch\n")
    assert open_source(path).classes == ("tench", "church")
    (tmp_path / "classes.txt").write_text("tench\nchurch\nlemon\n")
    with pytest.raises(SourceError, match=r"names 3 classes"):
        open_source(path)


SHARD_MISTAKES = {
    "no label": ({"a.png": png(), "b.png": png()}, "a.png has no label"),
    "no images": ({"a.cls": b"1"}, "no images"),
    "single class": (class_folders("", {"a": 3}), "single class"),
    "deep json": (
        {"a.png": png(), "a.json": b"[" * 100_000},
        "a.json cannot be understood",
    ),
    "bad json": ({"a.png": png(), "a.json": b"{"}, "a.json cannot be understood"),
    "odd label": ({"a.png": png(), "a.json": b'{"label": [1]}'}, "is \\[1\\]"),
    "mixed labels": (
        {"a.png": png(), "a.cls": b"1", "b.png": png(), "b.cls": b"cat"},
        "partly numbers, partly names",
    ),
    "case": (class_folders("", {"Cat": 2, "cat": 2}), "differ only"),
    "val lacks a class": (
        class_folders("train/", {"a": 2, "b": 2}) | class_folders("val/", {"a": 2}),
        "no images of 'b' in the validation split",
    ),
    "half marked": (
        class_folders("train/", {"a": 2, "b": 2}) | class_folders("c", {"": 2}),
        "marked neither, train",
    ),
    "only val": (class_folders("val/", {"a": 2, "b": 2}), "marked val"),
}


@pytest.mark.parametrize("mistake", SHARD_MISTAKES)
def test_shard_mistakes(mistake: str, tmp_path: Path) -> None:
    members, message = SHARD_MISTAKES[mistake]
    with pytest.raises(SourceError, match=message):
        open_source(tar(tmp_path / "x.tar", members))


def test_broken_shards(tmp_path: Path) -> None:
    path = tar(tmp_path / "x.tar", class_folders("", {"a": 9, "b": 9}))
    whole = path.read_bytes()
    path.write_bytes(whole[: 512 * 5 + 20])
    with pytest.raises(SourceError, match=r"x\.tar ends within a/2\.png"):
        open_source(path)
    path.write_bytes(b"not a tar" * 200)
    with pytest.raises(SourceError, match="not an uncompressed tar"):
        open_source(path)
    with tarfile.open(tmp_path / "x.tar.gz", "w:gz") as archive:
        archive.addfile(tarfile.TarInfo("a.png"))
    with pytest.raises(SourceError, match="unpack compressed shards"):
        open_source(tmp_path / "x.tar.gz")
    with pytest.raises(SourceError, match="missing"):
        open_source(tmp_path / "nowhere.tar")


def test_bad_pictures_in_shards_are_found(tmp_path: Path) -> None:
    members = class_folders("", {"a": 9, "b": 9})
    members["a/3.png"] = png()[:30]
    source = open_source(tar(tmp_path / "x.tar", members), max_skipped=0.2)
    _, skipped = check_source(source)
    assert [item.key for item in skipped] == ["x.tar/a/3.png"]
    assert str(tmp_path / "x.tar") in skipped[0].reason


def test_remote_shards_are_fetched_once(tmp_path: Path) -> None:
    shard = tar(tmp_path / "far" / "train-0.tar", class_folders("", {"a": 4, "b": 4}))
    cache = tmp_path / "cache"
    address = f"pipe:cat '{shard}'"
    source = open_source(address, cache=cache)
    assert source.classes == ("a", "b")
    assert source.train[0][0].size == (16, 12)
    shard.unlink()
    assert open_source(address, cache=cache).fingerprint() == source.fingerprint()
    with pytest.raises(SourceError, match="cannot be fetched"):
        open_source(f"pipe:cat '{tmp_path}/gone.tar' 2>/dev/null", cache=cache)
    assert [p.name for p in cache.rglob("*") if p.is_file()] == ["train-0.tar"]
    with pytest.raises(SourceError, match="cannot be fetched"):
        open_source("nonsense://x/y.tar", cache=cache)


def test_an_archive_beside_its_pictures_is_not_a_shard(tmp_path: Path) -> None:
    folder(tmp_path, {"a": 3, "b": 3})
    (tmp_path / "download.tar").write_bytes(b"")
    assert open_source(tmp_path).classes == ("a", "b")


def test_pipes_are_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.tar")
    for path, says in ((tmp_path / "x.tar", "are missing"), (tmp_path, "not a regular file")):
        with pytest.raises(SourceError, match=says):
            open_source(path)
