"""``explain``: what it returns, for whom, and that nothing lingers."""

import copy
import dataclasses
import pickle
import threading
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import nn

import bcosvit
from bcosvit import create_model, explain, explaining, frozen_view, load
from bcosvit.attribution import Explainer, Top, inherent
from bcosvit.attribution.base import incompleteness
from bcosvit.attribution.inherent import Inherent, _adjoint
from bcosvit.models import DenseNetConfig
from bcosvit.nn import BcosLinear, Linear
from tests.conftest import randomize, small_config, tiny_config

PHOTOS = Path(bcosvit.__file__).parent / "photos"


def same(a, b, **tolerance) -> None:
    for field in ("map", "weights", "residual", "logit", "target"):
        torch.testing.assert_close(getattr(a, field), getattr(b, field), **tolerance)


def snapshot(model: nn.Module) -> dict:
    """Everything about a model that an explanation could leave a mark on."""
    return {
        name: (
            module.training,
            {key: value for key, value in module.__dict__.items() if not isinstance(value, dict)},
            {key: dict(v) for key, v in module.__dict__.items() if key.endswith("hooks")},
            {
                key: (id(t), None if t is None else (t._version, t.requires_grad, t.grad))
                for key, t in {**module._parameters, **module._buffers}.items()
            },
        )
        for name, module in model.named_modules()
    }


def test_shapes_and_target(model, images):
    one, all_ = explain(model, images), explain(model, images, "all")
    assert one.map.shape == (4, 16, 16)
    assert one.weights.shape == (4, 6, 16, 16)
    assert one.target.shape == one.residual.shape == one.logit.shape == (4,)
    assert torch.equal(one.target, model(images).argmax(1))
    torch.testing.assert_close(one.logit, model(images).amax(1))
    assert all_.map.shape == (4, 5, 16, 16)
    assert all_.weights.shape == (4, 5, 6, 16, 16)
    assert all_.target.shape == all_.residual.shape == all_.logit.shape == (4, 5)
    assert one.completeness_error().shape == (4,)
    assert all_.completeness_error().shape == (4, 5)
    assert (all_.completeness_error() < 1e-9).all()


@pytest.mark.parametrize("options", [{}, {"position": "emb"}, {"attention": "standard"}])
def test_all_classes_equal_class_by_class(options, images):
    model = randomize(create_model(small_config(**options))).double().eval()
    all_ = explain(model, images, "all", Inherent(rows_at_once=2))
    for k in range(5):
        one = explain(model, images, k)
        torch.testing.assert_close(all_.weights[:, k], one.weights)
        torch.testing.assert_close(all_.map[:, k], one.map)
        torch.testing.assert_close(all_.residual[:, k], one.residual)
        assert (all_.target[:, k] == k).all()


@pytest.mark.parametrize("head", [None, Linear(12, 20), nn.Linear(12, 20)])
def test_more_classes_than_inputs_of_the_last_layer(head, images, monkeypatch):
    model = randomize(create_model(small_config(num_classes=20, position="emb")))
    if head is not None:
        model.head = copy.deepcopy(head)
    model = model.double().eval()
    rows = []

    def counted(outputs, seed, inputs, probe, *, is_last):
        rows.append(len(seed) if inputs.ndim == 4 else 0)
        return _adjoint(outputs, seed, inputs, probe, is_last=is_last)

    monkeypatch.setattr(inherent, "_adjoint", counted)
    all_ = explain(model, images, "all")
    assert sum(rows) == 12
    for k in (0, 7, 19):
        one = explain(model, images, k)
        torch.testing.assert_close(all_.weights[:, k], one.weights)
        torch.testing.assert_close(all_.map[:, k], one.map)
        torch.testing.assert_close(all_.residual[:, k], one.residual)
    assert all_.residual.abs().min() > 0


def test_batch_equals_samples(model, images):
    target = torch.tensor([3, 0, 4, 1])
    batch = explain(model, images, target)
    for i in range(4):
        single = explain(model, images[i : i + 1], target[i : i + 1])
        torch.testing.assert_close(batch.map[i], single.map[0])
        torch.testing.assert_close(batch.weights[i], single.weights[0])


