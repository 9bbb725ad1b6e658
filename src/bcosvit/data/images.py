"""Safe reading: any file gives an upright RGB image, or an error of one sentence.

Everything in bcosvit that opens an image uses `read_image`, so that files that are damaged, huge,
rotated or oddly colored are handled in one place.

* Pillow decodes, but its plugins are called directly instead of through ``Image.open``. The pixel
  limit then belongs to each call and is checked before anything is decoded, and Pillow's
  process-wide limit is neither needed nor changed. (Only Pillow's WebP plugin also applies that
  limit, since it allocates the canvas while it opens a file.) Only self-contained raster formats
  are tried: opening an EPS file, for example, would start Ghostscript on untrusted data.
* Pillow warns about odd metadata of files that decode well. ``warnings.catch_warnings`` changes
  process-wide state, which other threads see and can undo. An "ignore" filter for warnings that
  arise inside of Pillow, put in front of the list and left there, has no such problem; Pillow's
  deprecation warnings are attributed to their callers and stay visible.
* A file of a few bytes can stand for gigabytes. What decoding and conversion will take is
  therefore estimated from the header and refused if it is more than 300 MB, and all steps after
  decoding work in strips. Decoders that Pillow has in Python need microseconds for every value, so
  they have a limit of their own.
* Pillow reads metadata in Python, piece by piece, and partly before it knows the size of the
  picture. How often a file is read is therefore limited. The values of EXIF and TIFF tags may
  overlap, so that a file of one megabyte holds gigabytes of them; Pillow's reader of tags is given
  no more than a file without overlaps needs. This, too, is process-wide.
* ``PIL.ImageFile.LOAD_TRUNCATED_IMAGES`` is left to the application: if it sets this flag, Pillow
  fills up truncated files; by default they are refused.
"""

from __future__ import annotations

import functools
import io
import os
import re
import stat
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, TypeAlias, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import (
    AvifImagePlugin,
    BmpImagePlugin,
    GifImagePlugin,
    Image,
    ImageFile,
    ImageOps,
    Jpeg2KImagePlugin,
    JpegImagePlugin,
    PngImagePlugin,
    PpmImagePlugin,
    TiffImagePlugin,
    WebPImagePlugin,
)
from torch import Tensor

__all__ = ["EXTENSIONS", "ImageError", "ImageSource", "list_images", "read_image", "to_tensor"]

_Converted = TypeVar("_Converted")
ImageSource: TypeAlias = str | os.PathLike[str] | bytes | bytearray | memoryview | IO[bytes]

# fmt: off
EXTENSIONS = frozenset({
    ".avif", ".bmp", ".gif", ".jfif", ".jp2", ".jpe", ".jpeg", ".jpg", ".pbm", ".pgm", ".png",
    ".pnm", ".ppm", ".tif", ".tiff", ".webp",
})
# fmt: on
"""The file name endings, in lower case, of image files."""

# Importing a plugin registers its format; naming them here keeps the set explicit.
_PLUGINS = (
    JpegImagePlugin.JpegImageFile,
    PngImagePlugin.PngImageFile,
    WebPImagePlugin.WebPImageFile,
    GifImagePlugin.GifImageFile,
    BmpImagePlugin.BmpImageFile,
    TiffImagePlugin.TiffImageFile,
    PpmImagePlugin.PpmImageFile,
    Jpeg2KImagePlugin.Jpeg2KImageFile,
    AvifImagePlugin.AvifImageFile,
)
# A build of Pillow without a codec leaves its format unregistered.
_FORMATS = tuple(str(p.format) for p in _PLUGINS if p.format in Image.OPEN)

_ORIENTATION_TAG = 0x0112
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_BYTES = 300_000_000
"""What reading an image may take; three bytes for each of ``max_pixels`` where that is more."""
_PER_PIXEL = {"JPEG2000": 28, "WEBP": 18, "AVIF": 12, "TIFF": 12}
"""Bytes per pixel at the peak, measured; for other formats 8.5: two RGB images of four bytes, one
made from the other, and strips."""
_PER_ROW = 16
"""Bytes per row beyond its pixels: Pillow keeps the place of each, in both images."""
_PYTHON_VALUES = 1_000_000
"""Values (pixels × channels) that a decoder in Python may read: text PPM, BMP with run lengths."""
_STRIP = 1_000_000
"""Pixels that are converted at a time."""
_SILENCE = ("ignore", None, Warning, re.compile(r"PIL\."), 0)


