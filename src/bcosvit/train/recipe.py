"""Recipes: how a model is trained, as data, and the recipes that are registered by name.

A recipe holds everything but the model, the images and the devices. It means the same on one CPU
core and on many machines: ``batch_size`` counts the samples of all processes together, and the
augmentation of a sample depends on the seed, the epoch and the sample alone.
"""

import dataclasses
import math
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from bcosvit.messages import counted, unknown
from bcosvit.models.config import Config, ModelConfig, StemConfig
from bcosvit.registry import Registry
from bcosvit.shipped import DEFAULT
from bcosvit.train.losses import LOSSES

Schedule = Literal["step", "cosine"]
Precision = Literal["32", "bf16", "fp16"]
Clipping = Literal["none", "norm", "adaptive"]

RENAMED_FIELDS = {
    "workers": "num_workers",
    "graphs": "cuda_graphs",
    "accumulate": "accumulate_grad_batches",
    "picture_every": "explain_every",
    "pictures_on_device": "images_on_device",
}
"""Former names of fields, which records of older runs contain."""


_MAY_BE_ZERO = frozenset({"explain_every", "localize_every", "num_workers", "seed", "cache_views"})
"""Integers that need not be positive."""
_POSITIVE = frozenset(
    {"learning_rate", "adam_eps", "clip_value", "cache_gigabytes", "eval_crop", "ema"}
    | {"checkpoint_minutes"}
)
"""Numbers that may not be zero."""
_SHARES = frozenset(
    {"drop_after", "flip", "mixup", "fade_until", "val_fraction", "max_skipped", "eval_crop", "ema"}
)
"""Numbers that may not exceed one."""


