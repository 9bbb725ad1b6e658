"""Loss, clipping, averages and optimizer against slow or hand-made references."""

import math
from typing import ClassVar

import pytest
import torch
from torch import nn

from bcosvit import create_model, load
from bcosvit.data.sources import open_source
from bcosvit.data.transforms import EvalTransform
from bcosvit.train.callbacks import History
from bcosvit.train.checkpoints import read_checkpoint
from bcosvit.train.data import Batch
from bcosvit.train.losses import LOSSES, BinaryCrossEntropy, Loss, register_loss
from bcosvit.train.task import Task, clip_adaptively
from tests.conftest import tiny_config
from tests.train.support import DATA, model_config, recipe, rows, train

TORCHS_OWN_WARNING = pytest.mark.filterwarnings(
    "ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"
)


def test_losses_are_the_papers():
    logits, labels = torch.randn(4, 8, dtype=torch.float64), torch.tensor([0, 7, 3, 3])
    batch = Batch(torch.empty(4, 0), labels, torch.ones(4))
    bce, ce = (LOSSES.get(name)()(logits, batch) for name in ("bce", "ce"))
    for sample in range(4):
        scores = logits[sample].tolist()
        own = [1 / (1 + math.exp(-score)) for score in scores]
        logs = [math.log(p if label == labels[sample] else 1 - p) for label, p in enumerate(own)]
        assert bce[sample].item() == pytest.approx(-sum(logs) / 8)
        total = sum(math.exp(score) for score in scores)
        assert ce[sample].item() == pytest.approx(
            -math.log(math.exp(scores[labels[sample]]) / total)
        )


def test_adaptive_clipping_against_a_slow_reference():
    generator = torch.Generator().manual_seed(0)
    shapes = [(5, 7), (4, 3, 2, 2), (2, 6, 6), (9,), (3, 4)]
    parameters = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
    parameters[-1].data.zero_()
    for number, parameter in enumerate(parameters):
        scale = 10.0 ** torch.randint(-4, 2, (len(parameter),), generator=generator)
        gradient = torch.randn(parameter.shape, generator=generator)
        parameter.grad = gradient * scale.view(-1, *[1] * (parameter.ndim - 1))
        if number == 0:
            parameter.grad[2] = 0
    frozen = nn.Parameter(torch.ones(3))
    expected = [slow_clip(parameter, 0.01) for parameter in parameters]
    clip_adaptively([*parameters, frozen], 0.01)
    assert frozen.grad is None
    for parameter, reference in zip(parameters, expected, strict=True):
        torch.testing.assert_close(parameter.grad, reference)


def slow_clip(parameter: nn.Parameter, limit: float) -> torch.Tensor:
    """Brock et al. 2021, Eq. 3, unit by unit, number by number."""
    clipped = parameter.grad.clone()
    units = range(len(parameter)) if parameter.ndim > 1 else [slice(None)]
    for unit in units:
        weight = math.sqrt(sum(w * w for w in parameter[unit].flatten().tolist()))
        gradient = math.sqrt(sum(g * g for g in parameter.grad[unit].flatten().tolist()))
        if gradient > 0 and gradient / max(weight, 1e-3) > limit:
            clipped[unit] = limit * max(weight, 1e-3) / gradient * parameter.grad[unit]
    return clipped


def test_clipping_by_norm_is_lightnings(monkeypatch):
    task = Task(create_model(model_config()), recipe(clip="norm", clip_value=0.5), 4)
    asked = []
    monkeypatch.setattr(task, "clip_gradients", lambda *args: asked.append(args))
    optimizer = torch.optim.Adam(task.parameters())
    task.configure_gradient_clipping(optimizer)
    assert asked == [(optimizer, 0.5, "norm")]


def test_only_what_learns_goes_to_the_optimizer():
    network = create_model(tiny_config())
    optimizer = Task(network, recipe(), 4).configure_optimizers()["optimizer"]
    (group,) = optimizer.param_groups
    assert not any(p.requires_grad for p in network.tokenizer.backbone.parameters())
    learning = [p for p in network.parameters() if p.requires_grad]
    assert [id(p) for p in group["params"]] == [id(p) for p in learning]
    assert (group["betas"], group["weight_decay"]) == ((0.9, 0.999), 0.0)


def test_features_give_what_images_give():
    network = create_model(tiny_config())
    images = torch.rand(3, 3, 32, 32)
    features = network.tokenizer.backbone(network.encoding(images))
    on_images = Task(network, recipe(), 4)(images)
    on_features = Task(network, recipe(), 4, inputs="features")(features)
    torch.testing.assert_close(on_images, on_features)


