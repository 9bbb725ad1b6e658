"""Names, options, configs: what can be made, and what is refused."""

import dataclasses
import json
import math

import pytest
import torch

from bcosvit import (
    ModelConfig,
    StemConfig,
    create_model,
    explain,
    list_models,
    load,
    resize_prior,
)
from bcosvit.models import Classifier, Config, DenseNetConfig, model_config, register_model
from bcosvit.models.base import LogitLayer
from bcosvit.models.registry import KINDS, from_dict, needs_backbone, to_dict
from bcosvit.models.summary import summarize
from bcosvit.nn import BatchNormUncentered2d, BcosConv2d, BcosEncoding, BcosLinear
from tests.conftest import randomize, small_config, tiny_config


def test_every_name_of_the_paper():
    sizes, depths = ("ti", "s", "b"), (13, 38, 87)
    for family in ("bcos_vit", "vit"):
        assert {f"{family}_{size}_{depth}" for size in sizes for depth in depths} <= set(
            list_models()
        )


@pytest.mark.parametrize("name", list_models())
def test_every_name_predicts(name):
    options = {"backbone": DenseNetConfig()} if needs_backbone(name) else {}
    with torch.device("meta"):
        model = create_model(name, num_classes=7, **options)
    assert model(torch.zeros(2, 3, 224, 224, device="meta")).shape == (2, 7)


@pytest.mark.parametrize(
    ("depth", "channels", "side", "kernel"), [(13, 256, 56, 4), (38, 512, 28, 2), (87, 1024, 14, 1)]
)
@pytest.mark.parametrize("family", ["bcos_vit", "vit"])
def test_taps(family, depth, channels, side, kernel):
    """The named number of convolutions, and 196 tokens (the paper's Sec. C.1)."""
    with torch.device("meta"):
        model = create_model(f"{family}_ti_{depth}")
    backbone = model.tokenizer.backbone
    convolutions = [m for m in backbone.modules() if isinstance(m, BcosConv2d | torch.nn.Conv2d)]
    assert len(convolutions) == depth == model.config.backbone.convolutions_at(model.config.tap)
    encoded = model.encoding(torch.zeros(1, 3, 224, 224, device="meta"))
    assert backbone(encoded).shape == (1, channels, side, side)
    assert model.tokenizer(encoded).shape == (1, 196, 192)
    assert model.config.grid == (14, 14)
    assert tuple(model.tokenizer.patches.kernel_size) == (kernel, kernel)
    assert tuple(model.tokenizer.patches.stride) == (kernel, kernel)


@pytest.mark.parametrize(("size", "f", "width"), [("ti", 15, 192), ("s", 20, 384), ("b", 25, 768)])
@pytest.mark.parametrize(("position", "factor"), [("mul", 10), ("add", 1), ("none", 1), ("emb", 1)])
def test_scales(size, f, width, position, factor):
    """γ = f/√c, the logit scale and bias (the paper's Sec. C.1)."""
    with torch.device("meta"):
        model = create_model(f"bcos_vit_{size}_38", position=position)
    f = f * factor
    block = model.blocks[0]
    assert block.attention.value.scale == pytest.approx(f / math.sqrt(width))
    assert block.mlp[1].scale == pytest.approx(f / math.sqrt(4 * width))
    assert model.tokenizer.patches.scale == pytest.approx(f / math.sqrt(4 * 512))
    assert model.head.maxout == 1
    assert model.logit.scale == 1e-3
    assert model.logit.bias == pytest.approx(math.log(0.01 / 0.99))
    assert model.tokenizer.feature_scale == 1e3
    assert model.tokenizer.backbone.conv0.scale == pytest.approx(100 / math.sqrt(49 * 6))


def test_flavors():
    with torch.device("meta"):
        v1, v2 = create_model("bcos_vit_ti_38"), create_model("bcos_vit_ti_38", backbone="v2")
    kinds = {type(m) for m in v1.tokenizer.backbone.modules()}
    assert BatchNormUncentered2d not in kinds
    assert v1.tokenizer.backbone.conv0.maxout == 2
    assert isinstance(v2.tokenizer.backbone.norm0, BatchNormUncentered2d)
    assert v2.tokenizer.backbone.norm0.bias is None
    assert v2.tokenizer.backbone.conv0.maxout == 1
    assert v2.tokenizer.backbone.conv0.scale == 1
    assert v2.tokenizer.feature_scale == 1e3


def test_backbone_is_frozen_by_default():
    model = create_model(tiny_config(flavor="v2")).train()
    before = model.tokenizer.backbone.norm0.running_var.clone()
    model(torch.rand(2, 3, 32, 32)).sum().backward()
    assert all(p.grad is None for p in model.tokenizer.backbone.parameters())
    assert model.tokenizer.patches.weight.grad is not None
    assert torch.equal(model.tokenizer.backbone.norm0.running_var, before)

    model = create_model(tiny_config(flavor="v2", train_backbone=True)).train()
    model(torch.rand(2, 3, 32, 32)).sum().backward()
    assert all(p.grad is not None for p in model.tokenizer.backbone.parameters())
    assert not torch.equal(model.tokenizer.backbone.norm0.running_var, before)


