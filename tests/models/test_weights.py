"""Weights on disk: ours with their config, the authors' by their own key names."""

import json
import os
import pickle

import pytest
import torch
from safetensors.torch import load_file, save_file

from bcosvit import create_model, explain, load, load_backbone, save
from bcosvit.models import DenseNetConfig
from bcosvit.models.registry import to_dict
from bcosvit.models.weights import CONFIG_KEY, load_state, published_state, read_metadata
from tests.conftest import randomize, small_config, tiny_config


@pytest.mark.parametrize("options", [{}, {"family": "conventional"}, {"position": "emb"}])
def test_round_trip(tmp_path, options):
    model = randomize(create_model(small_config(**options))).eval()
    save(model, tmp_path / "m.safetensors", metadata={"classes": "cat,dog"})
    twin = load(tmp_path / "m.safetensors")
    assert twin.config == model.config
    assert not twin.training
    x = torch.rand(1, 3, 16, 16)
    assert torch.equal(twin(x), model(x))
    assert read_metadata(tmp_path / "m.safetensors")["classes"] == "cat,dog"


def test_half_precision_file(tmp_path):
    model = randomize(create_model(small_config())).eval()
    save(model, tmp_path / "half.safetensors", dtype=torch.float16)
    save(model, tmp_path / "full.safetensors")
    sizes = [os.path.getsize(tmp_path / f"{name}.safetensors") for name in ("half", "full")]
    assert sizes[0] < 0.7 * sizes[1]
    twin = load(tmp_path / "half.safetensors")
    assert twin.head.weight.dtype == torch.float32
    assert (explain(twin, torch.rand(2, 3, 16, 16)).completeness_error() < 1e-3).all()


def test_a_compiled_model_saves_as_itself(tmp_path):
    model = create_model(small_config())
    save(torch.compile(model, backend="eager"), tmp_path / "m.safetensors")
    assert load(tmp_path / "m.safetensors").config == model.config


def test_saving_is_atomic(tmp_path, monkeypatch):
    path = tmp_path / "m.safetensors"
    save(create_model(small_config()), path)
    before = path.read_bytes()

    def full_disk(state, name, metadata):
        name.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("bcosvit.models.weights.save_file", full_disk)
    with pytest.raises(OSError, match="No space left"):
        save(create_model(small_config(num_classes=9)), path)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["m.safetensors"]


@pytest.mark.parametrize("config", ["nonsense", "{}", '{"kind": "densenet", "later": 1}'])
def test_a_config_that_cannot_be_read(tmp_path, config):
    path = tmp_path / "m.safetensors"
    save_file({"a": torch.zeros(1)}, path, metadata={CONFIG_KEY: config})
    with pytest.raises(ValueError, match=r"m.safetensors holds a model config that cannot be read"):
        load(path)


def test_a_text_is_no_checkpoint(tmp_path):
    (tmp_path / "text.pth").write_text("hello")
    with pytest.raises(ValueError, match="not a plain state dict"):
        published_state(tmp_path / "text.pth")


def test_what_does_not_fit_is_named_and_nothing_is_loaded(tmp_path):
    model = create_model(small_config())
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    state = dict(create_model(small_config(num_classes=9)).state_dict())
    del state["blocks.0.attention.norm.weight"]
    state["extra"] = torch.zeros(1)
    with pytest.raises(ValueError, match=r"missing: blocks.0.attention.norm.weight; ") as error:
        load_state(model, state, source="this.file")
    assert "unexpected: extra" in str(error.value)
    assert "head.weight ([9, 12] instead of [5, 12])" in str(error.value)
    assert "this.file does not fit" in str(error.value)
    assert all(torch.equal(model.state_dict()[key], before[key]) for key in before)


def test_bad_files(tmp_path):
    with pytest.raises(ValueError, match="no weights file"):
        load(tmp_path / "missing.safetensors")
    (tmp_path / "cut.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{")
    with pytest.raises(ValueError, match="not a complete safetensors"):
        load(tmp_path / "cut.safetensors")
    save_file({"a": torch.zeros(1)}, tmp_path / "plain.safetensors")
    with pytest.raises(ValueError, match="no model config"):
        load(tmp_path / "plain.safetensors")


class Bomb:
    def __reduce__(self):
        return (os.mkdir, ("unpickled",))


@pytest.mark.parametrize("write", [torch.save, lambda o, path: path.write_bytes(pickle.dumps(o))])
def test_nothing_is_unpickled(tmp_path, monkeypatch, write):
    monkeypatch.chdir(tmp_path)
    write({"features.conv0.weight": Bomb()}, tmp_path / "bomb.pth")
    with pytest.raises(ValueError, match="never unpickled"):
        load_backbone(create_model(tiny_config()), tmp_path / "bomb.pth")
    assert not (tmp_path / "unpickled").exists()


