"""House rules that readers rely on: who imports whom, where freezing happens, what is light."""

import ast
import importlib
import re
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import bcosvit

ROOT = Path(bcosvit.__file__).parent

# Each package may import those before it in its row; DESIGN: ops ← nn ← models ← attribution ← ...
MAY_IMPORT = {
    "ops": set(),
    "nn": {"ops"},
    # Of data, only the transform that a model's pictures go through.
    "models": {"ops", "nn", "data"},
    "attribution": {"ops", "nn", "models"},
    "data": {"nn"},
    "metrics": {"ops", "nn", "models", "attribution", "data", "predictor"},
    "report": {"ops", "nn", "models", "attribution", "metrics", "data", "predictor"},
    "train": {"predictor", "ops", "nn", "models", "attribution", "metrics", "data", "report"},
    "auditing": {"ops", "nn", "models", "attribution", "metrics", "data", "report", "predictor"},
    # On top: nothing but the command line imports these.
    "export": {"predictor", "ops", "nn", "models", "attribution", "data", "report"},
    "web": {
        "predictor",
        "ops",
        "nn",
        "models",
        "attribution",
        "metrics",
        "data",
        "report",
        "auditing",
    },
    "paper": {
        "predictor",
        "ops",
        "nn",
        "models",
        "attribution",
        "metrics",
        "data",
        "report",
        "train",
    },
}
MAY_IMPORT["cli"] = {*MAY_IMPORT, "doctor", "predictor"}
# Small modules without an opinion, open to all.
COMMON = {
    "_torchvision",
    "files",
    "guesses",
    "machine",
    "messages",
    "progress",
    "registry",
    "settings",
    "shipped",
}


def imports(path: Path) -> set[str]:
    """Packages of ours that a file imports, wherever in the file."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        found |= {name.split(".")[1] for name in names if name.startswith("bcosvit.")}
    return found


def test_who_imports_whom():
    wrong = {}
    for package, allowed in MAY_IMPORT.items():
        for path in (ROOT / package).rglob("*.py"):
            if extra := imports(path) - allowed - COMMON - {package}:
                wrong[str(path.relative_to(ROOT))] = extra
    assert wrong == {}


def test_every_package_has_a_rule():
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert packages == set(MAY_IMPORT)


def module_name(path: Path) -> str:
    parts = ("bcosvit", *path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts).removesuffix(".__init__")


MODULES = {module_name(path): path for path in ROOT.rglob("*.py")}


def imported_modules(path: Path) -> set[str]:
    """Modules of ours that a file imports, also inside functions."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= (inner & MODULES.keys()) or {node.module}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found & MODULES.keys()


def test_modules_do_not_import_each_other_in_a_circle():
    # The package itself imports its public names when they are used.
    modules = {name: path for name, path in MODULES.items() if name != "bcosvit"}
    graph = {name: imported_modules(path) - {name} for name, path in modules.items()}
    # Raises CycleError, which names the modules.
    TopologicalSorter(graph).prepare()


def test_no_name_hides_a_module():
    hidden = []
    for name in MODULES.keys() - {"bcosvit", "bcosvit.__main__"}:
        module = importlib.import_module(name)
        parent, _, last = name.rpartition(".")
        if getattr(sys.modules[parent], last) is not module:
            hidden.append(name)
    assert hidden == []


def test_freezing_stands_in_one_place():
    places = [
        path.relative_to(ROOT).as_posix()
        for package in ("ops", "nn", "models")
        for path in (ROOT / package).rglob("*.py")
        if re.search(r"\.detach\(", path.read_text())
    ]
    # Saving weights and checking pictures detach too, but freeze nothing.
    assert sorted(places) == ["models/weights.py", "nn/encoding.py", "ops/dispatch.py"]


def test_references_import_nothing_of_ours():
    for path in Path(__file__).parent.joinpath("reference").glob("*.py"):
        assert "bcosvit" not in path.read_text()


def test_import_is_light():
    heavy = ["torch", "torchvision", "matplotlib", "lightning", "rich", "typer", "PIL", "gradio"]
    code = (
        "import sys; before = set(sys.modules); import bcosvit; "
        f"print([m for m in {heavy} if m in set(sys.modules) - before])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
