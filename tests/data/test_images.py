"""Every kind of file that people have in their folders, made on the fly, through the one reader."""

import io
import os
import re
import struct
import subprocess
import sys
import tracemalloc
import warnings
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageFile

from bcosvit.data.images import (
    ImageError,
    _Limited,
    _open,
    _several_scans,
    list_images,
    read_image,
    to_tensor,
)

ORIENTATION = 0x0112


def picture(width: int = 64, height: int = 48) -> np.ndarray:
    """Four quadrants of different colors: every rotation and flip of it looks different."""
    pixels = np.zeros((height, width, 3), np.uint8)
    pixels[: height // 2, : width // 2] = (250, 20, 30)
    pixels[: height // 2, width // 2 :] = (30, 240, 40)
    pixels[height // 2 :, : width // 2] = (20, 30, 230)
    pixels[height // 2 :, width // 2 :] = (240, 230, 20)
    return pixels


def encode(image: Image.Image, format_: str, **options: object) -> bytes:
    stream = io.BytesIO()
    image.save(stream, format_, **options)
    return stream.getvalue()


def png(width: int, height: int, *chunks: tuple[bytes, bytes]) -> bytes:
    """A PNG written by hand, so that it can lie about its size or carry broken chunks."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    data = b"\x89PNG\r\n\x1a\n"
    for kind, body in ((b"IHDR", header), *chunks, (b"IEND", b"")):
        data += struct.pack(">I", len(body)) + kind + body
        data += struct.pack(">I", zlib.crc32(kind + body))
    return data


def stored(upright: np.ndarray, orientation: int) -> np.ndarray:
    """The pixels a camera stores for this upright picture (EXIF 2.3, tag 0x0112)."""
    return {
        1: upright,
        2: upright[:, ::-1],
        3: upright[::-1, ::-1],
        4: upright[::-1],
        5: upright.transpose(1, 0, 2),
        6: np.rot90(upright, 1),
        7: upright[::-1, ::-1].transpose(1, 0, 2),
        8: np.rot90(upright, -1),
    }[orientation].copy()


def close(image: Image.Image, expected: np.ndarray, tolerance: float = 4) -> bool:
    got = np.asarray(image).astype(float)
    return got.shape == expected.shape and np.abs(got - expected).mean() < tolerance


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("format_", ["JPEG", "PNG", "WEBP", "TIFF", "AVIF"])
def test_exif_rotation_is_applied_once(format_: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    data = encode(Image.fromarray(stored(picture(), orientation)), format_, exif=exif)
    image = read_image(data)
    assert close(image, picture())
    assert image.getexif().get(ORIENTATION, 1) == 1


@pytest.mark.parametrize("orientation", [1, 6])
def test_at_least_decodes_a_large_jpeg_smaller_but_no_smaller(orientation: int) -> None:
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    pixels = stored(picture(1200, 1600), orientation)
    data = encode(Image.fromarray(pixels), "JPEG", exif=exif)
    assert read_image(data).size == (1200, 1600)
    assert read_image(data, at_least=301).size == (600, 800)
    small = read_image(data, at_least=300)
    assert small.size == (300, 400)
    assert close(small, picture(300, 400))
    assert read_image(data, at_least=5000).size == (1200, 1600)


def test_other_formats_ignore_at_least() -> None:
    data = encode(Image.fromarray(picture()), "PNG")
    assert read_image(data, at_least=2).size == (64, 48)


def flat(image: Image.Image) -> tuple[int, ...]:
    """The one color of a picture of one color, so that a test reads as a table."""
    assert image.mode == "RGB"
    colors = image.getcolors()
    assert colors is not None
    assert len(colors) == 1
    return colors[0][1]


def test_gray_and_bilevel() -> None:
    assert flat(read_image(encode(Image.new("L", (9, 7), 77), "PNG"))) == (77, 77, 77)
    assert flat(read_image(encode(Image.new("1", (9, 7), 1), "PNG"))) == (255, 255, 255)
    assert flat(read_image(encode(Image.new("L", (8, 8), 77), "JPEG"))) == (77, 77, 77)


def test_palette_with_and_without_transparency() -> None:
    image = Image.new("P", (4, 4), 1)
    image.putpalette([0, 0, 0, 10, 200, 30])
    assert flat(read_image(encode(image, "PNG"))) == (10, 200, 30)
    assert flat(read_image(encode(image, "PNG", transparency=1))) == (255, 255, 255)
    half = encode(image, "PNG", transparency=bytes([255, 128]))
    assert np.abs(np.subtract(flat(read_image(half)), (132, 227, 142))).max() <= 1
    assert flat(read_image(encode(image, "GIF", transparency=1))) == (255, 255, 255)


def test_alpha_is_laid_on_white() -> None:
    half = np.rint(0.5 * np.array([200, 100, 0]) + 0.5 * 255)
    got = flat(read_image(encode(Image.new("RGBA", (4, 4), (200, 100, 0, 128)), "PNG")))
    assert np.abs(np.array(got) - half).max() <= 1
    assert flat(read_image(encode(Image.new("RGBA", (4, 4), (9, 9, 9, 0)), "PNG"))) == (
        255,
        255,
        255,
    )
    assert flat(read_image(encode(Image.new("LA", (4, 4), (0, 0)), "PNG"))) == (255, 255, 255)
    keyed = encode(Image.new("RGB", (4, 4), (1, 2, 3)), "PNG", transparency=(1, 2, 3))
    assert flat(read_image(keyed)) == (255, 255, 255)


def test_cmyk() -> None:
    got = flat(read_image(encode(Image.new("CMYK", (16, 16), (255, 0, 0, 0)), "JPEG", quality=95)))
    assert np.abs(np.subtract(got, (0, 255, 255))).max() <= 3
    assert flat(read_image(encode(Image.new("CMYK", (4, 4), (0, 255, 0, 0)), "TIFF"))) == (
        255,
        0,
        255,
    )


@pytest.mark.parametrize("format_", ["PNG", "TIFF", "PPM"])
def test_sixteen_bits_are_scaled_not_clipped(format_: str) -> None:
    values = np.array([[0, 257, 128 * 257, 65535]], np.uint16)
    image = read_image(encode(Image.fromarray(values), format_))
    assert np.asarray(image)[0, :, 0].tolist() == [0, 1, 128, 255]


def test_a_dark_sixteen_bit_picture_stays_dark() -> None:
    values = np.full((4, 4), 200, np.uint16)
    assert flat(read_image(encode(Image.fromarray(values), "PNG"))) == (1, 1, 1)


def test_sixteen_bits_with_a_transparent_value() -> None:
    values = np.full((4, 4), 5000, np.uint16)
    data = encode(Image.fromarray(values), "PNG", transparency=5000)
    assert flat(read_image(data)) == (255, 255, 255)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (np.array([[0, 100, 255]], np.int32), [0, 100, 255]),
        (np.array([[0, 257, 65535]], np.int32), [0, 1, 255]),
        (np.array([[-1000, 0, 1000]], np.int32), [0, 128, 255]),
        (np.array([[0.0, 0.2, 1.0]], np.float32), [0, 51, 255]),
        (np.array([[0.0, 100.0, 255.0]], np.float32), [0, 100, 255]),
        (np.array([[-1.0, 0.0, 1.0]], np.float32), [0, 128, 255]),
        (np.array([[7e9, 7e9, 7e9]], np.float32), [0, 0, 0]),
    ],
)
def test_thirty_two_bits_take_the_range_that_holds_them(
    values: np.ndarray, expected: list[int]
) -> None:
    image = read_image(encode(Image.fromarray(values), "TIFF"))
    assert np.asarray(image)[0, :, 1].tolist() == expected


def test_values_that_are_not_finite_are_refused() -> None:
    data = encode(Image.fromarray(np.array([[0.0, np.nan]], np.float32)), "TIFF")
    with pytest.raises(ImageError, match="finite"):
        read_image(data)


@pytest.mark.parametrize("format_", ["GIF", "WEBP", "PNG", "TIFF", "AVIF"])
def test_first_frame_of_an_animation(format_: str) -> None:
    frames = [Image.new("RGB", (16, 16), c) for c in ((250, 0, 0), (0, 250, 0))]
    image = read_image(encode(frames[0], format_, save_all=True, append_images=frames[1:]))
    assert close(image, np.asarray(frames[0]))


def noisy() -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8))


BROKEN = {
    **{
        f"truncated {f}": (encode(noisy(), f)[: len(encode(noisy(), f)) // 2], "damaged")
        for f in ("JPEG", "PNG", "GIF", "WEBP", "BMP", "TIFF", "JPEG2000", "AVIF")
    },
    "only a header": (b"\xff\xd8\xff\xe0", "damaged"),
    "zero bytes": (b"", "empty"),
    "text": (b"no picture at all, just words\n" * 9, "not an image"),
    "html": (b"<!DOCTYPE html><html>404</html>", "not an image"),
    "postscript": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "not an image"),
    "zero width": (png(0, 9), "damaged"),
    "bomb": (png(60_000, 60_000, (b"IDAT", zlib.compress(b""))), "3,600,000,000 pixels"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_broken_files_give_one_sentence_with_their_name(kind: str, tmp_path: Path) -> None:
    data, reason = BROKEN[kind]
    path = tmp_path / "Ärger im 東京 🐟.jpg"
    path.write_bytes(data)
    with pytest.raises(ImageError) as caught:
        read_image(path)
    message = str(caught.value)
    assert str(path) in message
    assert reason in message
    assert message.endswith(".")
    assert "\n" not in message
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("kind", BROKEN)
def test_broken_bytes_carry_the_given_name(kind: str) -> None:
    with pytest.raises(ImageError, match=re.escape("shard-0.tar/a.jpg")):
        read_image(BROKEN[kind][0], name="shard-0.tar/a.jpg")


def test_missing_file_folder_pipe_and_nonsense(tmp_path: Path) -> None:
    with pytest.raises(ImageError, match=r"There is no image .*nowhere\.png"):
        read_image(tmp_path / "nowhere.png")
    with pytest.raises(ImageError, match="is a folder"):
        read_image(str(tmp_path))
    os.mkfifo(tmp_path / "pipe.jpg")
    with pytest.raises(ImageError, match=r"pipe\.jpg is not a regular file"):
        read_image(tmp_path / "pipe.jpg")
    with pytest.raises(ImageError, match="cannot be opened"):
        read_image(tmp_path / ("x" * 400))
    with pytest.raises(ImageError, match="from int"):
        read_image(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="must be positive"):
        read_image(b"", max_pixels=0)


def test_unicode_names_and_names_that_are_no_unicode(tmp_path: Path) -> None:
    path = tmp_path / "żółw 🐢 №1.png"
    Image.fromarray(picture()).save(path)
    assert close(read_image(path), picture(), 1)
    with pytest.raises(ImageError) as caught:
        read_image(tmp_path / "bad\udcff.png")
    assert str(caught.value).encode("utf-8")


def test_file_objects(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    Image.fromarray(picture()).save(path)
    with open(path, "rb") as file:
        assert close(read_image(file), picture(), 1)
    with open(path, encoding="latin-1") as text, pytest.raises(ImageError, match="mode 'rb'"):
        read_image(text)  # type: ignore[arg-type]
    assert close(read_image(memoryview(path.read_bytes())), picture(), 1)


def test_pixel_limit_is_ours_and_pillow_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    data = encode(Image.fromarray(picture()), "PNG")
    with pytest.raises(ImageError, match=r"64 × 48 = 3,072 pixels, 3,071 are allowed"):
        read_image(data, max_pixels=64 * 48 - 1)
    assert read_image(data, max_pixels=64 * 48).size == (64, 48)
    for limit in (10, 2_000, None):
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", limit)
        assert read_image(data).size == (64, 48)
        with pytest.raises(ImageError, match="are allowed"):
            read_image(data, max_pixels=100)
        assert limit == Image.MAX_IMAGE_PIXELS


def noisy_files() -> dict[str, bytes]:
    """Files that decode well and that Pillow nonetheless warns about."""
    rows = zlib.compress(b"".join(b"\0" + picture(6, 4)[y].tobytes() for y in range(4)))
    twice = (b"acTL", struct.pack(">II", 1, 0))
    exif = b"Exif\0\0II*\0\x08\0\0\0\x01\0" + struct.pack("<HHII", 0x010F, 2, 4000, 9000)
    jpeg = encode(Image.fromarray(picture()), "JPEG")
    jfif_end = 4 + struct.unpack(">H", jpeg[4:6])[0]
    app1 = b"\xff\xe1" + struct.pack(">H", len(exif) + 2) + exif
    palette = Image.new("P", (4, 4), 1)
    palette.putpalette([0, 0, 0, 9, 99, 199])
    return {
        "APNG": png(6, 4, twice, twice, (b"IDAT", rows)),
        "EXIF": jpeg[:2] + app1 + jpeg[jfif_end:],
        "palette": encode(palette, "PNG", transparency=bytes([0, 200])),
    }


@pytest.mark.parametrize(
    ("kind", "warning"),
    [
        ("APNG", "Invalid APNG"),
        ("EXIF", "Tag data|orrupt EXIF|Truncated File"),
        ("palette", "Palette images"),
    ],
)
def test_pillows_warnings_do_not_leak(kind: str, warning: str) -> None:
    data = noisy_files()[kind]
    with pytest.warns(UserWarning, match=warning):
        Image.open(io.BytesIO(data)).convert("RGB")
    filters = warnings.filters
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert read_image(data).mode == "RGB"
    assert caught == []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        inside = warnings.filters
        assert read_image(data).mode == "RGB"
        assert warnings.filters is inside
        # Only Pillow is hushed: everyone else's warnings still arrive.
        with pytest.raises(UserWarning, match="mine"):
            warnings.warn("mine", UserWarning, stacklevel=1)
    assert warnings.filters is filters


def test_many_threads_read_what_one_reads() -> None:
    sources = [*noisy_files().values(), encode(noisy(), "JPEG"), encode(noisy(), "PNG")] * 12
    alone = [read_image(s).tobytes() for s in sources]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda s: read_image(s).tobytes(), sources)) == alone


def test_a_folder_that_cannot_be_read_is_not_taken_for_an_empty_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cats").mkdir()
    original = os.scandir

    def scandir(path: str) -> object:
        if str(path).endswith("cats"):
            raise PermissionError(13, "Permission denied", path)
        return original(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(ImageError, match=r"cats cannot be read \(Permission denied\)"):
        list_images(tmp_path)


def test_list_images(tmp_path: Path) -> None:
    names = ["b.JPG", "a.png", "sub/c.Jpeg", "sub/deep/d.webp", "é.tiff"]
    for name in [*names, "notes.txt", ".hidden.png", ".git/x.png", "sub/e.heic", "jpg"]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "sub" / "loop").symlink_to(tmp_path)
    found = [p.relative_to(tmp_path).as_posix() for p in list_images(tmp_path)]
    assert found == ["a.png", "b.JPG", "sub/c.Jpeg", "sub/deep/d.webp", "é.tiff"]
    flat_list = [p.name for p in list_images(str(tmp_path), recursive=False)]
    assert flat_list == ["a.png", "b.JPG", "é.tiff"]
    with pytest.raises(ImageError, match="is missing"):
        list_images(tmp_path / "nowhere")
    with pytest.raises(ImageError, match="is a file"):
        list_images(tmp_path / "a.png")


def test_to_tensor() -> None:
    tensor = to_tensor(Image.fromarray(picture()))
    assert tensor.shape == (3, 48, 64)
    assert tensor.dtype == torch.float32
    assert tensor.is_contiguous()
    assert torch.equal(tensor[:, 0, 0], torch.tensor([250, 20, 30]) / 255)
    assert to_tensor(Image.new("RGB", (2, 2), (0, 255, 0))).amax() == 1.0
    with pytest.raises(ImageError, match="mode L"):
        to_tensor(Image.new("L", (2, 2)))


def black_png(width: int, height: int, depth: int = 8, color: int = 6) -> bytes:
    """A black PNG file, written without ever holding its pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        ends = kind + data
        return len(data).to_bytes(4, "big") + ends + zlib.crc32(ends).to_bytes(4, "big")

    channels = {0: 1, 2: 3, 6: 4}[color]
    row = bytes(1 + width * channels * depth // 8)
    packer = zlib.compressobj(1)
    pixels = b"".join(packer.compress(row) for _ in range(height)) + packer.flush()
    head = width.to_bytes(4, "big") + height.to_bytes(4, "big") + bytes([depth, color, 0, 0, 0])
    start = b"\x89PNG\r\n\x1a\n"
    return start + chunk(b"IHDR", head) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


def jpeg_2000(width: int, height: int) -> bytes:
    """The header of a large file before the pixels of a small one."""
    file = io.BytesIO()
    Image.new("L", (32, 32)).save(file, "JPEG2000", no_jp2=True)
    data = bytearray(file.getvalue())
    data[8:16] = width.to_bytes(4, "big") + height.to_bytes(4, "big")
    return bytes(data)


def jpeg(size: tuple[int, int], **options: object) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", size).save(file, "JPEG", **options)
    return file.getvalue()


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (black_png(7000, 7000, 16, 0), "MB"),
        (black_png(7000, 7000, 8, 2), "MB"),
        (jpeg_2000(4000, 4000), "MB"),
        (jpeg((9500, 9500), progressive=True, subsampling=0), "MB"),
        (b"P3\n1000 1000\n255\n", "slow encoding"),
        (b"P2\n2000 2000\n255\n", "slow encoding"),
        (b"P6\n1000 1000\n100\n", "slow encoding"),
    ],
)
def test_what_would_take_much_memory_or_time_is_refused_undecoded(
    data: bytes, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda self: pytest.fail("It was decoded."))
    with pytest.raises(ImageError, match=reason):
        read_image(data, at_least=512)


def chunked_png(size: int, extra: bytes = b"", after: bytes = b"") -> bytes:
    """A PNG of noise whose pixels are in chunks of so many bytes."""
    pixels = np.random.default_rng(0).integers(0, 256, (100, 301), np.uint8)
    pixels[:, 0] = 0
    packed = zlib.compress(pixels.tobytes())
    parts = [png_chunk(b"IDAT", packed[n : n + size]) for n in range(0, len(packed), size)]
    start = PNG_START + png_chunk(b"IHDR", struct.pack(">IIBBBBB", 100, 100, 8, 2, 0, 0, 0))
    return start + extra + b"".join(parts) + after + png_chunk(b"IEND", b"")


PNG_START = b"\x89PNG\r\n\x1a\n"


def png_chunk(kind: bytes, body: bytes) -> bytes:
    checksum = struct.pack(">I", zlib.crc32(kind + body))
    return struct.pack(">I", len(body)) + kind + body + checksum


def overlapping_tags(count: int, size: int) -> bytes:
    """A TIFF header whose tags all have the same ``size`` bytes as their value."""
    tags = b"".join(struct.pack("<HHII", n, 7, size, 8) for n in range(count))
    return (b"II*\0\x08\0\0\0" + struct.pack("<H", count) + tags).ljust(size + 8, b"\0")


def gif_with(extension: bytes) -> bytes:
    data = encode(Image.new("P", (4, 4)), "GIF")
    start = 13 + 3 * 2 ** ((data[10] & 7) + 1)
    return data[:start] + extension + data[start:]


SEGMENT = b"\xff\xe1" + struct.pack(">H", 60_008) + b"Exif\0\0" + bytes(60_000)


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(gif_with(b"\x21\xfe\x01x\0" * 20_000), id="comments of a GIF"),
        pytest.param(gif_with(b"\x21\xfe" + b"\x01x" * 20_000 + b"\0"), id="parts of a comment"),
        pytest.param(gif_with(b"\x21\x77\x01x\0" * 20_000), id="extensions of a GIF"),
        pytest.param(jpeg((8, 8)).replace(b"\xff\xd8", b"\xff\xd8" + 400 * SEGMENT, 1), id="EXIF"),
        pytest.param(b"P6 #" + b"x" * 30_000 + b"\n1 1 255\n123", id="comment of a PPM"),
        pytest.param(chunked_png(1), id="a chunk for each byte"),
        pytest.param(chunked_png(1000, extra=20_000 * png_chunk(b"teST", b"")), id="chunks before"),
        pytest.param(chunked_png(1000, after=20_000 * png_chunk(b"teST", b"")), id="chunks after"),
    ],
)
def test_metadata_that_take_long_to_read_are_refused(data: bytes) -> None:
    with pytest.raises(ImageError, match="metadata would take too long"):
        read_image(data)


@pytest.mark.parametrize(
    "data",
    [
        gif_with(b"\x21\xfe" + (b"\xff" + bytes(255)) * 100 + b"\0"),
        jpeg((8, 8)).replace(b"\xff\xd8", b"\xff\xd8" + 255 * SEGMENT, 1),
        b"P6 # By an editor\n1 1 255\n123",
        chunked_png(1000, extra=100 * png_chunk(b"teST", b"")),
        chunked_png(100_000),
    ],
)
def test_metadata_of_usual_size_are_read(data: bytes) -> None:
    assert read_image(data).mode == "RGB"


def test_tags_that_overlap_cost_nothing() -> None:
    tags = overlapping_tags(4_000, 200_000)
    photo = chunked_png(1000, extra=png_chunk(b"eXIf", tags))
    tracemalloc.start()
    try:
        assert read_image(photo).size == (100, 100)
        with pytest.raises(ImageError, match="metadata"):
            read_image(tags)
        assert tracemalloc.get_traced_memory()[1] < 20_000_000
    finally:
        tracemalloc.stop()


def test_tags_may_share_a_few_bytes() -> None:
    image = Image.new("RGB", (4, 4), "red")
    exif = Image.Exif()
    exif[0x0112], exif[0x010E] = 6, "A description"
    exif[0x013B] = "An artist"
    assert read_image(encode(image, "PNG", exif=exif)).getpixel((0, 0)) == (255, 0, 0)
    exif_bytes = exif.tobytes()
    description = exif_bytes.index(b"A description") - 6
    artist = exif_bytes.index(b"An artist") - 6
    shared = exif_bytes.replace(struct.pack("<I", artist), struct.pack("<I", description))
    data = encode(Image.new("RGB", (4, 2)), "PNG", exif=shared)
    assert read_image(data).size == (2, 4)


def test_rows_cost_memory_of_their_own() -> None:
    data = PNG_START + png_chunk(b"IHDR", struct.pack(">IIBBBBB", 1, 20_000_000, 1, 0, 0, 0, 0))
    data += png_chunk(b"IDAT", zlib.compress(bytes(40_000_000)))
    with pytest.raises(ImageError, match="MB to decode"):
        read_image(data)


def test_a_jpeg_that_is_decoded_small_may_be_large() -> None:
    assert read_image(jpeg((10000, 9999)), at_least=512).size == (1250, 1250)
    with pytest.raises(ImageError, match="MB"):
        read_image(jpeg((10000, 9999)))


def test_a_jpeg_in_several_scans_is_recognized() -> None:
    image = _open(_Limited(io.BytesIO(jpeg((64, 48)))), "one")
    assert not _several_scans(image)
    # A first scan that says it has one component of three is followed by two more.
    data = jpeg((64, 48))
    start = data.index(b"\xff\xda")
    one = data[:start] + b"\xff\xda\x00\x08\x01\x01\x00\x00\x3f\x00" + data[start + 14 :]
    assert _several_scans(_open(_Limited(io.BytesIO(one)), "several"))


CHILD = """
import sys
from PIL import Image, ImageFile
from bcosvit.data.images import read_image
from bcosvit.data.transforms import EvalTransform

def peak():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) // 1000 for line in lines if line.startswith("VmHWM"))

transform = EvalTransform(224)
transform(Image.new("RGB", (300, 200)))
before = peak()
transform(read_image(sys.argv[1], at_least=transform.at_least))
print(peak() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="Linux tells the peak")
@pytest.mark.parametrize("shape", [(5900, 5900, 8, 6), (5900, 5900, 16, 0), (1, 10000, 8, 2)])
def test_the_largest_images_that_are_accepted_take_300_mb(
    shape: tuple[int, int, int, int], tmp_path: Path
) -> None:
    path = tmp_path / "large.png"
    path.write_bytes(black_png(*shape))
    command = [sys.executable, "-c", CHILD, str(path)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert int(done.stdout) <= 310
