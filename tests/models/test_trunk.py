"""Any B-cos network as the tokenizer of a B-cos ViT, which starts as what that network computes."""

import copy
import json

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

import bcosvit
from bcosvit import DenseNetConfig, ModelConfig, bcosify, create_model
from bcosvit._torchvision import torchvision
from bcosvit.attribution.layers import input_contributions, token_contributions
from bcosvit.cli import app
from bcosvit.export import export_weights
from bcosvit.models import Bcosified
from bcosvit.models.config import BcosifiedConfig
from bcosvit.nn.bcosified import ConvertedBatchNorm
from bcosvit.predictor import Predictor
from bcosvit.train.feature_cache import FeatureCache
from bcosvit.web.service import ExplanationService
from tests.conftest import randomize
from tests.reference import converted, dynamic
from tests.report.support import write_pictures
from tests.train.support import recipe, train

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
SMALL = {"width": 4, "num_heads": 2, "depth": 2, "mlp_ratio": 2, "gain": 1.0}


class Small(nn.Module):
    """Stages of stride 2 and 4, the second one with a skip connection, and a wide last map."""

    def __init__(self, classes: int = 5) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 4, 3, 2, 1, bias=False), nn.BatchNorm2d(4), nn.ReLU()
        )
        self.down = nn.Sequential(nn.Conv2d(4, 6, 3, 2, 1, bias=False), nn.BatchNorm2d(6))
        self.inner = nn.Sequential(nn.Conv2d(6, 6, 3, 1, 1, bias=False), nn.BatchNorm2d(6))
        self.last = nn.Sequential(nn.Conv2d(6, 10, 1, bias=False), nn.BatchNorm2d(10), nn.ReLU())
        self.fc = nn.Linear(10, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.down(self.stem(x)).relu()
        x = (x + self.inner(x)).relu()
        return self.fc(self.last(x).mean((2, 3)))


def original(dtype: torch.dtype = torch.float64) -> nn.Module:
    """Random weights and statistics."""
    model = Small()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.running_var, 0.2, 0.6)
            nn.init.normal_(module.running_mean, std=0.3)
            nn.init.normal_(module.bias, std=0.3)
            nn.init.uniform_(module.weight, 1.5, 3)
    return model.to(dtype).eval()


def trunk(dtype: torch.dtype = torch.float64, size: int = 16) -> Bcosified:
    return bcosify(original(dtype), image_size=size, b=2.0, fade=0.0)


def alive(model: nn.Module) -> nn.Module:
    """The blocks in action, as after training."""
    for block in model.blocks:
        nn.init.normal_(block.attention_scale.weight)
        nn.init.normal_(block.mlp_scale.weight)
        nn.init.normal_(block.attention.prior.logits)
    return model


def pictures(dtype: torch.dtype = torch.float64, size: int = 16) -> Tensor:
    return torch.rand(2, 3, size, size, dtype=dtype)


@pytest.mark.parametrize(
    ("tap", "width", "grid"),
    [
        (None, 6, (4, 4)),
        (2, 4, (8, 8)),
        (4, 6, (4, 4)),
        ("stem", 4, (8, 8)),
        ("stem.0", 4, (8, 8)),
        ("down", 6, (4, 4)),
        ("last", 10, (4, 4)),
    ],
)
def test_it_starts_as_the_trunk(tap, width, grid) -> None:
    network, images = trunk(), pictures()
    options = {} if tap is None else {"tap": tap}
    model = create_model("bcos_vit_ti", backbone=network, **SMALL, **options)
    assert (model.config.token_width, model.config.grid) == (width, grid)
    assert model.config.num_classes == 5
    assert network(images).abs().max() > 1e-3
    torch.testing.assert_close(model.eval()(images), network(images), rtol=1e-12, atol=0)
    # Training would change it at once.
    model(images).sum().backward()
    for block in model.blocks:
        assert block.attention_scale.weight.grad.abs().max() > 0
        assert block.mlp_scale.weight.grad.abs().max() > 0


@pytest.mark.parametrize("flavor", ["v1", "v2"])
@pytest.mark.parametrize("tap", [None, 2, "denseblock1", 8])
def test_a_densenet_is_a_trunk(flavor, tap) -> None:
    config = DenseNetConfig(flavor=flavor, growth=2, blocks=(1, 1, 1), stem_width=4, num_classes=3)
    network = randomize(create_model(config)).double().eval()
    options = {} if tap is None else {"tap": tap}
    model = create_model("bcos_vit_s", backbone=network, image_size=32, **SMALL, **options)
    assert model.config.tap == {None: 3, 2: 2, "denseblock1": 1, 8: 2}[tap]
    images = pictures(size=32)
    torch.testing.assert_close(model.eval()(images), network(images), rtol=1e-12, atol=0)
    found = bcosvit.explain(alive(model), images)
    assert not torch.allclose(found.logits, network(images))
    assert (found.completeness_error() <= 1e-9 * found.logit.abs()).all()


