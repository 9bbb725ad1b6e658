"""Every post-hoc method: against slow references, batches, targets, and that nothing lingers."""

import gc
import subprocess
import sys

import numpy as np
import pytest
import torch

from bcosvit import create_model, explain, explainers
from bcosvit.attribution import (
    METHODS,
    Attribution,
    Explainer,
    Top,
    base,
    describe_method,
    explain_all,
    method_title,
    passes,
)
from bcosvit.attribution.attention import Rfem, Rollout, observe
from bcosvit.attribution.gradient import IntegratedGradients
from bcosvit.attribution.sampling import Occlusion, SmoothGrad
from bcosvit.models import DenseNetConfig
from tests.attribution.test_inherent import snapshot
from tests.conftest import randomize, small_config, tiny_config
from tests.reference import attention as slow

FAMILIES = ["bcos", "conventional"]
CASES = [
    (family, method)
    for family in FAMILIES
    for method in explainers(create_model(small_config(family=family)))
]


def make(family: str = "bcos", **options):
    # Tame gains: random weights at the paper's would make every map a matter of rounding.
    gains = {"gain": 2.0, "prior_gain": 2.0} if family == "bcos" else {}
    model = create_model(small_config(family=family, **gains, **options))
    return randomize(model).double().eval()


@pytest.fixture
def five() -> torch.Tensor:
    return torch.rand(5, 3, 16, 16, dtype=torch.float64)


def test_all_methods_of_the_paper_are_listed():
    named = {"finatt", "rollout", "gradsam", "gradcam", "intgrad", "ixg", "cheferlrp", "plrp"}
    ours = {"inherent", "libragrad", "rfem", "exact-linear", "smoothgrad", "occlusion", "random"}
    assert named | ours == set(explainers())
    barred = {"cheferlrp", "plrp", "exact-linear"}
    assert set(explainers(make("bcos"))) == set(explainers()) - barred
    assert set(explainers(make("conventional"))) == set(explainers()) - {"inherent"}


@pytest.mark.parametrize(("family", "method"), CASES)
def test_batch_equals_singles_with_targets_that_differ(family, method, five):
    model, target = make(family), torch.tensor([4, 0, 2, 2, 1])
    batch = explain(model, five, target, method)
    assert isinstance(batch, Attribution)
    assert batch.map.shape == (5, 16, 16)
    assert torch.equal(batch.target, target)
    assert not batch.map.requires_grad
    assert batch.map.isfinite().all()
    for i in range(5):
        one = explain(model, five[i : i + 1], int(target[i]), method)
        torch.testing.assert_close(batch.map[i], one.map[0])
        # What is positive of GradCAM's weighted sum may be nothing at all.
        assert batch.map[i].abs().max() > 0 or method == "gradcam"


@pytest.mark.parametrize(("family", "method"), CASES)
def test_default_target_is_the_prediction(family, method, five):
    model = make(family)
    predicted = model(five).argmax(1)
    result = explain(model, five, method=method)
    assert torch.equal(result.target, predicted)
    torch.testing.assert_close(result.map, explain(model, five, predicted, method).map)


@pytest.mark.parametrize(("family", "method"), CASES)
def test_all_classes(family, method, five):
    result = explain(make(family), five[:2], "all", method)
    assert result.map.shape == (2, 5, 16, 16)
    torch.testing.assert_close(result.map[:, 3], explain(make(family), five[:2], 3, method).map)


@pytest.mark.parametrize(("family", "method"), CASES)
def test_nothing_lingers(family, method, five):
    model = make(family).train()
    before = snapshot(model)
    inputs = five[:2].clone()
    with torch.no_grad():
        explain(model, inputs, 1, method)
    with torch.inference_mode():
        explain(model, inputs, 1, method)
    assert snapshot(model) == before
    assert inputs.grad is None
    assert not inputs.requires_grad

    def fail(*_):
        raise RuntimeError("inside")

    hook = model.head.register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="inside"):
        explain(model, inputs, 1, method)
    hook.remove()
    assert all(p.grad is None for p in model.parameters())
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize(("family", "method"), CASES)
def test_many_calls_keep_nothing(family, method):
    """Tensors alive after many calls are those after 5."""
    model = make(family)
    image = torch.rand(1, 3, 16, 16, dtype=torch.float64)
    calls = 50 if method not in ("occlusion", "intgrad", "smoothgrad") else 20
    alive = []
    for call in range(calls):
        explain(model, image, 1, method)
        if call in (4, calls - 1):
            gc.collect()
            alive.append(sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects()))
    assert alive[1] <= alive[0]