def test_second_call_leaves_the_first_result_alone(model, images):
    first = explain(model, images, 1)
    kept = first.weights.clone(), first.map.clone()
    second = explain(model, images, 1)
    same(first, second, rtol=0, atol=0)
    explain(model, images.flip(0), 2)
    assert torch.equal(first.weights, kept[0])
    assert torch.equal(first.map, kept[1])
    assert not first.weights.requires_grad
    assert not first.map.requires_grad


def test_callers_tensors_get_no_grad(model, images):
    before = images.clone()
    leaf = images.clone().requires_grad_()
    explain(model, images)
    explain(model, leaf)
    assert images.grad is None
    assert not images.requires_grad
    assert leaf.grad is None
    assert torch.equal(images, before)


@pytest.mark.parametrize("mode", [True, False])
def test_model_is_as_before(model, images, mode):
    model.train(mode)
    model.head.weight.grad = torch.ones_like(model.head.weight)
    model.head.register_forward_hook(lambda *_: None)
    before = snapshot(model)
    explain(model, images, "all")
    assert snapshot(model) == before
    with pytest.raises(ValueError, match="out of range"):
        explain(model, images, 99)
    assert snapshot(model) == before


def test_model_is_as_before_after_an_exception_inside(model, images):
    def fail(*_):
        raise RuntimeError("inside")

    model.blocks[1].register_forward_hook(fail)
    before = snapshot(model)
    with pytest.raises(RuntimeError, match="inside"):
        explain(model, images)
    assert snapshot(model) == before


def test_explains_evaluation_mode_even_of_a_training_model():
    """Batch statistics would make a sample's explanation depend on its neighbors."""
    config = DenseNetConfig(flavor="v2", growth=2, blocks=(1, 1), stem_width=4, num_classes=3)
    model = randomize(create_model(config)).double()
    x = torch.rand(2, 3, 32, 32, dtype=torch.float64)
    variance = model.features.norm0.running_var.clone()
    trained = explain(model.train(), x)
    same(trained, explain(model.eval(), x))
    assert torch.equal(model.features.norm0.running_var, variance)


@pytest.mark.parametrize("target", ["all", Top(2), torch.tensor([[0, 2], [1, 2]])])
def test_several_classes_leave_statistics_alone(target):
    config = DenseNetConfig(flavor="v2", growth=2, blocks=(1, 1), stem_width=4, num_classes=3)
    model = randomize(create_model(config)).double().train()
    before, x = snapshot(model), torch.rand(2, 3, 32, 32, dtype=torch.float64)
    found = explain(model, x, target, "ixg")
    assert snapshot(model) == before
    torch.testing.assert_close(found.map, explain(model.eval(), x, target, "ixg").map)
    torch.testing.assert_close(found.logits, model(x).detach())


@dataclasses.dataclass(frozen=True)
class OneClass(Explainer):
    """Explains one class at a time, exactly."""

    def __call__(self, model, images, target=None):
        return Inherent()(model, images, target)


def test_several_classes_of_a_method_for_one_keep_all_fields(model, images):
    found, expected = (explain(model, images, Top(2), way) for way in (OneClass(), "inherent"))
    same(found, expected)
    assert found.bias == expected.bias != 0
    assert (found.completeness_error() < 1e-9).all()


def test_threads_that_explain_and_predict_get_the_serial_results(model):
    inputs = [torch.rand(2, 3, 16, 16, dtype=torch.float64) for _ in range(8)]
    maps = [explain(model, x, 2).map for x in inputs]
    logits = [model(x).detach() for x in inputs]
    grads = []
    for x in inputs:
        x = x.clone().requires_grad_()
        grads.append(torch.autograd.grad(model(x).sum(), x)[0])
    wrong, barrier = [], threading.Barrier(8)

    def work(i: int) -> None:
        barrier.wait()
        for _ in range(6):
            x = inputs[i].clone().requires_grad_()
            # An unfrozen gradient in between would show a flag that leaks.
            (grad,) = torch.autograd.grad(model(x).sum(), x)
            if not (
                torch.allclose(explain(model, inputs[i], 2).map, maps[i], rtol=1e-9)
                and torch.allclose(model(inputs[i]), logits[i], rtol=1e-9)
                and torch.allclose(grad, grads[i], rtol=1e-9)
            ):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_nested_views(model, images):
    encoded = model.encoding(images)

    def gradient(m: nn.Module) -> torch.Tensor:
        x = encoded.clone().requires_grad_()
        return torch.autograd.grad(m.from_encoded(x)[:, 1].sum(), x)[0]

    expected = explain(model, images, 1).weights
    unfrozen = gradient(model)
    with explaining(model) as outer:
        with explaining(model) as inner, explaining(outer) as innermost:
            torch.testing.assert_close(gradient(inner), expected)
            torch.testing.assert_close(gradient(innermost), expected)
            torch.testing.assert_close(explain(outer, images, 1).weights, expected)
        torch.testing.assert_close(gradient(outer), expected)
        assert torch.equal(gradient(model), unfrozen)
    assert torch.equal(gradient(model), unfrozen)