def authors_v1(model) -> dict[str, torch.Tensor]:
    """As the first public code names them: in a Sequential, kernels in a module `linear`."""
    return {
        "0." + key.removesuffix("weight") + "linear.weight": tensor
        for key, tensor in model.state_dict().items()
    }


DENSE = DenseNetConfig(growth=2, blocks=(2, 1, 1), stem_width=4, bottleneck=2, num_classes=6)


@pytest.mark.parametrize("tap", [1, 2, 3])
@pytest.mark.parametrize("wrap", [lambda s: s, lambda s: {"state_dict": s, "epoch": 3}])
def test_authors_v1_names(tmp_path, tap, wrap):
    whole = randomize(create_model(DENSE)).eval()
    state = authors_v1(whole)
    assert "0.features.denseblock1.denselayer2.conv1.linear.weight" in state
    torch.save(wrap(state), tmp_path / "state_dict.pkl")

    model = create_model(tiny_config(tap=tap)).eval()
    unused = load_backbone(model, tmp_path / "state_dict.pkl")
    assert "classifier.weight" in unused
    assert not any(f"denseblock{tap}." in key for key in unused)
    assert any(f"denseblock{tap + 1}." in key for key in unused) == (tap < 3)
    x = model.encoding(torch.rand(1, 3, 32, 32))
    expected = x
    # Training rounds differently, and this backbone is not trained.
    with torch.no_grad():
        for name, part in whole.features.named_children():
            expected = part(expected)
            if name == f"denseblock{tap}":
                break
        assert torch.equal(model.tokenizer.backbone(x), expected)

    alone = create_model(DENSE).eval()
    assert load_backbone(alone, tmp_path / "state_dict.pkl") == []
    image = torch.rand(1, 3, 32, 32)
    assert torch.equal(alone(image), whole(image))


def test_our_own_backbone_file(tmp_path):
    whole = randomize(create_model(DENSE))
    save(whole, tmp_path / "dense.safetensors")
    model = create_model(tiny_config(tap=2))
    load_backbone(model, tmp_path / "dense.safetensors")
    assert torch.equal(model.tokenizer.backbone.conv0.weight, whole.features.conv0.weight)


def test_flavors_do_not_mix(tmp_path):
    torch.save(authors_v1(create_model(DENSE)), tmp_path / "v1.pkl")
    with pytest.raises(ValueError, match=r"v1.pkl does not fit the model; missing: norm0.weight"):
        load_backbone(create_model(tiny_config(flavor="v2")), tmp_path / "v1.pkl")
    save(create_model(small_config()), tmp_path / "vit.safetensors")
    with pytest.raises(ValueError, match="holds no DenseNet"):
        load_backbone(create_model(tiny_config()), tmp_path / "vit.safetensors")


def test_conventional_backbone_takes_torchvisions_names(tmp_path):
    from bcosvit._torchvision import torchvision

    theirs = torchvision.models.densenet121(num_classes=4).eval()
    old = {
        key.replace("norm1", "norm.1").replace("conv2", "conv.2"): tensor
        for key, tensor in theirs.state_dict().items()
    }
    torch.save(old, tmp_path / "densenet121.pth")
    ours = create_model("densenet121", num_classes=4).eval()
    assert load_backbone(ours, tmp_path / "densenet121.pth") == []
    x = torch.rand(1, 3, 64, 64)
    torch.testing.assert_close(ours(x), theirs(ours.encoding(x)))


def test_safetensors_hold_plain_names(tmp_path):
    save(create_model(small_config()), tmp_path / "m.safetensors")
    assert "blocks.0.attention.value.weight" in load_file(tmp_path / "m.safetensors")


@pytest.mark.parametrize("config", [small_config(), tiny_config(flavor="v2"), DENSE])
def test_files_of_version_0_1_load(tmp_path, config):
    model = randomize(create_model(config)).eval()
    state = {
        key.replace("tokenizer.", "tokeniser."): tensor
        for key, tensor in model.state_dict().items()
    }
    text = json.dumps(to_dict(config)).replace("num_heads", "heads").replace("flavor", "flavour")
    path = tmp_path / "old.safetensors"
    save_file(state, path, metadata={CONFIG_KEY: text})
    images = torch.rand(1, 3, *(32, 32) if config is DENSE else config.image_size)
    old = load(path)
    assert old.config == config
    assert torch.equal(old(images), model(images))
    # Also as somebody would do it by hand, and as training starts from weights.
    again = create_model(config).eval()
    again.load_state_dict(state)
    assert torch.equal(again(images), model(images))
    fresh = create_model(config).eval()
    load_state(fresh, load_file(path))
    assert torch.equal(fresh(images), model(images))