@pytest.mark.parametrize("position", ["none", "emb", "add", "mul"])
@pytest.mark.parametrize("family", FAMILIES)
def test_attention_methods_against_slow_references(family, position, five):
    model = make(family, position=position)
    seen = observe(model, five)
    torch.testing.assert_close(seen.logits, model(five))
    target = torch.tensor([4, 0, 2, 2, 1])
    gradients = seen.gradients(target, seen.attentions)
    for i in range(5):
        a = [matrix[i].detach().numpy() for matrix in seen.attentions]
        g = [gradient[i].numpy() for gradient in gradients]
        expected = {
            "finatt": slow.final_attention(a),
            "rollout": slow.rollout(a),
            "rfem": slow.rfem(a),
            "gradsam": slow.grad_sam(a, g),
            "gradcam": slow.grad_cam(a, g),
        }
        for name, value in expected.items():
            scores = METHODS.get(name).scores(seen, target)[i].detach().numpy()
            np.testing.assert_allclose(scores, value, rtol=1e-9, atol=1e-300)
        later = Rollout(start=1).scores(seen, target)[i].detach().numpy()
        np.testing.assert_allclose(later, slow.rollout(a, start=1), rtol=1e-9)
        strict = Rfem(k=2.0).scores(seen, target)[i].detach().numpy()
        np.testing.assert_allclose(strict, slow.rfem(a, k=2.0), rtol=1e-9, atol=1e-300)


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_of_attention_are_right(family):
    """∂logit/∂A by finite differences: A of one layer nudged, everything behind it recomputed."""
    model, image = make(family), torch.rand(1, 3, 16, 16, dtype=torch.float64)
    seen = observe(model, image)
    (gradient,) = seen.gradients(torch.tensor([2]), seen.attentions[-1:])
    attention, tokens = model.blocks[-1].attention, model.position(model.tokens(image))
    tokens = model.blocks[0](tokens)
    step = 1e-6
    with torch.no_grad():
        inputs = tokens if attention.kind == "shifted" else attention.norm(tokens)
        value = attention.split(attention.value(inputs))
        for h, q, k in [(0, 0, 1), (2, 5, 3), (1, 7, 7)]:
            logits = []
            for sign in (1, -1):
                matrix = seen.attentions[-1].detach().clone()
                matrix[0, h, q, k] += sign * step
                mixed = (matrix @ value).transpose(1, 2).flatten(2)
                x = tokens + attention.project(mixed)
                x = model.norm(x + model.blocks[-1].mlp(x))
                logits.append(model.logit(model.head(x.mean(1)))[0, 2])
            slope = (logits[0] - logits[1]) / (2 * step)
            torch.testing.assert_close(gradient[0, h, q, k], slope, rtol=1e-4, atol=1e-8)


def test_observing_leaves_fused_prediction_alone(five, monkeypatch):
    """Ordinary prediction never computes the matrices one by one."""
    from bcosvit.nn import attention

    def forbidden(*_):
        raise AssertionError("an attention matrix was materialized")

    model = make()
    explain(model, five, method="rollout")
    monkeypatch.setattr(attention, "attention_matrix", forbidden)
    model(five)
    explain(model, five)
    with pytest.raises(AssertionError, match="materialized"):
        explain(model, five, method="rollout")


@pytest.mark.parametrize("family", FAMILIES)
def test_gradient_methods_against_captum(family, five):
    captum = pytest.importorskip("captum.attr")
    model, target = make(family), torch.tensor([4, 0, 2, 2, 1])
    encoded = model.encoding(five).requires_grad_()
    ours = explain(model, five, target, "ixg").map
    theirs = captum.InputXGradient(model.from_encoded).attribute(encoded, target=target)
    torch.testing.assert_close(ours, theirs.detach().sum(1))
    ours = explain(model, five, target, "intgrad").map
    theirs = captum.IntegratedGradients(model.from_encoded).attribute(
        encoded, target=target, n_steps=32
    )
    torch.testing.assert_close(ours, theirs.detach().sum(1))


