"""Masks from files are found by name, read in all formats, and cut like their pictures."""

import io
import json
import os
import subprocess
import sys
import zipfile

import numpy as np
import pytest
import torch
from PIL import Image

from bcosvit.data import annotations as limits
from bcosvit.data.annotations import _run_lengths
from bcosvit.data.dataset import SourceError
from bcosvit.data.labeled import labeled_images
from bcosvit.data.masks import MaskFiles
from bcosvit.data.sources import open_source
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


def test_a_mask_in_the_folder_of_one_class_is_not_that_of_another(tmp_path, pictures, square):
    _, images = pictures
    (tmp_path / "masks" / "cat").mkdir(parents=True)
    np.savez(tmp_path / "masks" / "cat" / "a.npz", mask=square)
    find = images.with_masks(MaskFiles(tmp_path / "masks")).masks()
    found = {images[index][2]: find(index) is not None for index in range(len(images))}
    assert found == {"cat/a.png": True, "cat/b.png": False, "dog/a.png": False, "dog/c.png": False}
    # Masks that lie nowhere in particular are those of pictures of a name of their own.
    (tmp_path / "flat").mkdir()
    np.savez(tmp_path / "flat" / "b.npz", mask=square)
    flat = MaskFiles(tmp_path / "flat")
    assert flat.match(["dog/b.jpg", "cat/c.jpg"]) == {"dog/b.jpg": "b"}
    with pytest.raises(SourceError, match=r"mask b in .* fits both cat/b.jpg and dog/b.jpg"):
        flat.match(["cat/b.jpg", "dog/b.jpg"])


def test_where_a_picture_cannot_be_read_the_mask_is_that_of_the_one_shown(tmp_path):
    for name, left in (("cat/a", 0), ("cat/b", 20), ("dog/a", 5), ("dog/b", 15)):
        mask = np.zeros((HIGH, WIDE), np.bool_)
        mask[:, left : left + 20] = True
        for part, pixels in (("data", np.repeat(mask[..., None], 3, 2)), ("masks", mask)):
            path = tmp_path / part / f"{name}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels.astype(np.uint8) * 255).save(path)
    source = open_source(tmp_path / "data", val_fraction=0.1)
    unreadable = source.train.key(0)
    (tmp_path / "data" / unreadable).write_bytes(b"no picture")
    images = labeled_images(source, "train", None, EvalTransform(24))
    images = images.with_masks(MaskFiles(tmp_path / "masks"))
    image, _, key = images[0]
    assert key != unreadable
    assert torch.equal(images.masks()(0), image[0] > 0.5)


def test_labels_of_16_bits_are_not_cut_off(tmp_path):
    labels = np.array([[0, 300, 65535, 7]], np.uint16)
    for order in "<>":
        Image.fromarray(labels.astype(f"{order}u2")).save(tmp_path / "a.tif")
        found = MaskFiles(tmp_path, (300, 7)).mask("a.jpg")
        assert found.tolist() == [[False, True, False, True]]


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


def npy(shape, content=b""):
    """An array file that says it has this shape."""
    file = io.BytesIO()
    header = {"descr": "|u1", "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, header)
    return file.getvalue() + content


def zipped(name, content, kind=zipfile.ZIP_DEFLATED, times=1):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", kind) as archive:
        for number in range(times):
            archive.writestr(f"{number or ''}{name}", content)
    return file.getvalue()


def voc(width, height, right="5"):
    box = f"<xmin>1</xmin><ymin>1</ymin><xmax>{right}</xmax><ymax>5</ymax>"
    size = f"<size><width>{width}</width><height>{height}</height></size>"
    return f"<a>{size}<object><bndbox>{box}</bndbox></object></a>".encode()


ENTITIES = b'<!DOCTYPE a [<!ENTITY e "5">]>' + voc(10, 10, "&e;")
"""Entities that contain entities may grow to gigabytes, and others would be read from elsewhere."""

POSTSCRIPT = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\nshowpage\n"
"""Pillow would start Ghostscript for it, whatever the file's name."""


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("x.png", POSTSCRIPT, "not an image of a known format"),
        ("x.npy", npy((10**6, 10**6)), "300 MB are allowed"),
        ("x.npy", npy((-5, -5), b"0" * 25), "300 MB are allowed"),
        ("x.npy", npy((5, 5), b"0" * 24), "it ends after 24 of 25 bytes"),
        ("x.npz", zipped("mask.npy", npy((10**5, 10**5))), "300 MB are allowed"),
        ("x.npz", zipped("a.txt", b""), "it holds no array"),
        ("x.npz", b"PK\x05\x06" + bytes(30), "cannot be read"),
        ("x.xml", voc(10**6, 10**6), "100,000,000 are allowed"),
        ("x.xml", voc("inf", 10), "coordinates beyond"),
        ("x.xml", voc(10, 10, "inf"), "coordinates beyond"),
        ("x.xml", voc(10, 10) + b"<", "cannot be read"),
        ("x.xml", voc(10, 10).replace(b"<a>", b"<a>" + b" " * 10**7, 1), "larger than 5 MB"),
        ("x.xml", ENTITIES, "it has a document type"),
        ("x.xml", ENTITIES.decode().encode("utf-16"), "it has a document type"),
        ("x.npz", zipped("mask.npy", npy((5, 5), b"0" * 25), zipfile.ZIP_LZMA), "compressed in"),
        ("x.npz", zipped("x" * 60_000, b"", times=20), "more entries than"),
    ],
)
def test_hostile_files_are_refused_in_one_sentence(tmp_path, name, content, says):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(SourceError, match=says) as said:
        MaskFiles(tmp_path).mask("x.jpg")
    assert str(said.value).startswith(f"The mask {tmp_path / name} cannot be read (")


