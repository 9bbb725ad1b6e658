"""Damaged and hostile files: every one is read, or refused in one sentence, at a bounded cost.

    python tools/fuzz.py [--pictures 20000] [--weights 2000] [--seed 0] [--jobs 2] [--keep FOLDER]

Pictures of all formats are mutated (bits, lengths, headers, splices, checksums repaired) and go
through `bcosvit.data.images.read_image` and the transform of evaluation. Weights files of small
models of every kind are mutated (bytes, the header of safetensors, fields of the config, values of
tensors) and go through `bcosvit.load` and `bcosvit.Predictor`. This happens in child processes,
which report each case before and after. A case is a finding if it raises anything but a
``ValueError`` of one sentence, takes longer or more memory than allowed, or ends the process.

The same seed gives the same files. With ``--keep``, the files of findings are kept.
"""

import argparse
import collections
import io
import json
import os
import random
import resource
import signal
import struct
import subprocess
import sys
import tempfile
import time
import warnings
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

Cases = Callable[[int, random.Random], bytes]
NUMBERS = (0, 1, 2, 0x7F, 0x80, 0xFF, 0x100, 0x7FFF, 0xFFFF, 0x10000, 0x7FFFFFFF, 0xFFFFFFFF)
CHUNK = 250
"""Cases per child process."""


@dataclass(frozen=True)
class Limits:
    """What one case may cost.

    Args:
        seconds: Processor time on one core.
        megabytes: Growth of the resident memory above that of the process before its first case.
    """

    seconds: float
    megabytes: int


LIMITS = {"pictures": Limits(5.0, 300), "weights": Limits(10.0, 300)}


# --- Bytes


def mutated(data: bytes, random: random.Random, others: list[bytes]) -> bytes:
    """One to four changes of any bytes."""
    out = bytearray(data)
    # Most changes near the start, where headers are.
    for _ in range(1 + random.randrange(4)):
        if not out:
            break
        reach = len(out) if random.random() < 0.5 else min(len(out), 96)
        at = random.randrange(reach)
        match random.randrange(9):
            case 0:
                out[at] ^= 1 << random.randrange(8)
            case 1:
                out[at] = random.choice((0, 1, 0x7F, 0x80, 0xFF))
            case 2:
                out[at] = random.randrange(256)
            case 3:
                width, order = random.choice((2, 4)), random.choice("<>")
                number = random.choice(NUMBERS) & (256**width - 1)
                out[at : at + width] = struct.pack(order + {2: "H", 4: "I"}[width], number)
            case 4:
                del out[random.randrange(len(out)) :]
            case 5:
                del out[at : at + random.randrange(1, 64)]
            case 6:
                start = random.randrange(len(out))
                out[at:at] = out[start : start + random.randrange(1, 256)]
            case 7:
                other = random.choice(others)
                out[at:] = other[random.randrange(len(other)) :]
            case 8:
                size = random.randrange(1, 32)
                out[at : at + size] = bytes(size)
    return bytes(out)


# --- Pictures


def with_checksums(data: bytes) -> bytes:
    """A PNG whose checksums are right again, so that decoders look at what was changed."""
    out, at = bytearray(data[:8]), 8
    while at + 12 <= len(data):
        (length,) = struct.unpack(">I", data[at : at + 4])
        body = data[at + 4 : at + 8 + length]
        if at + 12 + length > len(data):
            break
        out += data[at : at + 4] + body + struct.pack(">I", zlib.crc32(body))
        at += 12 + length
    return bytes(out) + data[at:]