_READS = 20_000
"""How often a file may be read before its pixels begin; with them, once more per 500 bytes."""
_JOINED = {"GIF": 4_000_000, "JPEG": 20_000_000}
"""Bytes of comments, profiles and the like in formats where Pillow appends one to the other."""


class _Limited:
    """A file of which only so much is read, and only so often."""

    def __init__(self, file: IO[bytes]) -> None:
        here = file.tell()
        self._size = file.seek(0, os.SEEK_END)
        file.seek(here)
        self._file = file
        # Some programs store the same few numbers once for several tags.
        self.allow(sys.maxsize, 2 * self._size + 1_000_000)

    def opening(self, format_: str) -> None:
        """Limits what is read before the pixels."""
        self.allow(_READS, _JOINED.get(format_, 2 * self._size + 1_000_000))

    def loading(self) -> None:
        """Limits how often pixels are read."""
        self.allow(_READS + self._size // 500, sys.maxsize)

    def allow(self, reads: int, joined: int) -> None:
        self._reads, self._joined = reads, joined

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(size)
        self._reads -= 1
        # What is read as a whole is no part of a list.
        self._joined -= len(data) if 0 <= size <= ImageFile.SAFEBLOCK else 0
        if self._reads < 0 or self._joined < 0:
            # Pillow takes it for what it raises itself about damaged files.
            raise SyntaxError("its metadata would take too long to read")
        return data

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def _limit_tags() -> None:
    """Makes Pillow read no more tags of EXIF and TIFF than there can be without overlaps."""
    load = TiffImagePlugin.ImageFileDirectory_v2.load

    @functools.wraps(load)
    def limited(self: TiffImagePlugin.ImageFileDirectory_v2, fp: IO[bytes]) -> None:
        load(self, cast(IO[bytes], _Limited(fp)))

    TiffImagePlugin.ImageFileDirectory_v2.load = limited  # type: ignore[method-assign]


_limit_tags()


class ImageError(ValueError):
    """An image cannot be read; the message is one sentence with the name of the file."""


def read_image(
    source: ImageSource,
    *,
    max_pixels: int = 100_000_000,
    at_least: int | None = None,
    name: str | None = None,
) -> Image.Image:
    """Reads an image, upright and in RGB.

    Transparent images are put on white. The first frame of an animation is read. Values of more
    than 8 bits are scaled by their range, not clipped. Embedded color profiles are ignored.

    Args:
        source: A path, the bytes of a file, or a file object in binary mode.
        max_pixels: Larger images are refused before they are decoded, and so are images whose
            decoding would take more than 300 MB, or than three bytes for each of these pixels.
        at_least: Allows a JPEG file to be decoded at 1/2, 1/4 or 1/8 of its size, as long as both
            sides keep at least this many pixels. This saves most of the work if the image is made
            smaller afterwards. Other formats ignore it.
        name: The name of the image in error messages, if the source has none.

    Raises:
        ImageError: If the source is missing, damaged, too large or of an unknown format.

    Examples:
        >>> image = read_image("photo.jpg")
        >>> image.mode
        'RGB'
    """
    if max_pixels < 1 or (at_least is not None and at_least < 1):
        raise ValueError(
            f"max_pixels and at_least must be positive, not {max_pixels} and {at_least}."
        )
    label = name if name is not None else _label(source)

    def convert(image: ImageFile.ImageFile) -> tuple[Image.Image, Image.Transpose | None]:
        return _to_rgb(image), _UPRIGHT.get(_orientation(image))

    rgb, turn = _decoded(source, max_pixels, at_least, label, convert)
    if turn is not None:
        rgb = rgb.transpose(turn)
    # An orientation tag left behind would make a later reader rotate the image again.
    rgb.info.clear()
    return rgb


def read_labels(source: ImageSource, *, max_pixels: int = 100_000_000) -> NDArray[Any]:
    """Reads an image whose pixels are numbers, such as a mask, with the limits of `read_image`.

    Returns:
        The numbers [H, W] as they are stored: of a palette its positions, not its colors. Colors
        become gray.

    Raises:
        ImageError: As for `read_image`.

    Examples:
        >>> read_labels("photo.jpg").ndim
        2
    """

    def convert(image: ImageFile.ImageFile) -> NDArray[Any]:
        single = image.mode in ("1", "L", "P", "I", "I;16", "I;16B", "F")
        return np.array(image if single else image.convert("L"))

    return _decoded(source, max_pixels, None, _label(source), convert)


def _decoded(
    source: ImageSource,
    max_pixels: int,
    at_least: int | None,
    label: str,
    convert: Callable[[ImageFile.ImageFile], _Converted],
) -> _Converted:
    """Decodes within limits, and returns what ``convert`` makes of it."""
    _silence_pillow()
    try:
        with _stream(source, label) as file:
            stream = _Limited(file)
            image = _open(stream, label)
            width, height = image.size
            if width * height > max_pixels:
                raise ImageError(
                    f"The image {label} has {width} × {height} = {width * height:,} pixels, "
                    f"{max_pixels:,} are allowed: shrink it or raise max_pixels."
                )
            if at_least is not None:
                image.draft(None, (at_least, at_least))
            _check_cost(image, (width, height), max(_BYTES, 3 * max_pixels), label)
            stream.loading()
            image.load()
            return convert(image)
    except ImageError:
        raise
    # On damaged data Pillow's decoders raise nearly every kind of exception.
    except Exception as error:
        reason = " ".join(str(error).split()).rstrip(".") or type(error).__name__
        raise ImageError(
            f"The image {label} is damaged or of an unsupported kind ({reason}): "
            "replace or remove it."
        ) from error


def list_images(path: str | os.PathLike[str], recursive: bool = True) -> list[Path]:
    """Lists the image files in a folder by their endings, sorted by path, without hidden files.

    Links to folders are followed, but each folder is listed only once.

    Args:
        path: The folder.
        recursive: Whether sub-folders are searched too.

    Raises:
        ImageError: If there is no such folder, or one in it cannot be read.

    Examples:
        >>> [path.name for path in list_images(".")]
        ['photo.jpg']
    """
    root = Path(path)
    if not root.is_dir():
        kind = "a file" if root.exists() else "missing"
        raise ImageError(f"The image folder {root} is {kind}: give an existing folder.")
    found: list[Path] = []
    seen: set[tuple[int, int]] = set()
    for folder, folders, files in os.walk(root, followlinks=True, onerror=_refuse_folder):
        status = os.stat(folder)
        folders[:] = sorted(f for f in folders if not f.startswith(".")) if recursive else []
        if (status.st_dev, status.st_ino) in seen:
            folders.clear()
            continue
        seen.add((status.st_dev, status.st_ino))
        found += [
            Path(folder, file)
            for file in files
            if not file.startswith(".") and os.path.splitext(file)[1].lower() in EXTENSIONS
        ]
    return sorted(found, key=Path.as_posix)


def _refuse_folder(error: OSError) -> None:
    raise ImageError(
        f"The folder {error.filename} cannot be read ({error.strerror}): check its permissions."
    ) from error


def upright_rgb(image: Image.Image) -> Image.Image:
    """Converts an image that is open already as `read_image` converts files: upright and in RGB.

    Examples:
        >>> upright_rgb(Image.new("LA", (4, 2))).mode
        'RGB'
    """
    turned = ImageOps.exif_transpose(image)
    turned.load()
    return _to_rgb(turned)


def to_tensor(image: Image.Image) -> Tensor:
    """Converts an RGB image to a float32 tensor [3, H, W] with values in [0, 1].

    Raises:
        ImageError: If the image is not in RGB.

    Examples:
        >>> to_tensor(Image.new("RGB", (4, 2), "white")).shape
        torch.Size([3, 2, 4])
    """
    if image.mode != "RGB":
        raise ImageError(
            f"The image has mode {image.mode} but RGB is needed: open it with read_image."
        )
    pixels = to_bytes(image).permute(2, 0, 1)
    # Transposing bytes and widening afterwards moves a quarter of the memory.
    return pixels.contiguous().float().div_(255)


def to_bytes(image: Image.Image) -> Tensor:
    """Copies the pixels of an RGB image to a uint8 tensor [H, W, 3], a few rows at a time.

    NumPy's conversion would hold them three times.

    Examples:
        >>> to_bytes(Image.new("RGB", (4, 2))).shape
        torch.Size([2, 4, 3])
    """
    pixels = np.empty((image.height, image.width, 3), np.uint8)
    for top, strip in _strips(image):
        pixels[top : top + strip.height] = np.asarray(strip)
    return torch.from_numpy(pixels)


def _label(source: ImageSource) -> str:
    if isinstance(source, str | os.PathLike):
        # Names that are not valid Unicode would otherwise break whoever prints the message.
        return os.fspath(source).encode("utf-8", "backslashreplace").decode()
    name = getattr(source, "name", None)
    return str(name) if name is not None else f"<{type(source).__name__}>"


@contextmanager
def _stream(source: ImageSource, label: str) -> Iterator[IO[bytes]]:
    """A seekable stream of the source, refusing what cannot hold an image."""
    if isinstance(source, str | os.PathLike):
        with _open_file(source, label) as file:
            yield file
        return
    if isinstance(source, bytes | bytearray | memoryview):
        yield io.BytesIO(source)
        return
    if not hasattr(source, "read"):
        raise ImageError(
            f"An image cannot be read from {type(source).__name__}: "
            "give a path, bytes or a binary file."
        )
    data = source.read()
    if not isinstance(data, bytes):
        raise ImageError(f"The image {label} is open as text: open it in mode 'rb'.")
    yield io.BytesIO(data)


def _open_file(path: str | os.PathLike[str], label: str) -> IO[bytes]:
    try:
        mode = os.stat(path).st_mode
        # Opening a pipe would wait for ever.
        if not stat.S_ISREG(mode):
            kind = "a folder" if stat.S_ISDIR(mode) else "not a regular file"
            raise ImageError(f"The image {label} is {kind}: give the path of a file.")
        return open(path, "rb")
    except FileNotFoundError as error:
        raise ImageError(f"There is no image {label}: check the path.") from error
    except OSError as error:
        raise ImageError(
            f"The image {label} cannot be opened ({error.strerror}): "
            "check the path and its permissions."
        ) from error


def _open(stream: _Limited, label: str) -> ImageFile.ImageFile:
    prefix = stream.read(16)
    if not prefix:
        raise ImageError(f"The image {label} is empty (0 bytes): replace or remove it.")
    for format_ in _FORMATS:
        factory, accept = Image.OPEN[format_]
        # A plugin without its codec answers with a text instead of a bool.
        if accept is not None and accept(prefix) is True:
            stream.seek(0)
            stream.opening(format_)
            return factory(cast(IO[bytes], stream), "")
    raise ImageError(
        f"The file {label} is not an image of a known format ({', '.join(sorted(_FORMATS))}): "
        "convert or remove it."
    )


def _orientation(image: ImageFile.ImageFile) -> int:
    """The EXIF orientation, asked for after loading: PNG may keep it behind the pixels, and the
    TIFF plugin applies and removes it while loading."""
    try:
        value = image.getexif().get(_ORIENTATION_TAG, 1)
    # Unreadable metadata says nothing about the orientation, and the pixels are fine.
    except Exception:
        return 1
    return value if isinstance(value, int) else 1


def _check_cost(image: ImageFile.ImageFile, full: tuple[int, int], most: float, label: str) -> None:
    """Refuses what takes more than ``most`` bytes, or too long, to decode and to convert."""
    codecs = {str(tile[0]) for tile in image.tile}
    values = image.width * image.height * len(image.getbands())
    if codecs & set(Image.DECODERS) and values > _PYTHON_VALUES:
        raise ImageError(
            f"The image {label} holds {values:,} values in a slow encoding "
            f"({image.format}, {', '.join(sorted(codecs))}), {_PYTHON_VALUES:,} are allowed: "
            "convert it to PNG."
        )
    needed: float = _PER_PIXEL.get(str(image.format), 8.5) * image.width * image.height
    needed += _PER_ROW * image.height
    if isinstance(image, JpegImagePlugin.JpegImageFile) and _several_scans(image):
        # libjpeg holds all coefficients, two bytes each, whatever size it decodes at.
        shares = [h * v for _, h, v, *_ in image.layer]
        needed += 2 * full[0] * full[1] * sum(shares) / max(shares)
    if needed > most:
        raise ImageError(
            f"The image {label} ({image.format}, {full[0]} × {full[1]} pixels of mode "
            f"{image.mode}) would take {needed / 1e6:,.0f} MB to decode, {most / 1e6:,.0f} MB are "
            "allowed: shrink it or raise max_pixels."
        )


def _several_scans(image: JpegImagePlugin.JpegImageFile) -> bool:
    """Whether a JPEG file stores its components, or their bits, one after the other."""
    if "progressive" in image.info:
        return True
    # Pillow has read up to the end of the first scan's header: its length, the number of
    # components, two bytes for each and three more.
    header = 2 + 1 + 2 * image.layers + 3
    assert image.fp is not None
    image.fp.seek(-header, os.SEEK_CUR)
    start = image.fp.read(header)
    return start[:3] != header.to_bytes(2, "big") + bytes([image.layers])


def _strips(image: Image.Image) -> Iterator[tuple[int, Image.Image]]:
    """The image's rows, a few at a time, each time with the number of the first one."""
    rows = max(1, _STRIP // image.width)
    for top in range(0, image.height, rows):
        yield top, image.crop((0, top, image.width, min(top + rows, image.height)))


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode == "RGB" and not image.has_transparency_data:
        return image
    deep = image.mode.startswith("I") or image.mode == "F"
    bounds = _range(image) if deep else (0.0, 0.0)
    rgb = Image.new("RGB", image.size)
    for top, strip in _strips(image):
        rgb.paste(_to_eight_bits(strip, *bounds) if deep else _on_white(strip), (0, top))
    return rgb


def _on_white(image: Image.Image) -> Image.Image:
    if not image.has_transparency_data:
        return image.convert("RGB")
    if image.mode == "La":
        image = image.convert("LA")
    image = image.convert("RGBA")
    white = Image.new("RGBA", image.size, (255, 255, 255, 255))
    return Image.alpha_composite(white, image).convert("RGB")


def _range(image: Image.Image) -> tuple[float, float]:
    """The gray values of 16 or 32 bits that become black and white.

    16-bit files use their type's whole range. 32-bit integers and floats name no range: the
    smallest customary one that holds all values is taken (1 for floats, 255, 65535), and values
    outside all of them are stretched from their minimum to their maximum.
    """
    lows, highs = [], []
    for _, strip in _strips(image):
        values = np.asarray(strip)
        if not np.isfinite(values).all():
            raise ValueError("its values are not all finite")
        lows.append(float(values.min()))
        highs.append(float(values.max()))
    low, high = min(lows), max(highs)
    if image.mode.startswith("I;16") or image.format in {"PNG", "PPM"}:
        return 0.0, 65535.0
    customary = (1.0, 255.0, 65535.0) if image.mode == "F" else (255.0, 65535.0)
    fitting = [bound for bound in customary if low >= 0 and high <= bound]
    return (0.0, fitting[0]) if fitting else (low, high)


def _to_eight_bits(image: Image.Image, low: float, high: float) -> Image.Image:
    values = np.asarray(image).astype(np.float64)
    gray = np.rint((values - low) * (255.0 / max(high - low, 1e-30)))
    transparent = image.info.get("transparency")
    if isinstance(transparent, int):
        gray[values == transparent] = 255.0
    return Image.fromarray(gray.astype(np.uint8)).convert("RGB")


def _silence_pillow() -> None:
    """Put our filter in front again where somebody has replaced or overlaid the list since."""
    if not warnings.filters or warnings.filters[0] != _SILENCE:
        warnings.filterwarnings("ignore", module=r"PIL\.")
