"""Weights files that somebody made to do harm: refused in one sentence, before memory is taken."""

import json
import resource
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

import bcosvit
from bcosvit import Predictor, create_model, load, load_backbone, save
from bcosvit.models import DenseNetConfig
from bcosvit.models.originals import load_original
from bcosvit.models.registry import to_dict
from bcosvit.models.weights import CLASSES_KEY, CONFIG_KEY, RUN_KEY, plain_state
from bcosvit.train.checkpoints import initialize
from tests.conftest import small_config, tiny_config

INF, NAN = float("inf"), float("nan")
HUGE = 10**9


def densenet() -> Any:
    return create_model(DenseNetConfig(flavor="v2", growth=2, blocks=(1, 1), stem_width=4))


def converted() -> Any:
    net = nn.Sequential(
        *(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2)),
    )
    return bcosvit.bcosify(net.eval(), image_size=16)


def vit() -> Any:
    return create_model(small_config())


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    return {make.__name__: make() for make in (vit, densenet, converted)}


def write(
    path: Path, model: Any, change: Any = None, *, metadata: dict[str, str] | None = None
) -> Path:
    """The file of a model whose config somebody has changed."""
    values = to_dict(model.config)
    if change is not None:
        change = [change] if isinstance(change, tuple) else change
        for where, value in change:
            *parents, last = where.split("/")
            place = values
            for parent in parents:
                place = place[int(parent) if isinstance(place, list | tuple) else parent]
            place[last] = value
    text = json.dumps(values)
    save_file(dict(model.state_dict()), path, metadata={CONFIG_KEY: text, **(metadata or {})})
    return path


LAYER = ["ConvertedLinear", {"weight": [HUGE, HUGE], "bias": None}]
HOSTILE = [
    *(("vit", (name, HUGE)) for name in ("depth", "width", "num_heads", "patch", "maxout")),
    *(("vit", (name, HUGE)) for name in ("num_classes", "image_size", "tap")),
    *(("vit", ("depth", value)) for value in (0, -1, 2.5, True, "12", None, [], 10**400)),
    ("vit", [("width", 65520), ("num_heads", 4095)]),
    ("vit", ("depth", 1000)),
    ("vit", ("image_size", [16_384, 16_384])),
    *(("vit", ("mlp_ratio", value)) for value in (INF, NAN, -1, 0, 1e308, "4", True)),
    *(("vit", (name, NAN)) for name in ("gain", "eps", "logit_bias", "b", "layer_scale")),
    ("vit", ("patch", 10**12)),
    ("vit", ("keep_head", 1)),
    ("vit", ("train_backbone", "yes")),
    ("vit", ("backbone", [])),
    ("vit", ("backbone/widths", [HUGE])),
    ("vit", ("backbone/widths", [1] * 10_000)),
    ("vit", ("backbone/gain", INF)),
    ("vit", ("family", {"a": 1})),
    ("vit", ("kind", ["vit"])),
    ("vit", ("kind", "densenet")),
    ("densenet", ("blocks", [HUGE])),
    ("densenet", ("blocks", [1000] * 8)),
    ("densenet", ("blocks", "many")),
    ("densenet", ("growth", HUGE)),
    ("densenet", ("stem_width", 65_536)),
    ("densenet", ("bottleneck", -1)),
    ("densenet", ("logit_scale", NAN)),
    ("converted", ("program", [])),
    ("converted", ("program/layers", {"a": LAYER})),
    ("converted", ("program/layers", {"a": ["Container", {"x": 1}]})),
    ("converted", ("program/layers", {"..": ["Freeze", {}]})),
    ("converted", ("program/layers", {"forward": ["Freeze", {}]})),
    ("converted", ("program/parameters", {"x": [HUGE, HUGE]})),
    ("converted", ("program/buffers", {"x": [[1], "load"]})),
    ("converted", ("program/instructions", [[1, "operator", "pow", [9**9, 9**9], {}]])),
    ("converted", ("program/instructions", [[1, "operator", "mul", [[0], HUGE], {}]])),
    ("converted", ("program/instructions", [[1, "function", "os.system", ["true"], {}]])),
    ("converted", ("program/instructions", [[1, "layer", "__class__", [], {}]])),
    ("converted", ("program/instructions", [[1, "function", "torch.add", [], {"class": 1}]])),
    ("converted", ("program/instructions", [[1, "function", "torch.relu", [{"variable": 9}], {}]])),
    (
        "converted",
        (
            "program/instructions",
            [
                [1, "function", "torch.Tensor.new_zeros", [{"variable": 0}, [HUGE]], {}],
                [2, "function", "torch.Tensor.unbind", [{"variable": 1}], {}],
            ],
        ),
    ),
    (
        "converted",
        (
            "program/instructions",
            [
                [
                    1,
                    "function",
                    "torch.Tensor.new_zeros",
                    [{"variable": 0}, [10 * HUGE]],
                    {"device": "cpu"},
                ]
            ],
        ),
    ),
    ("converted", ("image_size", [HUGE, HUGE])),
    ("converted", ("any_size", 3)),
    ("converted", ("source", "a\x1b[2Jb")),
    ("converted", ("head", 7)),
    ("converted", ("activation", "none")),
]