def _refuse(name: str, value: object, allowed: str) -> None:
    raise ValueError(f"{name} = {value!r} is not allowed: {allowed}.")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _check(name: str, value: Any, hint: Any) -> None:
    """Refuses a value that does not fit the type of its field, or that is out of bounds."""
    kinds = get_args(hint) if isinstance(hint, UnionType) else (hint,)
    kind = kinds[0]
    if value is None and NoneType in kinds:
        return
    if kind is bool or get_origin(kind) is Literal:
        allowed = get_args(kind) or (True, False)
        if value not in allowed:
            _refuse(name, value, f"choose from {', '.join(map(str, allowed))}")
    elif get_origin(kind) is tuple:
        number = int if int in get_args(kind) else int | float
        fits = isinstance(value, tuple) and len(value) == 2 and all(map(_is_number, value))
        if not (fits and all(isinstance(each, number) for each in value)):
            what = "integers" if number is int else "numbers"
            _refuse(name, value, f"give two {what}, e.g. (1, 2)")
    elif kind is int:
        least = 0 if name in _MAY_BE_ZERO else 1
        if not _is_number(value) or not isinstance(value, int) or value < least:
            _refuse(name, value, f"give an integer >= {least}")
    elif kind is float:
        positive, most = name in _POSITIVE, 1.0 if name in _SHARES else math.inf
        # The comparison is false for nan as well.
        if not (_is_number(value) and 0 <= value <= most and not (positive and value == 0)):
            bounds = ("> 0" if positive else ">= 0") + (" and <= 1" if most == 1 else "")
            _refuse(name, value, f"give a number {bounds}")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How to train. On the command line, ``--set key=value`` changes a field.

    Raises:
        ValueError: A field has a value that is not allowed; the message says which are.

    Examples:
        >>> recipe = Recipe(epochs=10, schedule="cosine", warmup_epochs=1)
        >>> recipe.lr_at(0.5) == recipe.learning_rate / 2
        True
    """

    loss: str = "bce"
    """A registered loss. ``bce``: binary cross-entropy on sigmoids with one-hot targets, averaged
    over samples and classes; ``ce``: softmax cross-entropy, averaged over samples; ``auto``: that
    of the two which fits the model's probabilities;
    ``distillation``: imitates ``teacher``."""
    teacher: str | None = None
    """Weights of the model that ``distillation`` imitates: a path, or the name of a shipped model;
    ``None``: those that the run starts from."""
    label_weight: float = 0.0
    """Weight of the labels in ``distillation``."""
    fade_until: float | None = None
    """Share of the run over which the constants of a converted model (`bcosvit.bcosify`) fade to
    zero and its exponent rises from 1 to ``b``; ``None``: both stay. Only later epochs can be the
    best."""
    b: float = 2.0
    """The exponent that a converted model ends with."""
    epochs: int = 100
    batch_size: int = 256
    """Samples per optimizer step, over all devices and accumulated batches."""
    accumulate_grad_batches: int | None = None
    """Batches per optimizer step on each device. More batches take less memory and more time, and
    give the same result. ``None``: as few as the memory allows (see `resources`)."""

    learning_rate: float = 2.5e-4
    """Learning rate of Adam; its highest value under ``cosine``."""
    betas: tuple[float, float] = (0.9, 0.999)
    adam_eps: float = 1e-8
    """Epsilon of Adam."""
    weight_decay: float = 0.0
    schedule: Schedule = "step"
    """``step``: constant, then a tenth after ``drop_after``; ``cosine``: decays to ``final_lr``."""
    drop_after: float = 0.6
    """Share of the epochs after which a ``step`` schedule drops."""
    warmup_epochs: float = 0.0
    """Epochs of linear warm-up from zero, under either schedule; they are part of ``epochs``."""
    final_lr: float = 0.0
    """Last learning rate of ``cosine``."""

    clip: Clipping = "none"
    """``norm``: clips the joint norm of all gradients; ``adaptive``: clips the gradient of each
    unit relative to its weights (Brock et al. 2021)."""
    clip_value: float = 0.01
    """Largest norm, or largest share of the norm of the weights (Brock et al.: 0.01)."""
    ema: float | None = None
    """Decay per step of the averaged weights, which are then validated and saved; ``None``: no
    average. While constants fade (``fade_until``), the average is the newest weights."""

    image_size: int | None = None
    """Side in pixels; ``None``: the model's own (224 for a DenseNet)."""
    rand_augment: tuple[int, int] | None = (2, 9)
    """Number and strength of RandAugment's operations; ``None``: no RandAugment."""
    crop: tuple[float, float] = (0.08, 1.0)
    """Smallest and largest share of an image's area that a training crop may have."""
    flip: float = 0.5
    """Probability of a horizontal flip."""
    mixup: float = 0.0
    """Share of the training images that are mixed with another one of their batch, which makes up
    at most half of the result. Which images are mixed depends on how batches are divided among
    processes and ``accumulate_grad_batches``."""
    eval_crop: float = 224 / 256
    """Share of the short side that the center crop keeps in validation."""
    val_fraction: float = 0.1
    """Share of each class that is set aside for validation where the data have no such split."""
    max_skipped: float = 0.01
    """Share of the images that may be unreadable before the run stops."""

    head_only: bool = False
    """Whether only the head is trained, the model's last layer with weights. What the head takes is
    cached, so that it needs ``cache_views``."""
    train_backbone: bool | None = None
    """Whether the tokenizer's backbone is trained; ``None``: as the model's config says."""
    cache_views: int | None = 0
    """Augmented views per image whose backbone features, or with ``head_only`` whose inputs to the
    head, are computed once and cached on disk (see `feature_cache`); augmentations then repeat
    after so many epochs. 0: no cache; ``None``: 3, or as many as the disk has room for."""
    cache_gigabytes: float = 50.0
    """Largest size of the cache on disk, training and validation together."""
    cache_folder: str | None = None
    """Folder of the cache; runs with the same backbone, images and seed may share one. ``None``:
    in the run's folder."""
    cache_on_device: bool | None = None
    """Whether cached features are copied to the memory of each training device, which gives the
    same result without loading; ``None``: on a GPU where they take at most 60 % of what is free."""
    images_on_device: bool = False
    """Whether images are decoded once, held as bytes in the memory of each training device, and
    cropped and flipped there (see `device_images`); needs ``rand_augment=None``."""
    precision: Precision = "32"
    """``bf16``, ``fp16``: mixed precision."""
    channels_last: bool = False
    compile: bool = False
    """Whether the training step is compiled by ``torch.compile``."""
    cuda_graphs: bool = False
    """Whether a training step is recorded as a CUDA graph and replayed, at the same result; small
    models then train several times as fast."""

    checkpoint_epochs: int = 1
    """Epochs between checkpoints."""
    checkpoint_steps: int | None = None
    """Optimizer steps between further checkpoints within an epoch; ``None``: none."""
    checkpoint_minutes: float | None = None
    """Minutes after which a further checkpoint is written within an epoch; ``None``: never."""
    explain_every: int = 5
    """Epochs between images of contributions; 0: none."""
    localize_every: int = 0
    """Epochs between measurements of where the inherent explanations of some validation images
    point: the grid pointing game and, where the data have masks, energy in the mask. 0: none."""
    num_workers: int | None = None
    """Processes per device that load images; the result does not depend on it. ``None``: by the
    number of processor cores (see `resources`)."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("betas", "rand_augment", "crop"):
            if isinstance(value := getattr(self, name), list):
                object.__setattr__(self, name, tuple(value))
        # `--set precision=32` arrives as a number, and paths may be objects.
        for name in ("precision", "loss", "teacher", "cache_folder"):
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, str(value))
        LOSSES.get(self.loss)
        for name, hint in get_type_hints(Recipe).items():
            _check(name, getattr(self, name), hint)
        self._check_combinations()

    def _check_combinations(self) -> None:
        parts = self.accumulate_grad_batches or 1
        if self.batch_size % parts:
            _refuse(
                "accumulate_grad_batches", parts, f"it must divide batch_size = {self.batch_size}"
            )
        if self.cuda_graphs and (self.compile or parts > 1):
            _refuse("cuda_graphs", True, "it needs compile=False and accumulate_grad_batches=1")
        if self.images_on_device and (self.rand_augment is not None or self.cache_views != 0):
            _refuse("images_on_device", True, "it needs rand_augment=None and cache_views=0")
        if self.head_only and self.cache_views == 0:
            _refuse("head_only", True, "what the head takes is cached; it needs cache_views >= 1")
        if getattr(LOSSES.get(self.loss), "needs_teacher", False) and self.cache_views != 0:
            _refuse("cache_views", self.cache_views, "a teacher needs images; it needs 0")
        for name, decays in {"betas": self.betas, "ema": (self.ema or 0.0,)}.items():
            if not all(0 <= decay < 1 for decay in decays):
                _refuse(name, getattr(self, name), "a decay is a number >= 0 and < 1")
        if self.b < 1:
            _refuse("b", self.b, "give a number >= 1")
        if self.warmup_epochs >= self.epochs:
            _refuse(
                "warmup_epochs",
                self.warmup_epochs,
                f"the run has only {counted(self.epochs, 'epoch')}; give fewer warm-up epochs, or "
                f"more epochs",
            )
        if self.final_lr > self.learning_rate:
            _refuse("final_lr", self.final_lr, f"give at most learning_rate = {self.learning_rate}")

    def change(self, **settings: Any) -> "Recipe":
        """Returns a copy with some fields changed.

        Args:
            **settings: New values by the names of their fields.

        Raises:
            ValueError: A field does not exist, or its value is not allowed.

        Examples:
            >>> Recipe().change(epochs=3).epochs
            3
        """
        fields = [field.name for field in dataclasses.fields(Recipe)]
        for key in settings:
            if key in RENAMED_FIELDS:
                raise ValueError(f"The recipe's field {key!r} is now called {RENAMED_FIELDS[key]}.")
            if key not in fields:
                raise ValueError(unknown("recipe field", key, fields))
        return dataclasses.replace(self, **settings)

    def lr_at(self, epoch: float) -> float:
        """Returns the learning rate at a point of the run, e.g. 1.5 in the middle of the second
        epoch."""
        if epoch < self.warmup_epochs:
            return self.learning_rate * epoch / self.warmup_epochs
        if self.schedule == "step":
            dropped = epoch >= self.drop_after * self.epochs
            return self.learning_rate / 10 if dropped else self.learning_rate
        done = (epoch - self.warmup_epochs) / (self.epochs - self.warmup_epochs)
        swing = (self.learning_rate - self.final_lr) / 2
        return self.final_lr + swing * (1 + math.cos(math.pi * min(done, 1.0)))


@dataclass(frozen=True, kw_only=True)
class RegisteredRecipe:
    """A recipe with what a user needs to know to choose it."""

    name: str
    recipe: Recipe
    summary: str
    """What it is for, in a few words."""
    command: str
    """The command that it is made for."""
    time: str | None = None
    """How long the command takes; ``None``: not measured."""
    result: str | None = None
    """What the command reaches; ``None``: not measured."""
    model: Config | None = None
    """What is trained where no model is named; ``None``: a model has to be named."""
    init: str | None = None
    """The weights that training starts from where neither these nor a model are named."""


RECIPES: Registry[RegisteredRecipe] = Registry(kind="recipe", group="bcosvit.recipes")
"""All recipes by name; help texts and completion list them."""


def register_recipe(name: str, recipe: Recipe, **about: Any) -> RegisteredRecipe:
    """Registers a recipe, so that ``bcosvit train --recipe`` and `train` find it by its name.

    Args:
        name: The name.
        recipe: The recipe.
        **about: ``summary`` and ``command`` and, where known, ``time``, ``result``, ``model`` and
            ``init``, as in `RegisteredRecipe`.

    Returns:
        The registered recipe.

    Raises:
        ValueError: There is another recipe of this name.

    Examples:
        >>> mine = register_recipe(
        ...     "doctest-night",
        ...     Recipe(epochs=300, schedule="cosine"),
        ...     summary="overnight runs",
        ...     command="bcosvit train photos/ --recipe doctest-night --out runs/night",
        ... )
        >>> get_recipe("doctest-night", epochs=200).epochs
        200
    """
    registered = RegisteredRecipe(name=name, recipe=recipe, **about)
    # An equal recipe may be registered again, as after reloading its module.
    return RECIPES.register(name, origin=repr(registered))(registered)


def get_recipe(name: str, **settings: Any) -> Recipe:
    """Returns a registered recipe.

    Args:
        name: Its name; ``RECIPES.names()`` lists all names.
        **settings: Fields to change.

    Raises:
        ValueError: There is no such recipe, or a setting is not allowed.

    Examples:
        >>> get_recipe("paper-bcos", epochs=30).batch_size
        256
    """
    return RECIPES.get(name).recipe.change(**settings)


BCOS_ADAM_EPS = 1e-15
"""Adam's epsilon for B-cos models at the paper's scales. Their logits are scaled down by 10³, and
``bce`` is a mean over classes: in a fresh bcos_vit_ti_38 with 1000 classes half of all gradients
are below 3·10⁻¹⁰, and with Adam's default of 10⁻⁸ those weights would hardly move."""