@pytest.mark.parametrize("tap", [2, 4, "last"])
def test_completeness(tap) -> None:
    model = alive(create_model("bcos_vit_ti", backbone=trunk(), tap=tap, **SMALL)).eval()
    found = bcosvit.explain(model, pictures())
    assert (found.completeness_error() <= 1e-9 * found.logit.abs()).all()
    assert (found.residual == 0).all()
    with torch.no_grad():
        model.tokenizer.backbone.fade.fill_(0.3)
        model.head.fade.fill_(0.3)
    found = bcosvit.explain(model, pictures())
    assert (found.completeness_error() <= 1e-9 * found.logit.abs()).all()
    assert (found.residual != 0).all()


@pytest.mark.parametrize("fade", [0.0, 0.4])
def test_matrix_against_explicit_products(fade) -> None:
    """Every layer as a matrix that is written out in NumPy, from the original's weights."""
    plain = original()
    network = bcosify(plain, mean=MEAN, std=STD, image_size=16, b=2.0, fade=fade)
    model = alive(create_model("bcos_vit_ti", backbone=network, tap=4, **SMALL)).eval()
    image = pictures()[:1]
    encoded = torch.cat([image, 1 - image], 1)[0].numpy()
    weights = {k: v.numpy() for k, v in plain.state_dict().items()}
    setting = converted.Setting(weights, np.array(MEAN), np.array(STD), fade, 2.0)

    def norm(state, shape, name):
        return converted.batch_norm(state, shape, setting, name, 1e-5)

    state, shape = converted.stem(encoded, setting, "stem.0", stride=2, padding=1)
    state = converted.relu(norm(state, shape, "stem.1"))
    state, shape = converted.convolution(state, shape, setting, "down.0", stride=2, padding=1)
    state = converted.relu(norm(state, shape, "down.1"))
    branch, _ = converted.convolution(state, shape, setting, "inner.0", padding=1)
    state = converted.relu(state.plus(norm(branch, shape, "inner.1")))

    d, n = shape[0], shape[1] * shape[2]
    order = np.eye(d * n)[np.arange(d * n).reshape(d, n).T.reshape(-1)]
    state = state.then(order)
    config = model.config
    options = {
        "f": config.layer_gain,
        **{k: getattr(config, k) for k in ("num_heads", "maxout", "position", "attention")},
        "attention_b": 2,
    }
    own = {k: v.detach().numpy() for k, v in model.state_dict().items()}
    for block in range(config.depth):
        name = f"blocks.{block}."
        state = dynamic.attention_block(state, n, d, own, name + "attention.", options)
        state = dynamic.mlp_block(state, n, d, own, name + "mlp.", options)
    state = state.then(order.T)

    state, shape = converted.convolution(state, shape, setting, "last.0")
    state = converted.relu(norm(state, shape, "last.1"))
    state = converted.linear(converted.average(state, shape), setting, "fc")

    found = bcosvit.explain(model, image, "all")
    np.testing.assert_allclose(found.logits[0], state.value, rtol=1e-9)
    rows = found.weights[0].flatten(1).numpy()
    assert np.abs(rows - state.matrix).max() <= 1e-9 * np.abs(state.matrix).max()
    np.testing.assert_allclose(found.residual[0], state.offset, rtol=1e-9, atol=1e-15)


def test_a_file_needs_nothing_else(tmp_path) -> None:
    model = alive(create_model("bcos_vit_ti", backbone=trunk(torch.float32), **SMALL)).eval()
    bcosvit.save(model, tmp_path / "vit.safetensors")
    again = bcosvit.load(tmp_path / "vit.safetensors")
    assert again.config == model.config
    images = pictures(torch.float32)
    assert torch.equal(again(images), model(images))
    assert "converted Small" in again.config.title


def test_head_under_autocast() -> None:
    """Half precision ends before the head: its logits have more digits."""
    model = alive(create_model("bcos_vit_ti", backbone=trunk(torch.float32), **SMALL)).eval()
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(pictures(torch.float32))
    assert (logits != logits.bfloat16()).any()


def test_backbones_by_file_and_by_config(tmp_path) -> None:
    network = trunk(torch.float32)
    path = tmp_path / "trunk.safetensors"
    bcosvit.save(network, path)
    images = pictures(torch.float32)
    for given in (path, str(path)):
        model = create_model("bcos_vit_ti", backbone=given, **SMALL).eval()
        assert torch.equal(model(images), network(images))
    fresh = create_model("bcos_vit_ti", backbone=network.config, **SMALL).eval()
    assert fresh.config == model.config
    assert fresh(images).isfinite().all() and not torch.allclose(fresh(images), network(images))