@pytest.mark.parametrize(("name", "change"), HOSTILE, ids=lambda value: str(value)[:60])
def test_a_hostile_config_is_refused(models, tmp_path, name, change):
    path = write(tmp_path / "m.safetensors", models[name], change)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ValueError, match=r"m\.safetensors") as error:
        load(path)
    message = str(error.value)
    assert len(message) < 1000 and message.isprintable()
    # KiB: what is refused must not have been allocated.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 * 1024


@pytest.mark.parametrize(
    ("kind", "change"), [("vit", ("depth", 1000)), ("densenet", ("blocks", [1000] * 8))]
)
def test_a_model_is_built_no_further_than_its_file_goes(tmp_path, models, kind, change):
    path = write(tmp_path / "model.safetensors", models[kind], change)
    made = 0

    def count(*_: Any) -> None:
        nonlocal made
        made += 1

    hook = register_module_module_registration_hook(count)
    try:
        with pytest.raises(ValueError, match=r"more weights than the \d+ of the file"):
            load(path)
    finally:
        hook.remove()
    assert 0 < made < 2000


def test_what_was_not_changed_still_loads(models, tmp_path):
    for name, model in models.items():
        assert load(write(tmp_path / f"{name}.safetensors", model)).config == model.config


@pytest.mark.parametrize("text", ["[" * 100_000, '{"kind": ' * 50_000, "1" * 10_000, " " * 2**23])
def test_a_config_that_is_deep_or_long_is_refused(tmp_path, text):
    path = tmp_path / "m.safetensors"
    save_file({"a": torch.zeros(1)}, path, metadata={CONFIG_KEY: text})
    with pytest.raises(ValueError, match=r"m\.safetensors"):
        load(path)


def test_a_header_without_end_is_refused(tmp_path):
    path = tmp_path / "m.safetensors"
    with path.open("wb") as file:
        file.write((2**26).to_bytes(8, "little"))
        file.truncate(2**27)
    with pytest.raises(ValueError, match="header of 67108864 bytes"):
        load(path)


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_weights_that_are_not_finite_are_refused(models, tmp_path, value):
    state = {key: tensor.clone() for key, tensor in models["densenet"].state_dict().items()}
    state["features.conv0.weight"].view(-1)[3] = value
    config = json.dumps(to_dict(models["densenet"].config))
    path = tmp_path / "m.safetensors"
    save_file(state, path, metadata={CONFIG_KEY: config})
    torch.save(state, tmp_path / "m.pth")
    for attempt in (
        lambda: load(path),
        lambda: Predictor.load(path),
        lambda: load_backbone(densenet(), tmp_path / "m.pth"),
        lambda: initialize(densenet(), path),
    ):
        with pytest.raises(ValueError, match=r"not finite \((features\.)?conv0\.weight\)"):
            attempt()