def test_options_reach_the_layers():
    model = create_model(small_config(b=1.5, attention_b=2.5, maxout=3, eps=1e-5))
    block = model.blocks[0]
    assert (block.mlp[0].b, block.attention.value.b, block.attention.project.b) == (1.5, 2.5, 2.5)
    layers = [m for m in model.modules() if isinstance(m, BcosLinear | BcosConv2d)]
    assert {layer.maxout for layer in layers if layer is not model.head} == {3}
    assert {layer.eps for layer in layers} == {1e-5}


@pytest.mark.parametrize("name", ["bcos_vit_s_13", "vit_b_87", "bcos_densenet121"])
def test_config_survives_json(name):
    config = model_config(name, num_classes=3)
    assert from_dict(json.loads(json.dumps(to_dict(config)))) == config
    stem = small_config(image_size=(16, 32))
    assert from_dict(json.loads(json.dumps(to_dict(stem)))) == stem


def test_config_or_name():
    config = model_config("bcos_vit_ti_38", depth=1, num_classes=2)
    assert create_model(config).config == config
    assert create_model(config, num_classes=5).config.num_classes == 5


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("bcos_vit_ti_37", "did you mean .*'bcos_vit_ti_38'"),
        ("bcos-vit-b-87", r"did you mean 'bcos_vit_b_87'\?"),
        ("BCOS_VIT_S_13", r"did you mean 'bcos_vit_s_13'\?"),
        ("resnet", "choose from .*bcos_vit_ti_13"),
    ],
)
def test_unknown_names(name, says):
    with pytest.raises(ValueError, match=says):
        create_model(name)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"position": "rope"}, "position = 'rope'.*none, emb, add, mul"),
        ({"attention": "linear"}, "attention = 'linear'.*shifted, standard"),
        ({"backbone": "v3"}, "flavor = 'v3'.*v1, v2"),
        ({"backbone": "conventional"}, "does not fit the bcos family"),
        ({"b": 0.5}, "B = 0.5"),
        ({"attention_b": 0.0}, "B = 0.0"),
        ({"maxout": 0}, "maxout = 0"),
        ({"num_classes": 0}, "num_classes = 0"),
        ({"depth": 0}, "depth = 0"),
        ({"num_heads": 5}, "192 cannot be split into 5 heads"),
        ({"tap": 5}, "tap = 5.*1 to 4"),
        ({"image_size": 8}, "too small"),
        ({"image_size": (224, 224, 3)}, "image_size"),
        ({"image_size": 1.5}, "image_size"),
        ({"width": 0}, "width = 0"),
        ({"tap": "x"}, "tap = 'x'"),
        ({"b": "x"}, "b = 'x'.*give a number"),
        ({"mlp_ratio": -1}, "mlp_ratio = -1"),
        ({"color": 1}, "no option 'color'; it has .*family"),
    ],
)
def test_impossible_axes(options, says):
    with pytest.raises(ValueError, match=says):
        create_model("bcos_vit_ti_38", **options)


@pytest.mark.parametrize("blocks", ["x", (), (6, 0), (6, 1.5)])
def test_impossible_dense_blocks(blocks):
    with pytest.raises(ValueError, match=r"blocks = .* layers per block"):
        create_model("densenet121", blocks=blocks)


@pytest.mark.parametrize("options", [{"maxout": 2}, {"attention": "shifted"}, {"b": 1.0}])
def test_conventional_family_has_no_bcos_axes(options):
    with pytest.raises(ValueError, match="conventional family"):
        create_model("vit_ti_38", **options)


@pytest.mark.parametrize("position", ["none", "emb", "add", "mul"])
@pytest.mark.parametrize("family", ["bcos", "conventional"])
def test_other_image_sizes(position, family):
    model = randomize(create_model(small_config(position=position, family=family))).eval()
    x = torch.rand(1, 3, 24, 32)
    if position == "none":
        assert model(x).shape == (1, 5)
    else:
        with pytest.raises(ValueError, match=r"24×32.*16×16.*resize_prior\(model, \(24, 32\)\)"):
            model(x)
    resized = resize_prior(model, (24, 32))
    assert resized(x).shape == (1, 5)
    assert resized.config.image_size == (24, 32)
    assert model.config.image_size == (16, 16)
    back = resize_prior(model, 16)
    same = torch.rand(1, 3, 16, 16)
    torch.testing.assert_close(back(same), model(same))