def test_another_number_of_classes_gets_a_new_last_layer() -> None:
    network, images = trunk(), pictures()
    model = create_model("bcos_vit_ti", backbone=network, num_classes=3, **SMALL).eval()
    assert model(images).shape == (2, 3)
    kept = model.head.original.last
    assert torch.equal(
        getattr(kept, "0").weight, getattr(network.network.original.last, "0").weight
    )
    before = getattr(kept, "0").weight.clone()
    model.classes = ("a", "b", "c")
    model.reset_classifier(7)
    assert model.classes is None
    assert model(images).shape == (2, 7) and model.config.num_classes == 7
    assert model.get_classifier().weight.shape == (7, 10)
    assert torch.equal(getattr(model.head.original.last, "0").weight, before)


def test_with_a_head_of_its_own() -> None:
    """As in the paper: tokens of any width by one more convolution, and a new head."""
    options = {**SMALL, "backbone": trunk(), "keep_head": False, "num_classes": 3}
    model = alive(create_model("bcos_vit_ti", **options, tap="inner", patch=2)).eval()
    assert (model.config.grid, model.config.token_width) == ((2, 2), 4)
    found = bcosvit.explain(model, pictures())
    assert found.logits.shape == (2, 3)
    error = found.completeness_error() / (found.logit - found.bias).abs()
    assert error.max() <= 1e-9


def test_a_frozen_trunk_keeps_its_statistics() -> None:
    network = trunk()
    for trained in (False, True):
        options = {**SMALL, "train_backbone": trained}
        model = create_model("bcos_vit_ti", backbone=network, **options).train()
        norms = [m for m in model.modules() if isinstance(m, ConvertedBatchNorm)]
        assert len(norms) == 4
        before = [m.running_square.clone() for m in norms]
        model(pictures()).sum().backward()
        same = [torch.equal(m.running_square, b) for m, b in zip(norms, before, strict=True)]
        assert same == [not trained] * 4
        grads = [p.grad is not None for p in model.tokenizer.parameters() if p.ndim > 1]
        assert grads == [trained] * len(grads)
        assert model.get_classifier().weight.grad is not None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tap": "inner"}, "also use what was computed before"),
        ({"tap": 8}, "give one of 2, 4"),
        ({"tap": "nowhere"}, "does not exist"),
        ({"tap": "fc"}, "no map"),
        ({"patch": 2}, "leave patch out"),
        ({"family": "conventional"}, "family='bcos'"),
    ],
)
def test_what_is_refused(options, message) -> None:
    with pytest.raises(ValueError, match=message):
        create_model("bcos_vit_ti", backbone=trunk(), **{**SMALL, **options})


def test_a_backbone_is_needed() -> None:
    with pytest.raises(ValueError, match="give backbone="):
        create_model("bcos_vit_ti")
    with pytest.raises(ValueError, match="convert it with"):
        create_model("bcos_vit_ti", backbone=Small())


def test_a_fixed_size_stays() -> None:
    config = trunk().config
    fixed = BcosifiedConfig(**{**config.values(), "any_size": False})
    assert create_model("bcos_vit_ti", backbone=fixed, **SMALL).config.image_size == (16, 16)
    with pytest.raises(ValueError, match="takes no other size"):
        create_model("bcos_vit_ti", backbone=fixed, image_size=32, **SMALL)


def test_other_sizes_without_a_prior() -> None:
    network = trunk()
    model = create_model("bcos_vit_ti", backbone=network, position="none", **SMALL).eval()
    images = torch.rand(2, 3, 24, 32, dtype=torch.float64)
    torch.testing.assert_close(model(images), network(images), rtol=1e-12, atol=0)
    assert token_contributions(model, images, 1).map.shape == (2, 6, 8)
    assert bcosvit.explain(model, images, method="rollout").map.shape == (2, 24, 32)


def test_priors_are_resized() -> None:
    network = trunk()
    model = create_model("bcos_vit_ti", backbone=network, **SMALL).eval()
    images = pictures(size=24)
    resized = bcosvit.resize_prior(model, 24)
    assert resized.config.grid == (6, 6)
    torch.testing.assert_close(resized(images), network(images), rtol=1e-12, atol=0)


def test_layer_by_layer_and_features() -> None:
    model = alive(create_model("bcos_vit_ti", backbone=trunk(), **SMALL)).eval()
    images = pictures()
    for block in range(3):
        found = token_contributions(model, images, block)
        assert (found.completeness_error() <= 1e-9 * found.logit.abs()).all()
        found = input_contributions(model, images, block, 3)
        assert (found.completeness_error() <= 1e-9 * found.logit.abs()).all()
    extractor = bcosvit.features(model)
    assert [list(m.shape) for m in extractor(images)] == [[2, 6, 4, 4]] * 2
    assert extractor.feature_info.reduction() == [4, 4]