@pytest.mark.parametrize("head", [BcosLinear(12, 7), Linear(12, 7), nn.Linear(12, 7)])
def test_replaced_head_is_explained(model, images, head):
    explain(model, images)
    model.head = copy.deepcopy(head).double()
    result = explain(model, images, "all")
    assert result.map.shape[1] == 7
    torch.testing.assert_close(result.logit, model(images))
    assert (result.completeness_error() < 1e-9).all()
    if isinstance(head, nn.Linear):
        expected = model.logit.scale * model.head.bias.detach().expand(4, -1)
        torch.testing.assert_close(result.residual, expected)
        assert type(model.head) is type(head)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_under_grad_modes(model, images, context):
    expected = explain(model, images)
    with context():
        same(explain(model, images), expected)
        fresh = images.clone()  # made in this mode: an inference tensor in inference_mode
        same(explain(model, fresh), expected)


def test_model_made_in_inference_mode(images):
    with torch.inference_mode():
        model = randomize(create_model(small_config())).double().eval()
    assert (explain(model, images).completeness_error() < 1e-9).all()


def test_under_autocast():
    model, x = create_model(small_config(logit_bias=0.0)).eval(), torch.rand(2, 3, 16, 16)
    exact = explain(model, x, 1)
    with torch.autocast("cpu", torch.bfloat16):
        narrow = explain(model, x, 1)
        # bfloat16 has three digits.
        torch.testing.assert_close(narrow.logit, model(x)[:, 1].detach(), rtol=0.03, atol=0)
    assert narrow.map.dtype == torch.float32
    # A few winners of MaxOut change; the explanation is that of the narrow computation.
    assert 0 < (narrow.weights - exact.weights).norm() < 0.2 * exact.weights.norm()
    assert (narrow.completeness_error() < 0.02 * narrow.map.abs().sum((1, 2))).all()


@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")
@pytest.mark.parametrize("how", ["wrapped", "in place"])
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_after_compile(model, images, how, backend):
    expected = explain(model, images, 1)
    logits = model(images)
    compiled = model
    if how == "wrapped":
        compiled = torch.compile(model, backend=backend)
    else:
        model.compile(backend=backend)
    torch.testing.assert_close(compiled(images), logits)
    same(explain(compiled, images, 1), expected)
    torch.testing.assert_close(compiled(images), logits)


def test_a_view_can_be_compiled(model, images):
    """No flag is looked up at run time, so the frozen graph is captured whole."""
    # Other tests of this process have compiled the same functions for other models.
    torch._dynamo.reset()
    view = torch.compile(frozen_view(model), backend="aot_eager", fullgraph=True)
    x = model.encoding(images).requires_grad_()
    compiled = torch.compile(view.from_encoded, backend="aot_eager", fullgraph=True)
    (grad,) = torch.autograd.grad(compiled(x)[:, 1].sum(), x)
    torch.testing.assert_close(grad, explain(model, images, 1).weights)


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies(model, images, clone):
    expected = explain(model, images)
    twin = clone(model)
    same(explain(twin, images), expected)
    assert not any(getattr(module, "frozen", False) for module in twin.modules())


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # by torch.compile
@pytest.mark.parametrize(
    "change",
    [
        lambda method: method,
        lambda method: torch.compile(method, backend="eager"),
    ],
    ids=["itself", "compiled"],
)
def test_methods_that_are_stored_on_objects_are_frozen_too(model, images, change):
    """They are bound to the model's own layers, whose gradients also sum to the logit."""
    expected = explain(model, images, 1)
    for block in model.blocks:
        block.forward = change(block.forward)
        block.mlp.forward = change(block.mlp.forward)
    same(explain(model, images, 1), expected)
    assert model.blocks[0].forward is not None
    torch.testing.assert_close(model(images)[:, 1], expected.logit)


