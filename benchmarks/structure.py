"""Measures how much there is to read.

    python benchmarks/structure.py size                      # files and lines per package
    python benchmarks/structure.py walk explain photo.jpg    # what a command executes

``walk`` runs a command of bcosvit and prints the files whose functions it calls, in the order of
their first call, and how often that order changes from one package to another.
"""

import ast
import itertools
import sys
from pathlib import Path
from types import FrameType

import bcosvit

ROOT = Path(bcosvit.__file__).parent


def code_lines(text: str) -> int:
    """Counts lines that are neither blank, nor a comment, nor part of a docstring."""
    documented: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        body = getattr(node, "body", None)
        for child in body if isinstance(body, list) else ():
            if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant):
                documented.update(range(child.lineno, (child.end_lineno or child.lineno) + 1))
    lines = enumerate(text.splitlines(), start=1)
    return sum(
        bool(line.strip()) and not line.strip().startswith("#") and number not in documented
        for number, line in lines
    )


def size() -> None:
    sums: dict[str, list[int]] = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).parts
        text = path.read_text()
        counts = (1, text.count("\n"), code_lines(text))
        for name in (parts[0] if len(parts) > 1 else "(top)", "all"):
            row = sums.setdefault(name, [0, 0, 0])
            sums[name] = [a + b for a, b in zip(row, counts, strict=True)]
    print(f"{'package':14}{'files':>7}{'lines':>8}{'code':>8}")
    for name, (files, lines, code) in sorted(sums.items(), key=lambda item: item[0] == "all"):
        print(f"{name:14}{files:7}{lines:8}{code:8}")


def walk(arguments: list[str]) -> None:
    order: dict[str, None] = {}

    def called(frame: FrameType, event: str, _: object) -> None:
        name = frame.f_code.co_filename
        # Bodies of modules and classes run when they are imported: only functions have locals.
        if event == "call" and name.startswith(f"{ROOT}/") and frame.f_code.co_flags & 2:
            order.setdefault(name[len(str(ROOT)) + 1 :])

    from bcosvit.cli import main

    sys.argv = ["bcosvit", *arguments]
    sys.setprofile(called)
    try:
        main()
    except SystemExit as stop:
        print("exit", stop.code, file=sys.stderr)
    finally:
        sys.setprofile(None)
    packages = [name.split("/")[0] for name in order]
    changes = sum(a != b for a, b in itertools.pairwise(packages))
    print(*order, sep="\n")
    print(f"{len(order)} files, {changes} changes of package")


if __name__ == "__main__":
    if sys.argv[1:2] == ["size"]:
        size()
    elif sys.argv[1:2] == ["walk"] and sys.argv[2:]:
        walk(sys.argv[2:])
    else:
        raise SystemExit(__doc__)
