"""Hugging Face datasets, made here and saved, so that nothing is downloaded."""

from pathlib import Path

import pytest

from bcosvit.data.dataset import SourceError
from bcosvit.data.sources import check_source, open_source
from tests.data.support import color, folder, png


@pytest.fixture
def datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    library = pytest.importorskip("datasets")
    monkeypatch.setattr(library.config, "HF_DATASETS_CACHE", tmp_path / "hf-cache")
    library.disable_progress_bars()
    yield library
    library.enable_progress_bars()


def table(datasets, count: int, start: int = 0, bad: int | None = None, **columns):
    features = datasets.Features(
        {
            "picture": datasets.Image(),
            "kind": datasets.ClassLabel(names=["zebra", "ant"]),
            "note": datasets.Value("string"),
            **columns,
        }
    )
    rows: dict[str, list] = {
        "picture": [
            {"bytes": b"junk" if i == bad else png(start + i), "path": None} for i in range(count)
        ],
        "kind": [i % 2 for i in range(count)],
        "note": [str(i) for i in range(count)],
        **{name: [0] * count for name in columns},
    }
    return datasets.Dataset.from_dict(rows, features=features)


def test_saved_dataset_with_splits(datasets, tmp_path: Path) -> None:
    saved = datasets.DatasetDict(
        {"train": table(datasets, 6), "validation": table(datasets, 4, start=50)}
    )
    saved.save_to_disk(tmp_path / "saved")
    source = open_source(f"hf:{tmp_path / 'saved'}")
    assert source.classes == ("zebra", "ant")
    assert source.train.labels() == [0, 1, 0, 1, 0, 1]
    image, label, key = source.val[3]
    assert (image.getpixel((0, 0)), label, key) == (color(53), 1, "validation/3")


def test_saved_dataset_without_splits_and_with_a_bad_picture(datasets, tmp_path: Path) -> None:
    table(datasets, 20, bad=7).save_to_disk(tmp_path / "saved")
    source = open_source(f"hf:{tmp_path / 'saved'}", val_fraction=0.2)
    assert (len(source.train), len(source.val)) == (16, 4)
    _, skipped = check_source(source)
    assert [item.key for item in skipped] == ["train/7"]
    assert "train/7 is not an image" in skipped[0].reason


def test_parquet_file_and_image_folder(datasets, tmp_path: Path) -> None:
    table(datasets, 8).to_parquet(tmp_path / "x.parquet")
    assert open_source(f"hf:{tmp_path / 'x.parquet'}").classes == ("zebra", "ant")
    folder(tmp_path / "pets" / "train", {"cat": 3, "dog": 3})
    source = open_source(f"hf:{tmp_path / 'pets'}")
    assert source.classes == ("cat", "dog")
    assert len(source.train) == 4
    assert source.train[0][0].size == (16, 12)


def test_columns_are_found_by_type_or_chosen(datasets, tmp_path: Path) -> None:
    coarse = datasets.ClassLabel(names=["thing", "other"])
    table(datasets, 8, coarse=coarse).save_to_disk(tmp_path / "two")
    with pytest.raises(SourceError, match=r"2 columns of type ClassLabel.*\?label=NAME"):
        open_source(f"hf:{tmp_path / 'two'}")
    assert open_source(f"hf:{tmp_path / 'two'}?label=kind").classes == ("zebra", "ant")
    with pytest.raises(SourceError, match="none of them named nope"):
        open_source(f"hf:{tmp_path / 'two'}?label=nope")
    with pytest.raises(SourceError, match=r"option color of .* is unknown: use image, label"):
        open_source(f"hf:{tmp_path / 'two'}?color=red")
    table(datasets, 8).remove_columns("picture").save_to_disk(tmp_path / "none")
    with pytest.raises(SourceError, match="0 columns of type Image"):
        open_source(f"hf:{tmp_path / 'none'}")


def test_unlabeled_and_missing_datasets(datasets, tmp_path: Path) -> None:
    rows = table(datasets, 6)
    for missing in (-1, None):
        kinds = [0, 1, 0, 1, 0, missing]
        change = rows.remove_columns("kind").add_column(
            "kind", kinds, feature=rows.features["kind"]
        )
        change.save_to_disk(tmp_path / f"unlabeled {missing}")
        with pytest.raises(SourceError, match="images without a label"):
            open_source(f"hf:{tmp_path}/unlabeled {missing}")
    with pytest.raises(SourceError, match="cannot be loaded"):
        open_source(f"hf:{tmp_path / 'nowhere'}")
    datasets.DatasetDict({"test": rows}).save_to_disk(tmp_path / "test-only")
    with pytest.raises(SourceError, match="no train split but test"):
        open_source(f"hf:{tmp_path / 'test-only'}")
