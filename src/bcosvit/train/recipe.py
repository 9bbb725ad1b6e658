"""How a model is trained, as data: everything but the model, the pictures and the machines.

A recipe means the same on one core and on many machines: ``batch_size`` is that of all processes
together, and what a sample looks like in an epoch depends on the seed, the epoch and the sample
alone. The recipes that we stand behind are the literal dict ``RECIPES``.
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from bcosvit.models.config import ModelConfig, StemConfig

Loss = Literal["bce", "ce"]
Schedule = Literal["step", "cosine"]
Precision = Literal["32", "bf16", "fp16"]
Clipping = Literal["none", "norm", "adaptive"]


def _refuse(name: str, value: object, allowed: str) -> None:
    raise ValueError(f"{name} = {value!r} is not allowed: {allowed}.")


def _check_int(name: str, value: object, *, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        _refuse(name, value, f"give an integer >= {least}")


def _check_float(
    name: str,
    value: object,
    *,
    least: float = -math.inf,
    over: float = -math.inf,
    most: float = math.inf,
) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    # The chain is false for nan as well.
    if not (number and over < value and least <= value <= most):  # type: ignore[operator]
        bounds = f"> {over:g}" if over > -math.inf else f">= {least:g}"
        bounds += f" and <= {most:g}" if most < math.inf else ""
        _refuse(name, value, f"give a number {bounds}")


def _check_pair(name: str, value: object) -> None:
    numbers = isinstance(value, tuple) and all(isinstance(part, int | float) for part in value)
    if not numbers or len(value) != 2:  # type: ignore[arg-type]
        _refuse(name, value, "give two numbers, e.g. (1, 2)")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One way to train; ``--set key=value`` on the command line changes a field."""

    loss: Loss = "bce"
    """``bce``: binary cross-entropy on sigmoids, one-hot targets; ``ce``: softmax cross-entropy.
    Both are means over samples, ``bce`` over classes too."""
    epochs: int = 100
    batch_size: int = 256
    """Samples per optimizer step, over all devices and accumulated batches."""
    accumulate: int = 1
    """Batches per optimizer step on each device: memory for time, at the same result."""

    learning_rate: float = 2.5e-4
    """Of Adam; the peak, under ``cosine``."""
    betas: tuple[float, float] = (0.9, 0.999)
    adam_eps: float = 1e-8
    """What Adam adds to a gradient's size before it divides by it."""
    weight_decay: float = 0.0
    schedule: Schedule = "step"
    """``step``: constant, a tenth after ``drop_after``; ``cosine``: down to ``final_lr``."""
    drop_after: float = 0.6
    """Share of the epochs before a ``step`` schedule drops."""
    warmup_epochs: float = 0.0
    """Linear rise from zero, under either schedule; part of ``epochs``."""
    final_lr: float = 0.0
    """Where ``cosine`` ends."""

    clip: Clipping = "none"
    """``norm``: all gradients' joint norm; ``adaptive``: each unit's, relative to its weights'."""
    clip_value: float = 0.01
    """The largest norm, or the largest share of the weights' norm (Brock et al. 2021: 0.01)."""
    ema: float | None = None
    """Decay per step of the averaged weights that are validated and saved; ``None``: no average."""

    image_size: int | None = None
    """Side in pixels; ``None``: what the model is made for (a DenseNet on its own: 224)."""
    rand_augment: tuple[int, int] | None = (2, 9)
    """Number and strength of random operations."""
    crop: tuple[float, float] = (0.08, 1.0)
    """Smallest and largest share of a picture's area that a training crop may have."""
    flip: float = 0.5
    """Probability of mirroring."""
    eval_crop: float = 224 / 256
    """Share of the short side that the center crop keeps in validation."""
    val_fraction: float = 0.1
    """Share of each class set aside for validation where the data have no such split."""
    max_skipped: float = 0.01
    """Share of the pictures that may be unreadable before the run stops."""

    train_backbone: bool | None = None
    """Whether the tokenizer's backbone learns; ``None``: as the model's config says."""
    cache_views: int = 0
    """Augmented views per picture that a frozen backbone sees once, its features being kept on
    disk (see `cache`); 0: no cache. Augmentations then repeat every so many epochs."""
    cache_gigabytes: float = 50.0
    """What the cache may take of the disk, training and validation together."""
    cache_folder: str | None = None
    """Where it lies: runs on the same backbone, pictures and seed may share one. ``None``: in the
    run's folder."""
    cache_on_device: bool | None = None
    """Whether cached features are kept in the memory of each training device, at the same result
    without loading; ``None``: on a GPU where they take at most 60 % of what is free."""
    pictures_on_device: bool = False
    """Whether pictures are decoded once, kept as bytes in the memory of each training device, and
    cropped and mirrored there (see `on_device`); needs ``rand_augment=None``."""
    precision: Precision = "32"
    """``bf16``, ``fp16``: mixed precision."""
    channels_last: bool = False
    compile: bool = False
    """Whether ``torch.compile`` makes the training step."""
    graphs: bool = False
    """Whether a CUDA GPU captures the kernels of a step once and replays them, at the same
    result: small models then train several times as fast."""

    checkpoint_epochs: int = 1
    """Epochs between checkpoints."""
    checkpoint_steps: int | None = None
    """Optimizer steps between further checkpoints within an epoch; ``None``: none."""
    picture_every: int = 5
    """Epochs between pictures of contributions; 0: none."""
    workers: int = 4
    """Processes per device that read pictures; the result does not depend on it."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("betas", "rand_augment", "crop"):
            if isinstance(value := getattr(self, name), list):
                object.__setattr__(self, name, tuple(value))
        # `--set precision=32` arrives as a number.
        object.__setattr__(self, "precision", str(self.precision))
        for name in ("epochs", "batch_size", "accumulate", "checkpoint_epochs"):
            _check_int(name, getattr(self, name), least=1)
        for name in ("picture_every", "workers", "seed", "cache_views"):
            _check_int(name, getattr(self, name), least=0)
        for name in ("image_size", "checkpoint_steps"):
            if getattr(self, name) is not None:
                _check_int(name, getattr(self, name), least=1)
        for name in ("learning_rate", "adam_eps", "clip_value", "cache_gigabytes"):
            _check_float(name, getattr(self, name), over=0)
        for name in ("weight_decay", "final_lr", "warmup_epochs"):
            _check_float(name, getattr(self, name), least=0)
        for name in ("drop_after", "flip", "val_fraction", "max_skipped"):
            _check_float(name, getattr(self, name), least=0, most=1)
        _check_float("eval_crop", self.eval_crop, over=0, most=1)
        if self.ema is not None:
            _check_float("ema", self.ema, over=0, most=1)
        for name, allowed in {
            "loss": get_args(Loss),
            "schedule": get_args(Schedule),
            "precision": get_args(Precision),
            "clip": get_args(Clipping),
            "channels_last": (True, False),
            "compile": (True, False),
            "graphs": (True, False),
            "train_backbone": (True, False, None),
            "cache_on_device": (True, False, None),
            "pictures_on_device": (True, False),
        }.items():
            if getattr(self, name) not in allowed:
                _refuse(name, getattr(self, name), f"choose from {', '.join(map(str, allowed))}")
        for name in ("betas", "crop", "rand_augment"):
            if (pair := getattr(self, name)) is not None:
                _check_pair(name, pair)
        if self.batch_size % self.accumulate:
            _refuse(
                "accumulate",
                self.accumulate,
                f"it must divide batch_size = {self.batch_size}",
            )
        if self.graphs and (self.compile or self.accumulate > 1):
            _refuse("graphs", True, "it needs compile=False and accumulate=1")
        if self.pictures_on_device and (self.rand_augment is not None or self.cache_views):
            _refuse("pictures_on_device", True, "it needs rand_augment=None and cache_views=0")
        if self.warmup_epochs >= self.epochs:
            _refuse(
                "warmup_epochs",
                self.warmup_epochs,
                f"the run has only {self.epochs} epochs; give fewer warm-up epochs, or more epochs",
            )
        if self.final_lr > self.learning_rate:
            _refuse("final_lr", self.final_lr, f"give at most learning_rate = {self.learning_rate}")

    def rate_at(self, epoch: float) -> float:
        """The learning rate at a point of the run, e.g. 1.5 in the middle of the second epoch."""
        if epoch < self.warmup_epochs:
            return self.learning_rate * epoch / self.warmup_epochs
        if self.schedule == "step":
            dropped = epoch >= self.drop_after * self.epochs
            return self.learning_rate / 10 if dropped else self.learning_rate
        done = (epoch - self.warmup_epochs) / (self.epochs - self.warmup_epochs)
        swing = (self.learning_rate - self.final_lr) / 2
        return self.final_lr + swing * (1 + math.cos(math.pi * min(done, 1.0)))


QUICK_MODEL = ModelConfig(
    width=64,
    num_heads=4,
    depth=3,
    image_size=(48, 48),
    num_classes=8,
    backbone=StemConfig(widths=(16, 32, 64)),
    # Three blocks do not grow activations as twelve do: the paper's scales would leave logits
    # that nothing can be learned from in minutes.
    prior_gain=3.0,
    logit_scale=1.0,
)
"""What ``quick`` trains where no model is named: 36 tokens, 0.34 million parameters."""


TINY_EPS = 1e-15
"""For B-cos models at the paper's scales. Their logits are scaled down by 10³, and ``bce`` is a
mean over classes: in a fresh bcos_vit_ti_38 with 1000 of them half of all gradients are below
3·10⁻¹⁰, and with Adam's usual 10⁻⁸ those weights would hardly move."""