@pytest.mark.parametrize(
    "names",
    [
        *('{"a": 1}', "[1, 2, 3, 4, 5]", '["a"]', "[]", "nonsense", "[" * 100_000),
        json.dumps(["a\x1b[2J", *"bcde"]),
        json.dumps(["a\nb", *"bcde"]),
        json.dumps(["\u202ea", *"bcde"]),
        json.dumps(["a" * 10_000, *"bcde"]),
        json.dumps(["x"] * 1_000_000),
    ],
    ids=lambda value: value[:20],
)
def test_hostile_class_names_are_refused(models, tmp_path, names):
    path = write(tmp_path / "m.safetensors", models["vit"], metadata={CLASSES_KEY: names})
    with pytest.raises(ValueError, match=r"m\.safetensors") as error:
        Predictor.load(path, "cpu")
    assert len(str(error.value)) < 1000 and str(error.value).isprintable()


def test_names_of_all_languages_are_taken(models, tmp_path):
    names = ["猫", "čížek", "👩‍🚀", "می‌خواهم", "a b's"]
    metadata = {CLASSES_KEY: json.dumps(names)}
    path = write(tmp_path / "m.safetensors", models["vit"], metadata=metadata)
    assert list(Predictor.load(path, "cpu").class_names) == names


@pytest.mark.parametrize(
    "run",
    [
        *('"text"', "[]", "nonsense", '{"eval_crop": 0}', '{"eval_crop": NaN}'),
        *('{"eval_crop": 1e300}', '{"eval_crop": "x"}', '{"accuracy": Infinity}', '{"epoch": []}'),
        *('{"image_size": 0}', '{"image_size": 1e3}', '{"image_size": 99999}'),
    ],
)
def test_hostile_notes_about_the_run_are_refused(models, tmp_path, run):
    path = write(tmp_path / "m.safetensors", models["vit"], metadata={RUN_KEY: run})
    with pytest.raises(ValueError, match=r"m\.safetensors"):
        Predictor.load(path, "cpu")


def test_a_backbone_file_is_read_with_the_same_care(models, tmp_path):
    path = tmp_path / "bomb.pth"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"\0" * 2**24)
    with pytest.raises(ValueError, match=r"unpack to \d+ bytes"):
        load_backbone(create_model(tiny_config()), path)
    torch.save({"features.conv0.weight": torch.zeros(1).expand(10**6, 10**6)}, path)
    with pytest.raises(ValueError, match="without those numbers"):
        plain_state(path)
    torch.save({3: torch.zeros(1)}, path)
    with pytest.raises(ValueError, match="names and tensors"):
        plain_state(path)
    (tmp_path / "cut.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{")
    with pytest.raises(ValueError, match="not a complete safetensors"):
        load_backbone(create_model(tiny_config()), tmp_path / "cut.safetensors")


def test_what_is_converted_is_read_with_the_same_care(tmp_path):
    model = create_model(small_config(family="conventional"))
    path = write(tmp_path / "m.safetensors", model, ("depth", HUGE))
    with pytest.raises(ValueError, match=r"depth = 1000000000 is not allowed"):
        load_original(str(path))
    state = {"fc.weight": torch.full((3, 3), NAN)}
    torch.save(state, tmp_path / "m.pth")
    with pytest.raises(ValueError, match="not finite"):
        load_original("torchvision:resnet18", tmp_path / "m.pth")


def test_a_folder_of_the_hub_is_read_with_the_same_care(models, tmp_path):
    models["densenet"].save_pretrained(tmp_path / "hub")
    write(tmp_path / "hub" / "model.safetensors", models["densenet"], ("blocks", [HUGE]))
    with pytest.raises(ValueError, match="blocks"):
        bcosvit.models.DenseNet.from_pretrained(tmp_path / "hub")


def test_the_same_model_is_saved_to_the_same_bytes(models, tmp_path):
    metadata = {CLASSES_KEY: '["ä\\n"]', RUN_KEY: "{}", **{f"key {n}": "x" for n in range(20)}}
    contents = set()
    for number in range(4):
        path = tmp_path / f"{number}.safetensors"
        save(models["vit"], path, metadata=metadata)
        contents.add(path.read_bytes())
    assert len(contents) == 1