def pictures() -> list[tuple[str, bytes]]:
    """Small intact pictures of every format and mode."""
    import numpy as np
    from PIL import Image

    pixels = np.random.default_rng(0).integers(0, 256, (24, 32, 4), dtype=np.uint8)
    rgba = Image.fromarray(pixels, "RGBA")
    rgb = rgba.convert("RGB")
    gray16 = Image.fromarray(pixels[..., 0].astype(np.uint16) * 257)
    number = Image.fromarray(pixels[..., 0].astype(np.float32) / 255)
    exif = Image.Exif()
    exif[0x0112] = 6
    kinds: list[tuple[str, Image.Image, dict]] = [
        ("PNG", rgb, {}),
        ("PNG", rgba, {}),
        ("PNG", rgb.quantize(16), {"transparency": 3}),
        ("PNG", rgb.convert("1"), {}),
        ("PNG", rgba.convert("LA"), {}),
        ("PNG", gray16, {}),
        ("PNG", rgb, {"save_all": True, "append_images": [rgb.rotate(90)]}),
        ("JPEG", rgb, {"exif": exif}),
        ("JPEG", rgb.convert("L"), {}),
        ("JPEG", rgb.convert("CMYK"), {}),
        ("JPEG", rgb, {"progressive": True, "quality": 90}),
        ("GIF", rgb.quantize(32), {"save_all": True, "append_images": [rgb.quantize(8)]}),
        ("BMP", rgb, {}),
        ("BMP", rgb.quantize(16), {}),
        ("TIFF", rgb, {}),
        ("TIFF", rgb, {"compression": "tiff_lzw"}),
        ("TIFF", rgb, {"compression": "jpeg"}),
        ("TIFF", rgb, {"compression": "tiff_adobe_deflate"}),
        ("TIFF", number, {}),
        ("TIFF", gray16, {}),
        ("WEBP", rgb, {}),
        ("WEBP", rgba, {"lossless": True}),
        ("WEBP", rgb, {"save_all": True, "append_images": [rgb.rotate(90)]}),
        ("PPM", rgb, {}),
        ("PPM", rgb.convert("L"), {}),
        ("PPM", rgb.convert("1"), {}),
        ("JPEG2000", rgb, {}),
        ("AVIF", rgb, {}),
    ]
    found = []
    for name, image, options in kinds:
        if name not in Image.SAVE:
            Image.init()
        if name in Image.SAVE:
            stream = io.BytesIO()
            image.save(stream, name, **options)
            found.append((name, stream.getvalue()))
    plain = b"P3 4 3 255\n" + b" ".join(b"%d" % (7 * k % 256) for k in range(36))
    return [*found, ("PPM", plain)]


def picture_cases() -> Cases:
    seeds = pictures()
    every = [data for _, data in seeds]

    def make(number: int, random: random.Random) -> bytes:
        name, data = random.choice(seeds)
        data = mutated(data, random, every)
        return with_checksums(data) if name == "PNG" and random.random() < 0.7 else data

    return make


def read_picture(path: Path) -> str:
    from bcosvit.data.images import read_image
    from bcosvit.data.transforms import EvalTransform

    image = read_image(path)
    assert image.mode == "RGB" and min(image.size) >= 1
    for found in (image, read_image(path, at_least=64)):
        tensor = EvalTransform(64)(found)
        assert tensor.shape == (3, 64, 64) and bool(((tensor >= 0) & (tensor <= 1)).all())
    return "read"


# --- Weights


def weights_files() -> list[bytes]:
    """Files of small models of every kind."""
    import torch
    from torch import nn

    import bcosvit

    torch.manual_seed(0)
    stem = bcosvit.StemConfig(widths=(4, 6))
    small = {"width": 8, "num_heads": 2, "depth": 1, "mlp_ratio": 2, "image_size": 16}
    dense = bcosvit.DenseNetConfig(growth=2, blocks=(1, 1), stem_width=4, bottleneck=2)
    layers = [nn.Conv2d(3, 4, 3, 2, 1), nn.BatchNorm2d(4), nn.ReLU()]
    network = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))
    converted = bcosvit.bcosify(network.eval(), image_size=16, b=1.0)
    models = [
        bcosvit.create_model(bcosvit.ModelConfig(**small, num_classes=3, backbone=stem)),
        bcosvit.create_model(
            bcosvit.ModelConfig(**small, num_classes=3, backbone=stem, family="conventional")
        ),
        bcosvit.create_model(dataclass_replace(dense, num_classes=3)),
        converted,
        bcosvit.create_model(
            "bcos_vit_ti", backbone=converted, tap=2, **{**small, "mlp_ratio": 2.0}
        ),
    ]
    notes = {
        "bcosvit.classes": json.dumps(["cat", "dog", "cow"]),
        "bcosvit.run": json.dumps({"data": "scenes", "eval_crop": 0.875, "epoch": 1}),
    }
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for number, model in enumerate(models):
            path = Path(folder) / f"{number}.safetensors"
            bcosvit.save(model, path, metadata=notes)
            found.append(path.read_bytes())
    return found


def dataclass_replace(config: object, **changes: object) -> object:
    return config.replace(**changes)  # type: ignore[attr-defined]


HOSTILE = (
    *(0, 1, -1, 2, 3, 7, 10**3, 10**6, 10**9, 10**12, 10**18, 2**31, 2**63, 2**64, 10**400),
    *(0.0, -0.5, 0.5, 1e-300, 1e300, float("inf"), float("-inf"), float("nan")),
    *(None, True, False, "", "x", "mul", "bcos", "\x00", "../../etc/passwd", "a" * 10_000, "١٢"),
    *([], [[]], [0], [10**9], [1] * 10_000, {}, {"kind": "vit"}, {"a": {"b": {}}}),
)