def test_functions_in_place_of_a_forward_are_refused_over_frozen_layers(model, images):
    original = model.blocks[0].mlp.forward
    model.blocks[0].mlp.forward = lambda x: original(x)
    with pytest.raises(ValueError, match=r"BcosMLP at 'blocks.0.mlp' has a forward .*of a class"):
        explain(model, images)


def test_view_shares_tensors_and_follows_training(model, images):
    view = frozen_view(model)
    assert {id(p) for p in view.parameters()} == {id(p) for p in model.parameters()}
    with torch.no_grad():
        model.head.weight.copy_(torch.randn_like(model.head.weight))
    torch.testing.assert_close(view(images), model(images))


def test_shared_modules_stay_shared(model):
    model.blocks[1] = model.blocks[0]
    view = frozen_view(model)
    assert view.blocks[0] is view.blocks[1]


def test_users_hooks_run_in_the_explanation(model, images):
    """A hook may change what the model computes; the explanation must follow."""
    model.head.register_forward_hook(lambda module, inputs, output: 2 * output)
    result = explain(model, images, "all")
    torch.testing.assert_close(result.logit, model(images))
    assert (result.completeness_error() < 1e-9).all()


@pytest.mark.parametrize(
    "foreign", [nn.GELU(), nn.BatchNorm1d(12), nn.Conv2d(3, 3, 1), nn.MultiheadAttention(12, 3)]
)
def test_layers_that_are_not_dynamic_linear_are_refused(model, images, foreign):
    model.head = nn.Sequential(foreign, model.head)
    with pytest.raises(ValueError, match=rf"{type(foreign).__name__} at 'head.0'"):
        explain(model, images)


def test_conventional_models_have_no_inherent_explanation(images):
    model = create_model(small_config(family="conventional"))
    with pytest.raises(ValueError, match="not a B-cos model"):
        explain(model, images.float())


def test_single_class_and_zero_bias():
    model = randomize(create_model(small_config(num_classes=1, logit_bias=0.0))).double()
    x = torch.rand(3, 3, 16, 16, dtype=torch.float64)
    result = explain(model, x)
    assert (result.target == 0).all()
    assert result.bias == 0.0
    assert (result.completeness_error() < 1e-9).all()
    assert explain(model, x, "all").map.shape == (3, 1, 16, 16)


@pytest.mark.parametrize("flavor", ["v1", "v2"])
def test_stand_alone_densenet(flavor):
    config = DenseNetConfig(flavor=flavor, growth=2, blocks=(1, 1), stem_width=4, num_classes=3)
    model = randomize(create_model(config)).double()
    result = explain(model, torch.rand(2, 3, 32, 32, dtype=torch.float64), "all")
    assert (result.residual == 0).all()
    scale = (result.logit - result.bias).abs()
    assert (result.completeness_error() < 1e-9 * scale).all()


def test_half_precision_model():
    model = randomize(create_model(small_config())).to(torch.bfloat16).eval()
    result = explain(model, torch.rand(2, 3, 16, 16, dtype=torch.bfloat16))
    assert result.map.isfinite().all()
    # Sums of contributions need more digits than the model has; the tolerance is still its own.
    assert result.map.dtype == torch.float32
    assert result.computed_in == torch.bfloat16
    missing = dataclasses.replace(result, map=result.map * 1.04)
    assert incompleteness(dataclasses.replace(missing, computed_in=None)) is not None
    assert incompleteness(missing) is None


@pytest.mark.parametrize(
    ("how", "dtype", "photo", "tolerance"),
    [
        ("cast", torch.float16, "rocket", 5e-4),
        ("cast", torch.bfloat16, "chelsea", 1.5e-3),
        ("autocast", torch.bfloat16, "chelsea", 1.5e-3),
    ],
)
def test_contributions_meet_the_logit_in_half_precision(how, dtype, photo, tolerance):
    """Rounding between products missed it by 2e-3 of these photographs' logits."""
    model = load()
    x = model.transform(Image.open(PHOTOS / f"{photo}.jpg").convert("RGB")).unsqueeze(0)
    if how == "cast":
        found = explain(model.to(dtype), x.to(dtype))
    else:
        with torch.autocast("cpu", dtype):
            found = explain(model, x)
    assert (found.completeness_error() < tolerance * found.logit.abs()).all()