def test_intgrad_in_bounded_memory(five):
    """No pass is larger than asked for, or than the batch; the size of passes does not matter."""
    model, sizes = make(), []
    model.tokenizer.backbone.register_forward_hook(
        lambda module, inputs, out: sizes.append(len(out))
    )
    whole = explain(model, five, 1, IntegratedGradients(at_once=1000)).map
    for at_once, most in {7: 7, 2: 5}.items():
        sizes.clear()
        bounded = IntegratedGradients(at_once=at_once)
        torch.testing.assert_close(explain(model, five, 1, bounded).map, whole)
        # The first is that of the images themselves, for their classes.
        assert max(sizes[1:]) == most
        assert len(sizes) == 1 + -(-5 * 32 // most)


@pytest.mark.parametrize("method", ["intgrad", "occlusion"])
def test_passes_are_as_large_as_free_memory_allows(method, five, monkeypatch):
    model, sizes = make(), []
    model.tokenizer.backbone.register_forward_hook(
        lambda module, inputs, out: sizes.append(len(out))
    )
    plenty = explain(model, five, 1, method).map
    assert max(sizes) == 32
    monkeypatch.setattr(passes, "free_memory", lambda device: 1)
    sizes.clear()
    torch.testing.assert_close(explain(model, five, 1, method).map, plenty, rtol=1e-12, atol=1e-14)
    assert max(sizes[1:]) == 1
    # What one sample stores is measured: with twice the memory twice as many fit.
    chunks = []
    for free in (3_000_000, 6_000_000):
        monkeypatch.setattr(passes, "free_memory", lambda device, free=free: free)
        sizes.clear()
        explain(model, five, 1, method)
        chunks.append(max(sizes[2:]))
    assert chunks[0] < chunks[1]


@pytest.mark.parametrize(
    "method", [IntegratedGradients(at_once=7), SmoothGrad(samples=3), Occlusion(at_once=5)]
)
def test_methods_know_how_many_passes_they_take(method, five):
    counted = []
    with passes.counting_passes(counted.append):
        explain(make(), five[:1], 1, method)
    assert len(counted) > 2
    assert sum(counted) == method.passes(*five.shape[-2:])


def test_every_method_that_takes_many_passes_says_how_many():
    for name, method in base.METHODS.items():
        own = type(method).passes is not base.Explainer.passes
        assert own == (method.cost == "many"), name


def test_a_pass_takes_what_was_estimated():
    """512 kB are stored per sample, which become 768 kB with their gradients."""

    def run():
        x = torch.ones(1, 64_000, dtype=torch.float64, requires_grad=True)
        return x.exp().sum()

    most = passes.CHUNK_BYTES
    assert passes.samples_at_once(run, torch.device("cpu"), most=10**9) == most // 768_000


def test_no_pass_takes_more_than_32_samples_even_if_there_is_room():
    tiny = torch.ones(1, 1, requires_grad=True)
    assert passes.samples_at_once(lambda: tiny.exp().sum(), torch.device("cpu")) == 32


@pytest.mark.slow
@pytest.mark.parametrize("method", ["intgrad", "occlusion"])
def test_one_photograph_takes_at_most_1500_mb(method):
    script = f"""
import torch, bcosvit
from bcosvit.attribution import IntegratedGradients
from bcosvit.attribution.sampling import Occlusion
def peak():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) // 1000 for line in lines if line.startswith("VmHWM"))
torch.set_num_threads(1)
model = bcosvit.create_model("bcos_vit_ti_38", num_classes=2, depth=2).eval()
images = torch.rand(1, 3, 224, 224)
model(images)
before = peak()
few = {{"intgrad": IntegratedGradients(steps=12), "occlusion": Occlusion(stride=1 / 3)}}["{method}"]
bcosvit.explain(model, images, method=few)
print(peak() - before)
"""
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)
    assert 100 < int(done.stdout) < 1500


def test_input_gradient_is_not_the_inherent_explanation(five):
    model = make()
    inherent, ixg = (explain(model, five, 1, method).map for method in ("inherent", "ixg"))
    assert (inherent - ixg).abs().max() > 0.1 * inherent.abs().max()


def test_occlusion_of_a_linear_model_is_its_contributions(five):
    """Where the model is linear, zeroing a window removes what its pixels contribute."""
    from bcosvit.attribution.sampling import Occlusion

    weight = torch.randn(6, 16, 16, dtype=torch.float64)
    encoded = torch.rand(2, 6, 16, 16, dtype=torch.float64)

    def logit(x, samples):
        return (x * weight).sum((1, 2, 3))

    pixelwise = Occlusion(window=1 / 16, stride=1 / 16).scores(encoded, logit)
    torch.testing.assert_close(pixelwise, (encoded * weight).sum(1))


def test_random_maps_differ_between_images_only(five):
    model = make()
    maps = explain(model, five, 0, "random").map
    assert not torch.equal(maps[0], maps[1])
    assert torch.equal(maps, explain(model, five, 3, "random").map)