def places(value: object, path: tuple = ()) -> Iterator[tuple]:
    """Every place in nested dicts and lists."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value)  # type: ignore
    for key, child in items:
        if isinstance(child, dict | list):
            yield from places(child, (*path, key))
        else:
            yield (*path, key)


def changed(value: object, random: random.Random) -> object:
    """One place of a JSON value replaced, removed, doubled or renamed."""
    value = json.loads(json.dumps(value))
    options = [place for place in places(value) if place]
    if not options:
        return random.choice(HOSTILE)
    *parents, key = random.choice(options)
    inner: object = value
    for parent in parents:
        inner = inner[parent]  # type: ignore[index]
    assert isinstance(inner, dict | list)
    match random.randrange(5):
        case 0 | 1 | 2:
            inner[key] = random.choice(HOSTILE)  # type: ignore[index]
        case 3:
            del inner[key]  # type: ignore[arg-type]
        case 4 if isinstance(inner, dict):
            inner[f"{key}x"] = random.choice(HOSTILE)
        case _:
            assert isinstance(inner, list)
            inner.append(random.choice(HOSTILE))
    return value


def weights_cases() -> Cases:
    files = weights_files()

    def make(number: int, random: random.Random) -> bytes:
        data = random.choice(files)
        (length,) = struct.unpack("<Q", data[:8])
        header, body = json.loads(data[8 : 8 + length]), bytearray(data[8 + length :])
        notes = header["__metadata__"]
        match random.randrange(8):
            case 0:
                return mutated(data, random, files)
            case 1:
                header = changed(header, random)
            case 2:
                tensors = [name for name in header if name != "__metadata__"]
                name = random.choice(tensors)
                header[name] = changed(header[name], random)
            case 3:
                at = 4 * random.randrange(len(body) // 4)
                body[at : at + 4] = random.choice(
                    [struct.pack("<f", x) for x in (float("nan"), float("inf"), -3e38, 1e-44)]
                )
            case 4:
                key = random.choice(["bcosvit.classes", "bcosvit.run"])
                notes[key] = json.dumps(changed(json.loads(notes[key]), random))
                if random.random() < 0.3:
                    notes[key] = random.choice(["", "[", "null", "{}", "nan", "[" * 5000])
            case _:
                config = json.loads(notes["bcosvit.config"])
                for _ in range(1 + random.randrange(2)):
                    config = changed(config, random)
                notes["bcosvit.config"] = json.dumps(config)
        text = json.dumps(header).encode()
        return struct.pack("<Q", len(text)) + text + bytes(body)

    return make


def load_weights(path: Path) -> str:
    import torch

    import bcosvit

    model = bcosvit.load(path)
    bcosvit.Predictor.load(path)
    size = model.config.image_size
    if max(size) <= 64:
        with torch.no_grad():
            assert model.eval()(torch.rand(1, 3, *size)).ndim == 2
    return "read"


KINDS: dict[str, tuple[Callable[[], Cases], Callable[[Path], str], str]] = {
    "pictures": (picture_cases, read_picture, ".img"),
    "weights": (weights_cases, load_weights, ".safetensors"),
}


# --- A child process


class SlowError(BaseException):
    """The case takes too long."""


def slow(number: int, frame: object) -> None:
    raise SlowError


def peak_megabytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def verdict(attempt: Callable[[], str], limits: Limits) -> tuple[str, str]:
    """Runs one case: "fine" or the kind of the finding, and what happened."""
    try:
        signal.setitimer(signal.ITIMER_PROF, limits.seconds)
        outcome = attempt()
    except ValueError as error:
        text = str(error)
        if type(error) is not ValueError and not type(error).__module__.startswith("bcosvit"):
            return "error", f"{type(error).__name__}: {text[:200]}"
        if "\n" in text or len(text) > 1000:
            return "not one sentence", text[:300]
        return "fine", "refused"
    except SlowError:
        return "slow", f"more than {limits.seconds} s"
    except BaseException as error:  # whatever it is, it is a finding
        return "error", f"{type(error).__name__}: {str(error)[:200]}"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return "fine", outcome


def child(kind: str, seed: int, first: int, last: int, folder: Path) -> None:
    """Runs cases one after the other, and prints one line of JSON for each."""
    make_cases, attempt, suffix = KINDS[kind]
    limits = LIMITS[kind]
    make = make_cases()
    signal.signal(signal.SIGPROF, slow)
    # Import everything before the memory is measured.
    path = folder / f"{kind}-warm-{os.getpid()}{suffix}"
    path.write_bytes(pictures()[0][1] if kind == "pictures" else weights_files()[0])
    attempt(path)
    path.unlink()
    base = peak_megabytes()
    ceiling = int(4e9)
    resource.setrlimit(resource.RLIMIT_DATA, (ceiling, ceiling))
    for number in range(first, last):
        data = make(number, random.Random(f"{kind} {seed} {number}"))
        path = folder / f"{kind}-{number}{suffix}"
        path.write_bytes(data)
        print(json.dumps(["start", number]), flush=True)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            start = time.process_time()
            found, what = verdict(lambda path=path: attempt(path), limits)
            seconds = time.process_time() - start
        if found == "fine" and warned and what != "refused":
            what += f", with a warning: {str(warned[0].message)[:80]}"
        grown = peak_megabytes() - base
        if found == "fine" and grown > limits.megabytes:
            found, what = "memory", f"{grown:.0f} MB"
        print(json.dumps(["end", number, found, what, round(seconds, 2), grown]), flush=True)
        if found == "fine":
            path.unlink()
        if grown > limits.megabytes:
            return  # the peak cannot be reset


# --- The parent


@dataclass
class Finding:
    """A case that must not happen."""

    kind: str
    number: int
    found: str
    what: str


def run(kind: str, seed: int, first: int, last: int, folder: Path) -> tuple[list[Finding], dict]:
    """Runs a chunk of cases, with a new child after every one that ends early."""
    findings: list[Finding] = []
    counts: dict = {"outcomes": collections.Counter(), "seconds": 0.0, "megabytes": 0.0}
    while first < last:
        command = [sys.executable, __file__, "--child", kind, str(seed), str(first), str(last)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(
            [*command, str(folder)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        current = None
        # The child limits each case; this is for a child that hangs where no signal reaches.
        seconds = 120 + 4 * LIMITS[kind].seconds + 2 * (last - first)
        try:
            output, errors = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            output, errors = process.communicate()
        for line in output.splitlines():
            row = json.loads(line)
            current = row[1] if row[0] == "start" else None
            if row[0] == "end":
                _, number, found, what, spent, grown = row
                counts["outcomes"][what if found == "fine" else found] += 1
                counts["seconds"] = max(counts["seconds"], spent)
                counts["megabytes"] = max(counts["megabytes"], grown)
                if found != "fine":
                    findings.append(Finding(kind, number, found, what))
                first = number + 1
        if current is not None:
            counts["outcomes"]["died"] += 1
            what = f"exit {process.returncode}: {errors.strip()[-200:]}"
            findings.append(Finding(kind, current, "died", what))
            first = current + 1
        elif process.returncode:
            raise RuntimeError(f"the child failed outside of a case: {errors[-1000:]}")
    return findings, counts


def fuzz(kind: str, count: int, seed: int, jobs: int, folder: Path) -> list[Finding]:
    """Runs all cases of a kind, and prints what came of them."""
    start = time.monotonic()
    chunks = [(n, min(n + CHUNK, count)) for n in range(0, count, CHUNK)]
    findings: list[Finding] = []
    outcomes: collections.Counter = collections.Counter()
    slowest = largest = 0.0
    with ThreadPoolExecutor(jobs) as pool:
        for found, counts in pool.map(lambda c: run(kind, seed, *c, folder), chunks):
            findings += found
            outcomes += counts["outcomes"]
            slowest = max(slowest, counts["seconds"])
            largest = max(largest, counts["megabytes"])
            for finding in found:
                print(f"  {kind} {finding.number}: {finding.found}: {finding.what}", flush=True)
    limits = LIMITS[kind]
    print(
        f"{kind}: {count} cases with seed {seed} in {time.monotonic() - start:.0f} s, "
        f"{len(findings)} findings; slowest {slowest:.2f} s of {limits.seconds:g}, memory at most "
        f"+{largest:.0f} MB of {limits.megabytes}"
    )
    for what, times in outcomes.most_common(8):
        print(f"  {times:>6} {what}")
    return findings


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        kind, seed, first, last, folder = sys.argv[2:7]
        return child(kind, int(seed), int(first), int(last), Path(folder))
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pictures", type=int, default=20_000)
    parser.add_argument("--weights", type=int, default=2_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="child processes at a time")
    parser.add_argument("--keep", type=Path, help="a folder for the files of findings")
    options = parser.parse_args()
    findings: list[Finding] = []
    with tempfile.TemporaryDirectory(prefix="fuzz-") as name:
        folder = options.keep or Path(name)
        folder.mkdir(parents=True, exist_ok=True)
        for kind, count in (("pictures", options.pictures), ("weights", options.weights)):
            if count:
                findings += fuzz(kind, count, options.seed, options.jobs, folder)
    raise SystemExit(bool(findings))


if __name__ == "__main__":
    main()
