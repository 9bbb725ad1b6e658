"""A short run of `make fuzz`, and whether it would notice."""

import importlib.util
import sys
from pathlib import Path

import pytest

PATH = Path(__file__).parents[1] / "tools" / "fuzz.py"
spec = importlib.util.spec_from_file_location("fuzz_tool", PATH)
fuzz = importlib.util.module_from_spec(spec)
sys.modules["fuzz_tool"] = fuzz
spec.loader.exec_module(fuzz)


@pytest.mark.parametrize(("kind", "count"), [("pictures", 100), ("weights", 30)])
def test_damaged_files_are_read_or_refused(kind, count, tmp_path):
    findings, counts = fuzz.run(kind, 1, 0, count, tmp_path)
    assert findings == []
    assert counts["outcomes"]["refused"] > 0 and counts["outcomes"]["read"] > 0


def raising(error: BaseException):
    def attempt() -> str:
        raise error

    return attempt


@pytest.mark.parametrize(
    ("error", "found"),
    [
        (ValueError("It is wrong; give another."), "fine"),
        (ValueError("one line\nand another"), "not one sentence"),
        (KeyError("x"), "error"),
        (MemoryError(), "error"),
        (SystemExit(1), "error"),
        (UnicodeDecodeError("utf-8", b"", 0, 1, "x"), "error"),
    ],
)
def test_what_is_a_finding(error, found):
    limits = fuzz.Limits(seconds=5.0, megabytes=300)
    assert fuzz.verdict(raising(error), limits)[0] == found


def test_the_same_seed_gives_the_same_files():
    make = fuzz.picture_cases()
    first, again, other = (make(0, fuzz.random.Random(f"pictures {k} 0")) for k in (0, 0, 1))
    assert first == again != other