def test_several_methods_share_one_forward_pass(five):
    model, calls = make(), []
    model.tokenizer.backbone.register_forward_hook(lambda *_: calls.append(1))
    names = ["finatt", "rollout", "rfem", "gradsam", "gradcam"]
    together = explain_all(model, five, 1, names)
    assert len(calls) == 1
    for name in names:
        torch.testing.assert_close(together[name].map, explain(model, five, 1, name).map)


def test_reprs_are_configurations():
    assert repr(METHODS.get("intgrad")) == "IntegratedGradients(steps=32, at_once=None)"
    assert repr(Rollout(start=1)) == "Rollout(start=1)"


def test_what_does_not_apply_says_so(five):
    with pytest.raises(ValueError, match="no method 'grad-cam'"):
        explain(make(), five, method="grad-cam")
    for method in ("cheferlrp", "plrp"):
        with pytest.raises(ValueError, match="no rules for B-cos"):
            explain(make(), five, method=method)
    dense = DenseNetConfig(growth=2, blocks=(1, 1), stem_width=4, num_classes=3)
    model = randomize(create_model(dense)).double()
    big = torch.rand(1, 3, 32, 32, dtype=torch.float64)
    for method in set(explainers()) - set(explainers(model)):
        with pytest.raises(ValueError, match=r"reads attention|for conventional models"):
            explain(model, big, method=method)
    for method in explainers(model):
        assert explain(model, big, method=method).map.shape == (1, 32, 32)
    with pytest.raises(ValueError, match="leaves no layer"):
        explain(make(), five, method=Rollout(start=2))


@pytest.mark.parametrize("flavor", ["v1", "v2", "conventional"])
def test_through_the_densenet_hybrid(flavor):
    family = "conventional" if flavor == "conventional" else "bcos"
    model = randomize(create_model(tiny_config(flavor=flavor, family=family))).double().eval()
    images = torch.rand(2, 3, 32, 32, dtype=torch.float64)
    for method in explainers(model):
        result = explain(model, images, 1, method)
        assert result.map.shape == (2, 32, 32)
        assert result.map.isfinite().all()


def test_occlusion_is_the_mean_over_the_windows_on_a_pixel():
    """Of a linear model with windows of 2×2 at every position: means of sums over windows."""
    from bcosvit.attribution.sampling import Occlusion

    x = torch.rand(1, 1, 4, 4, dtype=torch.float64)
    found = Occlusion(window=1 / 2, stride=1 / 4).scores(x, lambda x, samples: x.sum((1, 2, 3)))
    for i in range(4):
        for j in range(4):
            corners = [(a, b) for a in (i - 1, i) for b in (j - 1, j) if 0 <= a < 3 and 0 <= b < 3]
            sums = [x[0, 0, a : a + 2, b : b + 2].sum() for a, b in corners]
            torch.testing.assert_close(found[0, i, j], sum(sums) / len(sums))


def test_random_maps_do_not_depend_on_the_dtype(model, images):
    # Both dtypes hold these values, and 1 minus them.
    images = (256 * images).floor() / 256
    one = explain(model, images, 0, "random").map
    other = explain(model.float(), images.float(), 0, "random").map
    torch.testing.assert_close(other.double(), one)


@pytest.mark.parametrize(("family", "method"), CASES)
def test_classes_of_one_image_are_those_one_by_one(family, method, five):
    classes = torch.tensor([[3, 0], [1, 4]])
    found = explain(make(family), five[:2], classes, method)
    each = [explain(make(family), five[:2], column, method).map for column in classes.unbind(1)]
    torch.testing.assert_close(found.map, torch.stack(each, 1))
    assert torch.equal(found.target, classes)


def test_methods_describe_themselves_and_others_are_as_by_default():
    for name in METHODS.names():
        assert describe_method(name) is METHODS.get(name)
    assert describe_method("somebody's function") is Explainer
    assert method_title("somebody's function") == "somebody's function"


@pytest.mark.parametrize(("family", "method"), CASES)
def test_maps_are_negative_somewhere_if_they_are_said_to_be_signed(family, method, five):
    maps = explain(make(family), five, "all", method).map
    assert describe_method(method).signed == bool((maps < 0).any())


def test_the_top_is_one_class_unless_said_otherwise(five):
    model = make()
    found = explain(model, five, Top())
    assert torch.equal(found.target[:, 0], model(five).argmax(1))
    assert found.target.shape == (5, 1)