def test_resized_prior_keeps_its_pattern():
    """A prior that favors near tokens still does on another grid."""
    model = create_model(small_config(image_size=32))
    prior = model.blocks[0].attention.prior
    side = 8
    y, x = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    place = torch.stack([y.flatten(), x.flatten()], 1).double()
    with torch.no_grad():
        prior.logits.copy_(-torch.cdist(place, place).expand(3, -1, -1))
    resized = resize_prior(model, 64).blocks[0].attention.prior.logits
    assert resized.shape == (3, 256, 256)
    favorite, own = resized.argmax(-1), torch.arange(256)
    assert ((favorite // 16 - own // 16).abs() <= 1).all()
    assert ((favorite % 16 - own % 16).abs() <= 1).all()
    assert (favorite == own).float().mean() > 0.7


def test_too_small_an_image_for_one_token():
    model = create_model(tiny_config(position="none"))
    with pytest.raises(ValueError, match="at least 13 pixels"):
        model(torch.rand(1, 3, 8, 8))


def test_small_models_from_the_same_config():
    config = ModelConfig(
        width=24, num_heads=2, depth=1, image_size=48, backbone=StemConfig(widths=(8, 8, 8))
    )
    assert config.grid == (6, 6)
    assert config.train_backbone
    assert create_model(config)(torch.rand(1, 3, 48, 48)).shape == (1, 1000)


def test_default_logit_bias_of_v2():
    assert DenseNetConfig(flavor="v2", num_classes=11).logit_bias == pytest.approx(-math.log(10))
    assert DenseNetConfig(flavor="v2", num_classes=1).logit_bias == 0
    assert DenseNetConfig(flavor="v2", logit_bias=0.0).logit_bias == 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class OutsideConfig(Config):
    """As a package of somebody else's would have it."""

    width: int = 4
    logit_scale: float = 1.0
    logit_bias: float = 0.0
    family = "bcos"
    noun = "outside network"


class OutsideNet(Classifier[OutsideConfig]):
    def __init__(self, config: OutsideConfig) -> None:
        super().__init__()
        self.config = config
        self.encoding = BcosEncoding()
        self.body = BcosConv2d(6, config.width, 3, padding=1)
        self.head = BcosConv2d(config.width, config.num_classes, 1)
        self.logit = LogitLayer(config.logit_scale, config.logit_bias)

    def from_encoded(self, encoded: torch.Tensor) -> torch.Tensor:
        return self.logit(self.head(self.body(encoded)).mean((2, 3)))


@pytest.fixture
def outside(monkeypatch):
    for attribute in ("_items", "_origins"):
        monkeypatch.setattr(KINDS, attribute, dict(getattr(KINDS, attribute)))
    variants = {"outside_net": {}, "outside_net_wide": {"width": 8}}
    return register_model("outside", OutsideConfig, variants)(OutsideNet)


def test_a_kind_from_outside(outside, tmp_path):
    assert outside is OutsideNet
    assert {"outside_net", "outside_net_wide"} <= set(list_models())
    model = create_model("outside_net_wide", num_classes=3)
    assert isinstance(model, OutsideNet)
    assert model.config == OutsideConfig(width=8, num_classes=3)
    assert model.config.describe() == "B-cos outside network, 3 classes, 224×224 pixels"
    assert to_dict(model.config)["kind"] == "outside"
    model.save_pretrained(tmp_path)
    assert "B-cos outside network" in (tmp_path / "README.md").read_text("utf-8")
    twin, images = load(tmp_path), torch.rand(2, 3, 8, 8)
    assert torch.equal(twin(images), model(images))
    found = explain(twin, images, "all")
    assert (found.completeness_error() < 1e-4).all()
    assert summarize(model.config).parts[-1].name == "head"
    model.reset_classifier(7)
    assert model(images).shape == (2, 7)
    with pytest.raises(ValueError, match="outside_net has no option 'depth'"):
        create_model("outside_net", depth=3)
    with pytest.raises(ValueError, match="did you mean 'outside_net'"):
        create_model("outside-net")


def test_a_taken_kind_is_refused(outside):
    with pytest.raises(ValueError, match="'vit' already"):
        register_model("vit", OutsideConfig)(OutsideNet)


def test_a_config_that_nobody_registered():
    with pytest.raises(ValueError, match="OutsideConfig is the config of no registered kind"):
        create_model(OutsideConfig())
    with pytest.raises(ValueError, match="no kind of model 'outside'"):
        from_dict({"kind": "outside"})


def test_a_bias_follows_the_number_of_classes():
    dense = DenseNetConfig(flavor="v2", num_classes=2)
    assert dense.replace(num_classes=11).logit_bias == pytest.approx(-math.log(10))
    assert dense.replace(num_classes=11, logit_bias=0.5).logit_bias == 0.5
    chosen = DenseNetConfig(flavor="v2", num_classes=2, logit_bias=-3.0)
    assert chosen.replace(num_classes=11).logit_bias == -3.0
    with pytest.raises(ValueError, match="no option 'heads'"):
        dense.replace(heads=3)