def test_a_sample_that_overflows_float16_leaves_the_others_their_digits():
    small = torch.tensor([3e-4, 100.0], dtype=torch.float16).view(2, 1, 1, 1)
    x = torch.ones(2, 1, 1, 1, dtype=torch.float16, requires_grad=True)
    logits, probe = (x * small * small).flatten(1), torch.ones(2, requires_grad=True)
    for seed in (torch.ones_like(logits), torch.ones(2, 2, 1, dtype=torch.float16)):
        rows, _ = _adjoint(logits, seed, x, probe, is_last=False)
        rows = rows[..., 0, 0, 0]
        expected = torch.tensor([9e-8, 1e4]).expand_as(rows)
        torch.testing.assert_close(rows, expected, rtol=1e-2, atol=0)


@pytest.mark.parametrize(
    ("target", "says"),
    [
        (5, "target 5 is out of range.*0 to 4"),
        (-1, "target -1 is out of range"),
        ("cat", "no class 'cat'.*0 to 4"),
        (1.0, "not a class"),
        (True, "not a class"),
        (torch.tensor([0.0, 1, 2, 3]), "not a class"),
        (torch.tensor([0, 1]), r"shape \[2\]"),
        (torch.tensor([0, 1, 2, 7]), "target 7 is out of range"),
    ],
)
def test_bad_targets(model, images, target, says):
    with pytest.raises(ValueError, match=says):
        explain(model, images, target)


@pytest.mark.parametrize(
    ("images", "says"),
    [
        (torch.rand(2, 6, 16, 16), r"shape \[2, 6, 16, 16\], expected \[B, 3, H, W\]"),
        (torch.rand(3, 16, 16), "add a batch axis"),
        (torch.rand(0, 3, 16, 16), "empty"),
        (torch.rand(2, 3, 32, 32), "32×32.*16×16.*resize_prior"),
        (torch.full((2, 3, 16, 16), float("nan")), "NaN"),
        (2 * torch.ones(2, 3, 16, 16), r"\[2, 2\], allowed is \[0, 1\]"),
        (torch.rand(2, 3, 16, 16) - 1, r"allowed is \[0, 1\]"),
        (torch.zeros(2, 3, 16, 16, dtype=torch.uint8), "dtype torch.uint8"),
        ([[1.0]], "must be a tensor"),
    ],
)
def test_bad_images(images, says):
    for family in ("bcos", "conventional"):
        with pytest.raises(ValueError, match=says):
            create_model(small_config(family=family))(images)
    if says in ("add a batch axis", "must be a tensor"):
        # `explain` takes single pictures and lists of them, too.
        says = "no picture"
        images = [[1.0]]
    with pytest.raises(ValueError, match=says):
        explain(create_model(small_config()), images)


def test_attribution_without_residual_claims_nothing(model, images):
    import dataclasses

    bare = dataclasses.replace(explain(model, images), residual=None)
    with pytest.raises(ValueError, match="completeness"):
        bare.completeness_error()


def test_tiny_densenet_hybrid_is_complete_in_float32():
    model = randomize(create_model(tiny_config(logit_bias=0.0))).eval()
    result = explain(model, torch.rand(2, 3, 32, 32))
    assert (result.completeness_error() <= 1e-4 * result.logit.abs()).all()


def test_rows_of_w_do_not_vanish_in_float16():
    """Scaled so far down that float16 alone would round every row to zero."""
    tame = {"gain": 2.0, "prior_gain": 2.0}
    model = create_model(small_config(logit_bias=0.0, logit_scale=1e-9, **tame)).eval()
    x = torch.rand(2, 3, 16, 16)
    exact = explain(model, x, 1)
    with torch.autocast("cpu", torch.float16):
        narrow = explain(model, x, 1, strict=True)
    both = (narrow.map.flatten(1) / 1e-9, exact.map.flatten(1) / 1e-9)
    assert (torch.cosine_similarity(*both) > 0.95).all()
