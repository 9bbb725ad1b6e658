"""What `make` installs: every package pinned, with hashes, within the ranges of pyproject.toml."""

import re
from collections import defaultdict
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
tomllib = pytest.importorskip("tomllib")  # Python 3.11 and later


def required(*extras: str) -> dict[str, Requirement]:
    """What pyproject.toml asks for, by name."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    texts = [*project["dependencies"]]
    for extra in extras:
        texts += project["optional-dependencies"][extra]
    found = {}
    for requirement in map(Requirement, texts):
        if requirement.name == project["name"]:
            found |= required(*requirement.extras)
        else:
            found[canonicalize_name(requirement.name)] = requirement
    return found


def test_what_make_installs_is_pinned_with_hashes():
    locked = defaultdict(list)
    for block in re.split(r"\n(?=[a-z0-9])", (ROOT / "requirements.lock").read_text())[1:]:
        pin, *hashes = block.replace("\\\n", "").split("--hash=sha256:")
        assert hashes and all(re.fullmatch(r"[0-9a-f]{64}\s*", each) for each in hashes), pin
        requirement = Requirement(pin.strip())
        locked[canonicalize_name(requirement.name)].append(requirement)
    # Those whose files depend on the build are pinned by version alone.
    rows = (ROOT / "constraints.txt").read_text().splitlines()
    builds = [Requirement(row) for row in rows if not row.startswith("#")]
    assert {each.name for each in builds} == {"torch", "torchvision"} - locked.keys()
    for each in builds:
        locked[each.name].append(each)
    for name, wanted in required("dev").items():
        assert locked[name], f"{name} is not locked; run `make lock`"
        for pin in locked[name]:
            (only,) = pin.specifier
            assert only.operator == "==" and only.version in wanted.specifier, f"{pin}: {wanted}"
    # What only these need is locked as well.
    assert {"sympy", "markupsafe", "uvicorn", "pydantic-core"} <= locked.keys()


def test_libraries_have_upper_bounds():
    """Tools of developers and what has a major version every few months are left open."""
    extras = ("train", "web", "hub", "timm", "audit", "export", "docs")
    bounds = {
        name: any(spec.operator in ("<", "==", "~=") for spec in each.specifier)
        for name, each in required(*extras).items()
    }
    assert {name for name, bounded in bounds.items() if not bounded} == {"pyarrow", "ipykernel"}
