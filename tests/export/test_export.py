"""Exported graphs say what the model says, in a runtime that knows nothing of it."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from PIL import Image
from torch import Tensor
from typer.testing import CliRunner

from bcosvit import DenseNetConfig, create_model, explain, load, save
from bcosvit.attribution import CompletenessWarning
from bcosvit.cli import app
from bcosvit.export import export_weights, files, load_exported
from bcosvit.export.compare import Comparison, difference, drawn
from bcosvit.export.graph import graph_of
from bcosvit.models import Classifier
from bcosvit.predictor import Predictor
from tests.conftest import randomize, small_config, tiny_config
from tests.report.support import write_pictures

EXAMPLE = Path(__file__).parents[2] / "examples" / "onnx_example.py"
NAMES = ["cat", "dog", "sea star"]


def write(path: Path, config=tiny_config, **options) -> Path:
    """A model whose signal neither dies nor explodes, so that float32 has digits to agree in."""
    model = create_model(config(**{"depth": 1, "gain": 2.0, "num_classes": 3, **options}))
    randomize(model)
    save(model, path, metadata={"bcosvit.classes": json.dumps(NAMES)})
    return path


@pytest.fixture(scope="module")
def exported(tmp_path_factory) -> tuple[Path, Path, Comparison]:
    """One export with constants (an embedding, biases) for all that only looks at it."""
    folder = tmp_path_factory.mktemp("export")
    torch.manual_seed(0)
    dense = DenseNetConfig(growth=2, blocks=(1, 1), stem_width=4, bottleneck=2)
    options = {"position": "emb", "attention": "standard", "backbone": dense}
    weights = write(folder / "m.safetensors", **options)
    out = folder / "m.onnx"
    return weights, out, export_weights(weights, out, explanation=True, repeats=1)


def run_onnx(out: Path, images: Tensor, target: Tensor | None = None) -> list[Tensor]:
    session = onnxruntime.InferenceSession(out, providers=["CPUExecutionProvider"])
    given = {"image": images.numpy()}
    if target is not None:
        given["target"] = target.numpy()
    return [torch.from_numpy(each) for each in session.run(None, given)]


def assert_same(found: list[Tensor], weights: Path, images: Tensor, target: Tensor) -> None:
    model = load(weights)
    logits = model(images).detach()
    assert difference(found[0], logits) < 1e-4
    if len(found) == 1:
        return
    expected = explain(model, images, torch.where(target < 0, logits.argmax(1), target))
    assert expected.map.abs().max() > 0
    assert difference(found[1], expected.map) < 1e-4
    assert difference(found[2], expected.residual) < 1e-4
    # Complete by its own numbers too.
    logit = logits.gather(1, expected.target[:, None])[:, 0]
    total = found[1].double().sum((1, 2)) + found[2] + expected.bias
    assert difference(total.float(), logit) < 1e-4


@pytest.mark.parametrize("count", [1, 3])
def test_any_number_of_pictures_and_any_class(exported, count):
    weights, out, _ = exported
    images, target = drawn(Predictor.load(weights, "cpu"), count), torch.arange(count) - 1
    assert_same(run_onnx(out, images, target), weights, images, target)


def test_the_residual_is_there(exported):
    weights, out, _ = exported
    images = drawn(Predictor.load(weights, "cpu"), 2)
    assert (run_onnx(out, images, torch.tensor([0, 1]))[2] != 0).all()


def test_runtimes_refuse_other_sizes_and_classes(exported):
    _, out, _ = exported
    session = onnxruntime.InferenceSession(out, providers=["CPUExecutionProvider"])
    image, target = np.zeros((1, 3, 32, 32), np.float32), np.array([0])
    with pytest.raises(Exception, match="invalid dimensions"):
        session.run(None, {"image": image[..., 1:], "target": target})
    onnxruntime.set_default_logger_severity(4)
    with pytest.raises(Exception, match="Out of range"):
        session.run(None, {"image": image, "target": target + 3})


def test_the_file_says_what_it_needs(exported):
    _, out, _ = exported
    notes = onnxruntime.InferenceSession(out).get_modelmeta().custom_metadata_map
    assert json.loads(notes["bcosvit.classes"]) == NAMES
    assert json.loads(notes["bcosvit.input"])["size"] == [32, 32]
    assert json.loads(notes["bcosvit.input"])["resize_short_side"] == 37
    assert json.loads(notes["bcosvit.config"])["position"] == "emb"
    # Nothing of the machine that it was made on.
    assert str(Path.home()).encode() not in out.read_bytes()
    assert str(Path(__file__).parents[2]).encode() not in out.read_bytes()


def test_the_comparison(exported):
    _, out, found = exported
    assert found.bytes_exported == out.stat().st_size
    assert set(found.errors) == {"logits", "contributions", "residual"}
    assert all(0 < error < 1e-4 for pair in found.errors.values() for error in pair)
    ratios = [row for row in found.table().columns[3].cells if row]
    assert len(ratios) == 2 and all(ratio.endswith("×") for ratio in ratios)


def test_the_example_needs_no_torch(exported, tmp_path):
    weights, out, _ = exported
    photo = next(write_pictures(tmp_path / "pictures", 1, size=50).iterdir())
    blocked = "import sys; sys.modules['torch'] = sys.modules['bcosvit'] = None; import runpy; "
    code = f"{blocked}sys.argv = {['x', str(out), str(photo), 'map.png']}; "
    code += f"runpy.run_path({str(EXAMPLE)!r}, run_name='__main__')"
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    predictor = Predictor.load(weights, "cpu")
    logits = predictor.model(predictor.transform(Image.open(photo))[None])
    assert result.stdout.startswith(NAMES[logits.argmax()])
    with Image.open(tmp_path / "map.png") as drawing:
        assert drawing.size == (32, 32)
        assert len(drawing.getcolors(2000)) > 10


def test_a_conventional_model_has_no_contributions(tmp_path):
    weights = write(tmp_path / "c.safetensors", small_config, family="conventional")
    with pytest.raises(ValueError, match="no contributions of its own"):
        export_weights(weights, tmp_path / "c.onnx", explanation=True)


def to_torch(folder: Path, *options: str) -> torch.nn.Module:
    """By the command line, and read again."""
    names = ["--weights", str(folder / "m.safetensors"), "--out", str(folder / "m.pt2")]
    result = CliRunner().invoke(app, ["export", "--format", "torch-export", *names, *options])
    assert result.exit_code == 0, result.output
    assert "error in logits" in result.output
    notes = {"bcosvit.classes": ""}
    program = torch.export.load(folder / "m.pt2", extra_files=notes)
    assert json.loads(notes["bcosvit.classes"]) == NAMES
    assert str(Path(__file__).parents[2]).encode() not in (folder / "m.pt2").read_bytes()
    return program.module()


def test_torchs_own_format(tmp_path):
    weights = write(tmp_path / "m.safetensors", small_config)
    images = drawn(Predictor.load(weights, "cpu"), 3)
    assert_same(list(to_torch(tmp_path)(images)), weights, images, torch.zeros(3).long())


@pytest.mark.slow
def test_torchs_own_format_twice_is_the_same_file(tmp_path):
    predictor = Predictor.load(write(tmp_path / "m.safetensors", small_config), "cpu")
    graphs = [graph_of(predictor.model, (16, 16), explanation=False) for _ in range(2)]
    for name, graph in zip(("one.pt2", "two.pt2"), graphs, strict=True):
        files.write_torch(graph, tmp_path / name, files.notes_on(predictor))
    assert (tmp_path / "one.pt2").read_bytes() == (tmp_path / "two.pt2").read_bytes()


@pytest.mark.slow
def test_torchs_own_format_with_explanation(tmp_path):
    weights = write(tmp_path / "m.safetensors", small_config)
    images, target = drawn(Predictor.load(weights, "cpu"), 3), torch.tensor([2, -1, 0])
    found = to_torch(tmp_path, "--with-explanation")(images, target)
    assert_same(list(found), weights, images, target)
    # A model without constants has no share of them, exactly.
    assert (found[2] == 0).all()


@pytest.mark.slow
def test_a_conventional_model_as_onnx(tmp_path):
    family = {"family": "conventional", "flavor": "conventional", "gain": None}
    weights = write(tmp_path / "c.safetensors", **family)
    found = export_weights(weights, tmp_path / "c.onnx", repeats=1)
    assert set(found.errors) == {"logits"}
    images = drawn(Predictor.load(weights, "cpu"), 3)
    assert_same(run_onnx(tmp_path / "c.onnx", images), weights, images, torch.zeros(3).long())


def test_a_folder_for_the_hub(tmp_path):
    weights = write(tmp_path / "m.safetensors", small_config)
    names = ["--weights", str(weights), "--out", str(tmp_path / "m")]
    result = CliRunner().invoke(app, ["export", "--format", "hub", *names])
    assert result.exit_code == 0, result.output
    twin = Classifier.from_pretrained(tmp_path / "m")
    images = drawn(Predictor.load(weights, "cpu"), 1)
    # The folder holds unit rows; normalizing these again may change their last bits.
    torch.testing.assert_close(twin(images), load(weights)(images))
    assert Predictor.load(tmp_path / "m/model.safetensors", "cpu").class_names == tuple(NAMES)
    assert "(explained.png)" in (tmp_path / "m/README.md").read_text("utf-8")
    with Image.open(tmp_path / "m/explained.png") as picture:
        assert len(picture.convert("RGB").getcolors(1 << 20)) > 100


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--format", "tflite", "--out", "m.tflite"], "choose from onnx, torch-export"),
        (["--out", "m.pt2"], "m.pt2 does not end in .onnx"),
        (["--format", "hub", "--with-explanation", "--out", "m"], "always explain themselves"),
        (["--weights", "nothing.safetensors", "--out", "m.onnx"], "no weights file"),
    ],
)
def test_mistakes(tmp_path, monkeypatch, arguments, says):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "m.safetensors", small_config)
    result = CliRunner().invoke(app, ["export", "--weights", "m.safetensors", *arguments])
    assert says in str(result.exception)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.safetensors"]


def test_without_the_extra(tmp_path, monkeypatch):
    weights = write(tmp_path / "m.safetensors", small_config)
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(ValueError, match=r"pip install 'bcosvit\[export\]'"):
        export_weights(weights, tmp_path / "m.onnx")


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"position": "mul", "maxout": 2, "tap": 1},
        {"position": "add", "maxout": 1, "tap": 3},
        {"position": "none", "b": 1.5, "maxout": 3, "image_size": 40},
        {"flavor": "v2", "b": 2.5, "attention_b": 1.0},
    ],
)
def test_every_axis(tmp_path, options):
    weights = write(tmp_path / "m.safetensors", **options)
    export_weights(weights, tmp_path / "m.onnx", explanation=True, repeats=1)
    images, target = drawn(Predictor.load(weights, "cpu"), 3), torch.tensor([1, -1, 0])
    assert_same(run_onnx(tmp_path / "m.onnx", images, target), weights, images, target)


@pytest.mark.slow
def test_full_size(tmp_path):
    """ViT-Ti-38 as it stands before training, on drawn scenes."""
    save(create_model("bcos_vit_ti_38", num_classes=10), tmp_path / "m.safetensors")
    found = export_weights(
        tmp_path / "m.safetensors", tmp_path / "m.onnx", explanation=True, repeats=1
    )
    for eager, exported in found.errors.values():
        assert exported < max(1e-4, 2 * eager)
    assert found.bytes_exported < 1.2 * found.bytes_weights


@pytest.mark.parametrize("ending", ["onnx", pytest.param("pt2", marks=pytest.mark.slow)])
def test_a_loaded_file_checks_its_contributions(exported, tmp_path, ending):
    weights, out, _ = exported
    if ending == "pt2":
        out = tmp_path / "m.pt2"
        export_weights(weights, out, format="torch-export", explanation=True, repeats=1)
    images = drawn(Predictor.load(weights, "cpu"), 2)
    found = load_exported(out, strict=True)(images)
    expected = explain(load(weights), images)
    assert torch.equal(found.target, expected.target)
    assert difference(found.map, expected.map) < 1e-4
    assert found.bias == expected.bias
    one = load_exported(out)(images, torch.tensor([0, 1]))
    assert one.target.tolist() == [0, 1]
    both = load_exported(out)(images, 1)
    assert both.target.tolist() == [1, 1]
    assert torch.equal(both.map[1], one.map[1])


def test_an_exported_file_that_does_not_add_up_is_not_silent(tmp_path, monkeypatch):
    def damaged(path, keys):
        logits, contributions = torch.tensor([[-3.0, -4.0]]), torch.full((1, 2, 2), 0.25)
        return (lambda *given: [logits, contributions, torch.zeros(1)]), {keys[0]: bias}

    monkeypatch.setattr(files, "runtime", damaged)
    images, path, bias = torch.rand(1, 3, 2, 2), tmp_path / "m.onnx", "-4.0"
    assert load_exported(path, strict=True)(images).target.tolist() == [0]
    bias = "-5.0"
    with pytest.warns(CompletenessWarning, match="miss the logit"):
        load_exported(path)(images)
    with pytest.raises(ValueError, match="miss the logit"):
        load_exported(path, strict=True)(images)
    with pytest.raises(ValueError, match="ends neither"):
        load_exported(tmp_path / "m.safetensors")
