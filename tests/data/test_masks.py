"""Masks from files are found by name, read in all formats, and cut like their pictures."""

import json

import numpy as np
import pytest
import torch
from PIL import Image

from bcosvit.data.dataset import SourceError, labeled_images, open_source
from bcosvit.data.masks import MaskFiles, _run_lengths
from bcosvit.data.transforms import EvalTransform

WIDE, HIGH = 40, 30


@pytest.fixture
def square():
    mask = np.zeros((HIGH, WIDE), np.bool_)
    mask[5:20, 12:30] = True
    return mask


@pytest.fixture
def pictures(tmp_path, square):
    """Pictures that are white where their object is."""
    image = Image.fromarray(np.repeat(square[..., None] * np.uint8(255), 3, 2))
    for name in ("cat/a", "cat/b", "dog/a", "dog/c"):
        path = tmp_path / "data" / f"{name}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        image.save(path)
    source = open_source(tmp_path / "data", val_fraction=0.5)
    return source, labeled_images(source, "all", source.classes, EvalTransform(24))


def test_masks_are_cut_like_their_pictures(tmp_path, pictures, square):
    source, images = pictures
    for name in ("cat/a", "cat/b", "dog/a"):
        path = tmp_path / "masks" / f"{name}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(square.astype(np.uint8)).save(path)
    images = images.with_masks(MaskFiles(tmp_path / "masks"), source.classes)
    find = images.masks()
    for index in range(len(images)):
        image, _, key = images[index]
        mask = find(index)
        if key == "dog/c.png":
            assert mask is None
        else:
            assert torch.equal(mask, image[0] > 0.5)


def test_values_of_label_images(tmp_path, square):
    labels = np.where(square, 1, 2).astype(np.uint8)
    labels[5] = 3
    labels[0] = 255
    Image.fromarray(labels).save(tmp_path / "a.png")
    assert np.array_equal(MaskFiles(tmp_path, (1, 3)).mask("a.jpg"), np.isin(labels, (1, 3)))
    # By default, void is no object.
    assert np.array_equal(MaskFiles(tmp_path).mask("a.jpg"), labels != 255)
    Image.fromarray(square.astype(np.uint8) * 255).save(tmp_path / "a.png")
    assert np.array_equal(MaskFiles(tmp_path).mask("a.jpg"), square)


def test_palettes_are_labels_and_arrays_are_read(tmp_path, square):
    image = Image.fromarray(square.astype(np.uint8) * 7, mode="P")
    image.putpalette([0] * 768)
    image.save(tmp_path / "p.png")
    np.savez(tmp_path / "q_mask.npz", mask=square)
    found = MaskFiles(tmp_path)
    assert np.array_equal(found.mask("x/p.jpg"), square)
    assert np.array_equal(found.mask("q.jpg"), square)


def test_names_that_several_files_have_are_not_guessed(tmp_path, square):
    for name in ("cat/a.npz", "dog/a.npz"):
        (tmp_path / name).parent.mkdir()
        np.savez(tmp_path / name, mask=square)
    found = MaskFiles(tmp_path)
    assert found.find("val/dog/a.jpg") == "dog/a"
    assert found.find("a.jpg") is None


def test_voc_boxes_of_the_class(tmp_path, square):
    box = "<bndbox><xmin>13</xmin><ymin>6</ymin><xmax>30</xmax><ymax>20</ymax></bndbox>"
    other = "<bndbox><xmin>1</xmin><ymin>1</ymin><xmax>3</xmax><ymax>3</ymax></bndbox>"
    (tmp_path / "a.xml").write_text(
        f"<annotation><size><width>{WIDE}</width><height>{HIGH}</height></size>"
        f"<object><name>Cat</name>{box}</object><object><name>dog</name>{other}</object>"
        "</annotation>"
    )
    found = MaskFiles(tmp_path)
    assert np.array_equal(found.mask("a.jpg", "cat"), square)
    assert found.mask("a.jpg", "bird").sum() == square.sum() + 9


def test_coco_polygons_runs_and_boxes(tmp_path, square):
    columns = square.T.ravel()
    changes = np.flatnonzero(np.diff(np.concatenate([[False], columns, [not columns[-1]]])))
    runs = np.diff(np.concatenate([[0], changes])).tolist()
    shapes = {
        "polygon": [[12, 5, 29, 5, 29, 19, 12, 19]],
        "runs": {"size": [HIGH, WIDE], "counts": runs},
        "box": None,
    }
    content = {
        "categories": [{"id": 1, "name": "cat"}],
        "images": [
            {"id": n, "file_name": f"{name}.jpg", "width": WIDE, "height": HIGH}
            for n, name in enumerate(shapes)
        ],
        "annotations": [
            {"image_id": n, "category_id": 1, "segmentation": shape, "bbox": [12, 5, 18, 15]}
            for n, shape in enumerate(shapes.values())
        ],
    }
    (tmp_path / "coco.json").write_text(json.dumps(content))
    found = MaskFiles(tmp_path / "coco.json")
    for name in shapes:
        assert np.array_equal(found.mask(f"{name}.jpg"), square), name


def test_compressed_run_lengths():
    # As pycocotools writes [6, 1, 40, 4, 5, 4, 5, 4, 21].
    assert _run_lengths("61X13mN000`0") == [6, 1, 40, 4, 5, 4, 5, 4, 21]


def test_masks_of_other_sizes_or_names_are_refused(tmp_path, pictures, square):
    _, images = pictures
    (tmp_path / "elsewhere").mkdir()
    np.savez(tmp_path / "elsewhere" / "other.npz", mask=square)
    with pytest.raises(SourceError, match="None of 4 images"):
        images.with_masks(MaskFiles(tmp_path / "elsewhere"))
    (tmp_path / "masks").mkdir()
    np.savez(tmp_path / "masks" / "b.npz", mask=square.T)
    wrong = images.with_masks(MaskFiles(tmp_path / "masks"))
    with pytest.raises(SourceError, match="proportions"):
        [wrong.masks()(index) for index in range(len(wrong))]
    with pytest.raises(SourceError, match="neither"):
        MaskFiles(tmp_path / "nothing")