RECIPES: Mapping[str, Recipe] = {
    # The paper's B-cos ViTs (SPEC 6.1), on a frozen, pretrained backbone:
    #   bcosvit train imagenet/ --recipe paper-bcos --model bcos_vit_s_38 \
    #       --init backbone.safetensors --out runs/bcos_vit_s_38
    # Time and accuracy on ImageNet: not measured here.
    "paper-bcos": Recipe(
        loss="bce",
        epochs=100,
        batch_size=256,
        learning_rate=2.5e-4,
        adam_eps=TINY_EPS,
        schedule="step",
        drop_after=0.6,
        rand_augment=(2, 9),
    ),
    # The paper's conventional ViTs (SPEC 6.1), likewise:
    #   bcosvit train imagenet/ --recipe paper-conventional --model vit_s_38 \
    #       --init densenet121.pth --out runs/vit_s_38
    # Time and accuracy on ImageNet: not measured here.
    "paper-conventional": Recipe(
        loss="ce",
        epochs=100,
        batch_size=1024,
        learning_rate=2.5e-4,
        schedule="step",
        drop_after=0.6,
        rand_augment=(2, 9),
    ),
    # A tokenizer's backbone from scratch, by the longer schedule of the public B-cos code:
    #   bcosvit train imagenet/ --recipe paper-backbone --model bcos_densenet121 \
    #       --out runs/backbone
    # Time and accuracy on ImageNet: not measured here.
    "paper-backbone": Recipe(
        loss="bce",
        epochs=200,
        batch_size=128,
        learning_rate=1e-3,
        adam_eps=TINY_EPS,
        schedule="cosine",
        warmup_epochs=10,
        final_lr=1e-4,
        rand_augment=None,
    ),
    # A B-cos ViT for some thousand photographs, on a frozen backbone:
    #   bcosvit train photos/ --recipe small-bcos --model bcos_vit_ti_87 --set model.maxout=1 \
    #       --set model.backbone=v2 --init bcos_densenet121_imagenette --out runs/photos
    # On Imagenette (9,469 photographs) 88.9 %: the model that ships. About a minute on an H200 with
    # precision=bf16, pictures_on_device=True, graphs=True. The rate is the best of 1e-4, 3e-4 and
    # 1e-3 on a tenth of the training photographs.
    "small-bcos": Recipe(
        loss="bce",
        epochs=18,
        batch_size=128,
        learning_rate=3e-4,
        adam_eps=TINY_EPS,
        schedule="cosine",
        warmup_epochs=2,
        final_lr=1e-6,
        rand_augment=None,
    ),
    # A small B-cos ViT (`QUICK_MODEL`) from scratch:
    #   bcosvit train "scenes?size=48" --recipe quick --out runs/quick
    # Under 2 minutes on 2 cores; 99 % validation accuracy, and 5 times as much positive
    # contribution on the object as its area would get (benchmarks/quick.py).
    "quick": Recipe(
        loss="bce",
        epochs=8,
        batch_size=32,
        learning_rate=2e-3,
        schedule="cosine",
        warmup_epochs=1,
        final_lr=1e-4,
        rand_augment=None,
        crop=(0.6, 1.0),
        eval_crop=1.0,
        workers=0,
    ),
}


def find_recipe(name: str, **settings: Any) -> Recipe:
    """The recipe of that name with some fields changed."""
    if name not in RECIPES:
        raise ValueError(f"There is no recipe {name!r}; choose from {', '.join(RECIPES)}.")
    return change(RECIPES[name], **settings)


def change(recipe: Recipe, **settings: Any) -> Recipe:
    """``recipe`` with some fields changed."""
    fields = [field.name for field in dataclasses.fields(Recipe)]
    for key in settings:
        if key not in fields:
            raise ValueError(f"Recipes have no field {key!r}; they have {', '.join(fields)}.")
    return dataclasses.replace(recipe, **settings)
