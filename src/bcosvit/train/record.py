"""What a run was told to do: ``run.yaml``, which it resumes from and is held to."""

import dataclasses
import platform
import subprocess
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml

import bcosvit
from bcosvit.files import atomic
from bcosvit.models.config import Config, DenseNetConfig
from bcosvit.models.registry import from_dict, to_dict
from bcosvit.train.recipe import Recipe

RECORD = "run.yaml"

FREE = frozenset(
    {
        "workers",
        "checkpoint_epochs",
        "checkpoint_steps",
        "picture_every",
        "cache_folder",
        "cache_gigabytes",
        "cache_on_device",
        "graphs",
    }
)
"""Fields of a recipe that change nothing about the result, so that a resumed run may."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A run, resolved: nothing is left to a default."""

    data: str
    """What the pictures were opened by."""
    fingerprint: str
    """Tells their names and labels from any others."""
    classes: tuple[str, ...]
    train_images: int
    val_images: int
    model: Config
    recipe_name: str
    recipe: Recipe
    init: str | None
    """The weights file that the model starts from."""

    @property
    def image_size(self) -> int:
        """Side of the model's square input."""
        if isinstance(self.model, DenseNetConfig):
            return self.recipe.image_size or 224
        return self.model.image_size[0]


def write(plan: Plan, folder: Path, machines: dict[str, Any]) -> None:
    """Writes ``run.yaml``, with versions and ``machines`` for the reader."""
    values = {
        "data": {
            "source": plan.data,
            "train_images": plan.train_images,
            "val_images": plan.val_images,
            "fingerprint": plan.fingerprint,
            "classes": list(plan.classes),
        },
        "model": _plain(to_dict(plan.model)),
        "init": plan.init,
        "recipe": {"name": plan.recipe_name, **_plain(dataclasses.asdict(plan.recipe))},
        "machines": machines,
        "versions": {
            "bcosvit": bcosvit.__version__,
            "revision": _revision(),
            "python": platform.python_version(),
            **{name: version(name) for name in ("torch", "lightning", "torchmetrics")},
        },
    }
    with atomic(folder / RECORD) as temporary:
        temporary.write_text(yaml.safe_dump(values, sort_keys=False, allow_unicode=True), "utf-8")


def read(folder: Path) -> Plan:
    """The plan of the run in ``folder``."""
    path = folder / RECORD
    if not path.is_file():
        raise ValueError(
            f"There is no run to resume in {folder}, which has no {RECORD}; "
            f"start one without --resume."
        )
    try:
        values = yaml.safe_load(path.read_text("utf-8"))
        data, recipe = values["data"], dict(values["recipe"])
        return Plan(
            data=data["source"],
            fingerprint=data["fingerprint"],
            classes=tuple(data["classes"]),
            train_images=data["train_images"],
            val_images=data["val_images"],
            model=from_dict(values["model"]),
            recipe_name=recipe.pop("name"),
            recipe=Recipe(**recipe),
            init=values["init"],
        )
    except (yaml.YAMLError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path} is not a record of a run ({type(error).__name__}: {error}); "
            f"restore it, or start a new run in another folder."
        ) from error


def differences(then: Plan, now: Plan) -> list[str]:
    """What a resumed run may not change, but would: 'epochs was 100 and is 200', ..."""
    before, after = _settings(then), _settings(now)
    return [
        f"{key} was {before.get(key)!r} and is {after.get(key)!r}"
        for key in dict.fromkeys([*before, *after])
        if before.get(key) != after.get(key)
    ]


def _settings(plan: Plan) -> dict[str, Any]:
    recipe = {k: v for k, v in dataclasses.asdict(plan.recipe).items() if k not in FREE}
    model = {f"model.{key}": value for key, value in to_dict(plan.model).items()}
    return {
        "data": plan.data,
        "the pictures' fingerprint": plan.fingerprint,
        "init": plan.init,
        **model,
        **recipe,
    }


def _plain(value: Any) -> Any:
    """Tuples as lists: YAML knows no others without naming Python's types."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def _revision() -> str | None:
    """The git commit of this package, where it runs from a checkout of its own."""
    here = Path(__file__)
    command = ["git", "-C", str(here.parent)]
    try:
        # A virtual environment may lie inside somebody else's repository.
        subprocess.run(
            [*command, "ls-files", "--error-unmatch", here.name], check=True, capture_output=True
        )
        described = subprocess.run(
            [*command, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
            check=True,
            capture_output=True,
            text=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return described.stdout.strip()