def test_arrays_with_objects_are_not_unpickled(tmp_path):
    np.save(tmp_path / "x.npy", np.array([[{}]], dtype=object))
    with pytest.raises(SourceError, match="expected numbers or truth values"):
        MaskFiles(tmp_path).mask("x.jpg")


def test_a_mask_may_have_one_row(tmp_path):
    np.save(tmp_path / "x.npy", np.array([[True, False]]))
    assert MaskFiles(tmp_path).mask("x.jpg").tolist() == [[True, False]]


def test_pixels_that_are_no_number_are_not_taken_for_the_object(tmp_path):
    np.save(tmp_path / "x.npy", np.array([[1.0, np.nan]]))
    with pytest.raises(SourceError, match="it holds NaN"):
        MaskFiles(tmp_path).mask("x.jpg")


@pytest.mark.parametrize("name", ["x.png", "x.npy", "x.xml"])
def test_pipes_are_not_waited_for(tmp_path, name):
    os.mkfifo(tmp_path / name)
    with pytest.raises(SourceError, match="not a regular file"):
        MaskFiles(tmp_path).mask("x.jpg")


SQUARE = [[0, 0, 5, 0, 5, 5, 0, 5]]


def annotations(path, shape, **image):
    known = {"id": 1, "file_name": "x.jpg", "height": 10, "width": 10, **image}
    objects = [{"image_id": 1, "segmentation": shape}]
    path.write_text(json.dumps({"images": [known], "annotations": objects}))
    return path


@pytest.mark.parametrize(
    ("shape", "image", "says"),
    [
        (SQUARE, {"height": 10**6, "width": 10**6}, "100,000,000 are allowed"),
        (SQUARE, {"height": -5}, "does not say the picture's size"),
        (SQUARE, {"height": float("inf")}, "no file of COCO's annotations"),
        (SQUARE, {"file_name": ""}, "no file of COCO's annotations"),
        (SQUARE, {"file_name": 5}, "no file of COCO's annotations"),
        ([[0, 0, 5]], {}, "cannot be read"),
        ([["a", "b", "c", "d"]], {}, "could not convert"),
        ([[float("nan")] * 6], {}, "coordinates beyond"),
        ([[0, 0, 1e30, 5, 0, 5]], {}, "coordinates beyond"),
        ([SQUARE[0], 5], {}, "not iterable"),
        ([[0, 0, 5, 10**4] * 400], {"height": 10**4}, "would take too long"),
        ([SQUARE[0]] * 6_000, {"height": 10**5}, "would take too long"),
        ({"counts": [0, 10**12]}, {}, "do not add up to the 100 pixels"),
        ({"counts": [-5, 105]}, {}, "do not add up"),
        ({"counts": [5, 5]}, {}, "do not add up"),
        ({"counts": "o" * 5}, {}, "end early"),
        ({"counts": "o" * 500_000 + "0"}, {}, "damaged"),
        ({"counts": "~~~"}, {}, "damaged"),
        ({"counts": 7}, {}, "not iterable"),
        ({"size": [10, 10]}, {}, "counts"),
        (["a", 1, 2, 3], {}, "could not convert"),
        ([1, 2, 3], {}, "not enough values"),
        ([float("inf"), 1, 2, 3], {}, "coordinates beyond"),
        (7, {}, "not iterable"),
    ],
)
def test_hostile_annotations_are_refused_in_one_sentence(tmp_path, shape, image, says):
    path = annotations(tmp_path / "a.json", shape, **image)
    with pytest.raises(SourceError, match=says):
        MaskFiles(path).mask("x.jpg")