QUICK_MODEL = ModelConfig(
    width=64,
    num_heads=4,
    depth=3,
    image_size=(48, 48),
    num_classes=8,
    backbone=StemConfig(widths=(16, 32, 64)),
    # Three blocks do not grow activations as twelve do: with the paper's scales the logits would be
    # too small to learn from in minutes.
    prior_gain=3.0,
    logit_scale=1.0,
)
"""The model of the recipe ``quick``: 36 tokens, 0.34 million parameters."""

register_recipe(
    "paper-bcos",
    Recipe(
        loss="bce",
        epochs=100,
        batch_size=256,
        learning_rate=2.5e-4,
        adam_eps=BCOS_ADAM_EPS,
        schedule="step",
        drop_after=0.6,
        rand_augment=(2, 9),
    ),
    summary="the paper's B-cos ViTs, on a frozen pretrained backbone",
    command="bcosvit train imagenet/ --recipe paper-bcos --model bcos_vit_s_38 "
    "--init backbone.safetensors --out runs/bcos_vit_s_38",
)
register_recipe(
    "paper-conventional",
    Recipe(
        loss="ce",
        epochs=100,
        batch_size=1024,
        learning_rate=2.5e-4,
        schedule="step",
        drop_after=0.6,
        rand_augment=(2, 9),
    ),
    summary="the paper's conventional ViTs, on a frozen pretrained backbone",
    command="bcosvit train imagenet/ --recipe paper-conventional --model vit_s_38 "
    "--init densenet121.pth --out runs/vit_s_38",
)
register_recipe(
    "paper-backbone",
    # The longer schedule of the B-cos authors' public code.
    Recipe(
        loss="bce",
        epochs=200,
        batch_size=128,
        learning_rate=1e-3,
        adam_eps=BCOS_ADAM_EPS,
        schedule="cosine",
        warmup_epochs=10,
        final_lr=1e-4,
        rand_augment=None,
    ),
    summary="the backbone of a tokenizer, from scratch",
    command="bcosvit train imagenet/ --recipe paper-backbone --model bcos_densenet121 "
    "--out runs/backbone",
)
register_recipe(
    "transfer",
    # Of the learning rates 1e-3, 3e-3 and 1e-2 this one is the best for a head of Caltech-101.
    Recipe(
        loss="auto",
        epochs=30,
        batch_size=64,
        learning_rate=1e-2,
        adam_eps=BCOS_ADAM_EPS,
        schedule="cosine",
        warmup_epochs=1,
        final_lr=1e-5,
        rand_augment=None,
        crop=(0.35, 1.0),
        head_only=True,
        cache_views=None,
        explain_every=30,
    ),
    summary="your own classes on a trained model, whose head alone is trained; some hundred "
    "photographs are enough",
    command="bcosvit train photos/ --recipe transfer --out runs/photos",
    init=DEFAULT,
)
register_recipe(
    "small-bcos",
    # Of the learning rates 1e-4, 3e-4 and 1e-3 this one is the best on a tenth of the training
    # photographs.
    Recipe(
        loss="bce",
        epochs=18,
        batch_size=128,
        learning_rate=3e-4,
        adam_eps=BCOS_ADAM_EPS,
        schedule="cosine",
        warmup_epochs=2,
        final_lr=1e-6,
        rand_augment=None,
    ),
    summary="a B-cos ViT for some thousand photographs, on a frozen backbone",
    command="bcosvit train imagenette/ --recipe small-bcos --model bcos_vit_ti_87 "
    "--set model.maxout=1 --set model.backbone=v2 --init bcos_densenet121_imagenette "
    "--set precision=bf16 --set images_on_device=True --set cuda_graphs=True --out runs/imagenette",
    time="about a minute on an H200",
    result="88.9 % on Imagenette (9,469 photographs); the model that ships with this package",
)
register_recipe(
    "bcosify",
    # Rate, betas and ramp of an EfficientNet-lite2 that was distilled from itself.
    Recipe(
        loss="distillation",
        epochs=30,
        batch_size=256,
        learning_rate=1e-3,
        betas=(0.9, 0.99),
        schedule="cosine",
        warmup_epochs=0.5,
        final_lr=1e-5,
        fade_until=0.35,
        ema=0.996,
        rand_augment=None,
        crop=(0.3, 1.0),
        mixup=0.5,
        localize_every=2,
        checkpoint_minutes=5.0,
    ),
    summary="a converted network (bcosvit bcosify) to a B-cos network, taught by the original",
    command="bcosvit train photos/ --recipe bcosify --init converted.safetensors "
    "--out runs/bcosified",
)
register_recipe(
    "quick",
    Recipe(
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
        num_workers=0,
    ),
    summary="small models from scratch, in minutes",
    command='bcosvit train "scenes?size=48" --recipe quick --out runs/quick',
    time="under 2 minutes on 2 CPU cores",
    result="99 % validation accuracy, and 5 times as much positive contribution on the object as "
    "its area would get (benchmarks/quick.py)",
    model=QUICK_MODEL,
)