class Recorder(History):
    """The trained weights after every step."""

    weights: ClassVar[list[torch.Tensor]] = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        self.weights.append(pl_module.model.head.weight.detach().clone())


def test_the_average_is_exponential_and_is_what_is_validated_and_saved(tmp_path, monkeypatch):
    monkeypatch.setattr("bcosvit.train.run.History", Recorder)
    run = train(DATA, out=tmp_path / "run", model=model_config(), recipe=recipe(epochs=1))
    average = Recorder.weights[0]
    for weight in Recorder.weights[1:]:
        average = 0.9 * average + (1 - 0.9) * weight
    checkpoint = read_checkpoint(run.folder / "last.ckpt")
    trained = checkpoint["current_model_state"]["model.head.weight"]
    assert torch.equal(trained, Recorder.weights[-1])
    torch.testing.assert_close(checkpoint["state_dict"]["model.head.weight"], average)
    saved = load(run.weights)
    torch.testing.assert_close(saved.head.weight.data, average)
    right = 0
    val = open_source(DATA).val.with_transform(EvalTransform(16))
    for image, label, _ in val:
        right += saved(image[None]).argmax().item() == label
    assert run.accuracy == pytest.approx(right / len(val))


def test_metrics_count_weighted_samples_only():
    task = Task(create_model(model_config()), recipe(), 4)
    task.log = lambda *args, **kwargs: None
    batch = Batch(
        torch.rand(4, 3, 16, 16), torch.tensor([0, 1, 2, 3]), torch.tensor([1.0, 1, 1, 0])
    )
    task.validation_step(batch, 0)
    logits = task(batch.inputs)
    right = (logits.argmax(1) == batch.labels)[:3].float().mean()
    torch.testing.assert_close(task.val_means["top1"].compute(), right)
    losses = task.loss(logits, batch)[:3].mean()
    torch.testing.assert_close(task.val_means["loss"].compute(), losses)


def test_a_run_that_diverges_says_so_and_saves_nothing_of_it(tmp_path, monkeypatch):
    original = BinaryCrossEntropy.__call__
    monkeypatch.setattr(BinaryCrossEntropy, "__call__", lambda *args: original(*args) * math.nan)
    with pytest.raises(ValueError, match=r"diverged.*epoch 1"):
        train(DATA, out=tmp_path / "run", model=model_config(), recipe=recipe())
    assert not (tmp_path / "run" / "last.ckpt").exists()


@pytest.mark.parametrize(
    "changes",
    [
        {"precision": "bf16", "channels_last": True},
        pytest.param({"compile": True}, marks=[pytest.mark.slow, TORCHS_OWN_WARNING]),
    ],
    ids=str,
)
def test_ways_to_compute_train_alike(tmp_path, changes):
    train(DATA, out=tmp_path / "one", model=model_config(), recipe=recipe(epochs=1))
    train(DATA, out=tmp_path / "two", model=model_config(), recipe=recipe(epochs=1, **changes))
    one, two = rows(tmp_path / "one")[0], rows(tmp_path / "two")[0]
    tolerance = 0.05 if "precision" in changes else 1e-4
    assert one["val_loss"] == pytest.approx(two["val_loss"], rel=tolerance)


class Distillation(Loss):
    """Imitates a teacher, less and less."""

    def __init__(self) -> None:
        self.epochs: list[float] = []

    def setup(self, model, device) -> None:
        self.teacher = create_model(model.config).to(device)
        for parameter in self.teacher.parameters():
            torch.nn.init.zeros_(parameter)

    def before_step(self, model, epoch) -> None:
        self.share = 1 - epoch / 2
        self.epochs.append(epoch)

    def __call__(self, logits, batch):
        with torch.no_grad():
            wanted = self.teacher(batch.inputs)
        return self.share * (logits - wanted).square().mean(1)


def test_a_loss_may_hold_a_teacher_and_follow_a_schedule(tmp_path, monkeypatch):
    monkeypatch.setattr(LOSSES, "_items", dict(LOSSES.items()))
    used = []
    register_loss("imitation")(lambda: used.append(Distillation()) or used[-1])
    ways = recipe(epochs=2, loss="imitation", accumulate_grad_batches=2)
    run = train(DATA, out=tmp_path / "run", model=model_config(), recipe=ways)
    # Four steps per epoch of two batches each, at their middles.
    # The last one: a few steps are measured with another before.
    assert used[-1].epochs == [(step // 2 + 0.5) / 4 for step in range(16)]
    assert run.rows[1]["train_loss"] < run.rows[0]["train_loss"]
    saved = read_checkpoint(run.folder / "last.ckpt")["state_dict"]
    assert saved.keys() == Task(create_model(model_config()), recipe(), 4).state_dict().keys()