@pytest.mark.parametrize(
    "content",
    [
        "[" * 100_000,
        "[]",
        '{"images": 5, "annotations": []}',
        "\xff",
        '{"images": [{"id": [], "file_name": "x.jpg", "height": 9, "width": 9}]}',
        '{"images": [' + "[" * 100_000,
        '{"annotations": [{"image_id": 1, "bbox": [1, 1, 2, 2]}]}',
    ],
)
def test_what_is_no_file_of_annotations(tmp_path, content):
    path = tmp_path / "a.json"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(SourceError, match="no file of COCO's annotations"):
        MaskFiles(path)


def test_annotations_may_come_in_any_order_and_encoding(tmp_path):
    entry = {"image_id": "é", "category_id": 3, "bbox": [1, 1, 2, 2], "note": "\u4e2d" * 300_000}
    other = {"image_id": "é", "category_id": 4, "bbox": [5, 5, 1, 1]}
    image = {"id": "é", "file_name": "ü/x.jpg", "height": 10, "width": 10}
    names = [{"id": 3, "name": "gâteau"}, {"id": 4, "name": "dog"}]
    content = {"annotations": [entry, other], "info": {"a": 1}, "images": [image]}
    content |= {"empty": [], "categories": names, "year": 2026}
    for ascii_only, indent in ((True, None), (False, 3)):
        path = tmp_path / "a.json"
        text = json.dumps(content, ensure_ascii=ascii_only, indent=indent)
        path.write_text(text, encoding="utf-8")
        assert MaskFiles(path).mask("ü/x.jpg", "gâteau").sum() == 4
        assert MaskFiles(path).mask("ü/x.jpg", "DOG").sum() == 1
        path.write_text(text + "{}", encoding="utf-8")
        with pytest.raises(SourceError, match="goes on after its end"):
            MaskFiles(path)


@pytest.mark.parametrize(
    ("limit", "value", "says"),
    [
        ("COCO_BYTES", 100, "it is larger than"),
        ("ENTRY_BYTES", 100, "it is damaged at byte 12, or has more than"),
        ("PICTURES", 1, "divide it"),
        ("ENTRIES", 4, "divide it"),
        ("NAME_BYTES", 5, "divide it"),
    ],
)
def test_annotations_have_limits(tmp_path, monkeypatch, limit, value, says):
    image = {"file_name": "name.jpg", "height": 10, "width": 10}
    images = [{"id": number, **image, "note": "x" * 100} for number in (1, 2)]
    objects = [{"image_id": number, "bbox": [1, 1, 2, 2]} for number in (1, 1, 1)]
    path = tmp_path / "a.json"
    path.write_text(json.dumps({"images": images, "annotations": objects}))
    assert MaskFiles(path).find("name.jpg") == "name"
    monkeypatch.setattr(limits, limit, value)
    with pytest.raises(SourceError, match=says):
        MaskFiles(path)


def test_the_annotations_of_a_picture_have_a_limit(tmp_path, monkeypatch):
    path = annotations(tmp_path / "a.json", SQUARE)
    found = MaskFiles(path)
    monkeypatch.setattr(limits, "ENTRY_BYTES", 10)
    with pytest.raises(SourceError, match="its annotations have more than"):
        found.mask("x.jpg")


CHILD = """
import sys
from bcosvit.data.masks import MaskFiles

def peak():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) // 1000 for line in lines if line.startswith("VmHWM"))

before = peak()
try:
    MaskFiles(sys.argv[1])
except ValueError as error:
    print(error, file=sys.stderr)
print(peak() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="Linux tells the peak")
@pytest.mark.parametrize("start", ['{"annotations": [', '{"a": {"b":'])
def test_what_a_file_of_annotations_takes_does_not_grow_with_it(tmp_path, start):
    # As a whole, these 45 MB are a gigabyte of empty lists.
    path = tmp_path / "a.json"
    path.write_text(start + "[" + "[]," * 15_000_000)
    command = [sys.executable, "-c", CHILD, str(path)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert "is no file of COCO's annotations" in done.stderr
    assert int(done.stdout) <= 310


def test_several_kinds_of_shapes_are_one_mask(tmp_path):
    path = annotations(tmp_path / "a.json", SQUARE)
    content = json.loads(path.read_text())
    runs = {"counts": [90, 10]}
    content["annotations"] += [
        {"image_id": 1, "segmentation": each} for each in (runs, [7, 7, 2, 2])
    ]
    path.write_text(json.dumps(content))
    expected = np.zeros((10, 10), np.bool_)
    expected[:6, :6] = expected[:, 9] = expected[7:9, 7:9] = True
    assert np.array_equal(MaskFiles(path).mask("x.jpg"), expected)