def test_features_are_cached(tmp_path) -> None:
    class Views:
        identity = "two"

        def __len__(self) -> int:
            return 2

        def sample(self, index: int, view: int) -> tuple[Tensor, int]:
            return images[index], index

    images = pictures(torch.float32)
    model = alive(create_model("bcos_vit_ti", backbone=trunk(torch.float32), **SMALL)).eval()
    options = {"views": 1, "folder": tmp_path, "max_bytes": 10**6}
    cache = FeatureCache.build(model, Views(), **options)
    features = torch.stack([cache[index, 0][0] for index in range(2)])
    assert features.shape == (2, 6, 4, 4)
    torch.testing.assert_close(model.from_features(features), model(images), rtol=1e-2, atol=1e-4)


def test_a_network_of_any_kind() -> None:
    plain = torchvision.models.mobilenet_v3_small(num_classes=4).double().eval()
    network = bcosify(plain, image_size=64, b=2.0, fade=0.0)
    images = pictures(size=64)
    for stride, width in ((8, 24), (16, 48), (32, 96)):
        model = create_model("bcos_vit_ti", backbone=network, tap=stride, depth=1).eval()
        assert model.config.grid == (64 // stride,) * 2
        assert model.config.token_width == width
        torch.testing.assert_close(model(images), network(images), rtol=1e-12, atol=1e-18)


def test_copies_and_paper_models_are_as_before() -> None:
    model = alive(create_model("bcos_vit_ti", backbone=trunk(), **SMALL)).eval()
    images = pictures()
    assert torch.equal(copy.deepcopy(model)(images), model(images))
    assert not any("scale" in key for key in create_model("bcos_vit_ti_38", depth=1).state_dict())
    assert ModelConfig().layer_scale is None


@pytest.mark.parametrize("given", [{"init": "FILE"}, {"model.backbone": "FILE"}], ids=str)
@pytest.mark.parametrize("views", [0, 1])
def test_training_starts_where_the_trunk_stands(tmp_path, given, views) -> None:
    network = trunk(torch.float32, 32)
    path = tmp_path / "trunk.safetensors"
    bcosvit.save(network, path)
    given = {key: str(path) for key in given}
    settings = {f"model.{key}": value for key, value in SMALL.items()}
    ways = recipe(epochs=1, ema=None, cache_views=views)
    run = train(
        "scenes?size=32&train=16&val=8",
        model="bcos_vit_ti",
        init=given.pop("init", None),
        out=tmp_path / "run",
        recipe=ways,
        settings={**settings, **given},
    )
    trained = bcosvit.load(run.weights)
    assert trained.config.keep_head and trained.config.num_classes == 8
    assert max(block.mlp_scale.weight.abs().max() for block in trained.blocks) > 0
    key = "original.down.0.weight"
    expected = network.network.state_dict()[key]
    assert torch.equal(trained.tokenizer.backbone.state_dict()[key], expected)


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("trunk") / "vit.safetensors"
    model = alive(create_model("bcos_vit_ti", backbone=trunk(torch.float32, 32), **SMALL)).eval()
    bcosvit.save(model, path, metadata={"bcosvit.classes": json.dumps(list("abcde"))})
    return path


@pytest.mark.slow
@pytest.mark.parametrize(("format", "name"), [("onnx", "m.onnx"), ("torch-export", "m.pt2")])
def test_export(weights, tmp_path, format, name) -> None:
    out = tmp_path / name
    found = export_weights(weights, out, format=format, explanation=True, repeats=1)
    assert all(error < 1e-3 for pair in found.errors.values() for error in pair)


def test_web(weights, tmp_path) -> None:
    photo = next(write_pictures(tmp_path, 1, size=50).iterdir())
    service = ExplanationService(predictor=Predictor.load(weights, "cpu"))
    upload = service.open(photo)
    assert "inherent" in service.methods and "rollout" in service.methods
    sums = service.sums(upload, service.find_class("c", upload))
    assert service.exact is not None
    assert sums.completeness_error <= 1e-4 * abs(sums.logit)


def test_command_line(weights, tmp_path) -> None:
    photo = next(write_pictures(tmp_path / "pictures", 1, size=50).iterdir())
    path = tmp_path / "trunk.safetensors"
    bcosvit.save(trunk(torch.float32), path)
    for words in (
        ["explain", str(photo), "--weights", str(weights), "--out", str(tmp_path / "out")],
        ["info", "bcos_vit_ti", "--set", f"backbone={path}", "--set", "depth=1"],
    ):
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 0, result.output
