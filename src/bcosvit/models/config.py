"""What a model is, as data that is written into every weights file and every run.

Fields that are not given take the default of their family or flavor when the config is made, so
that a stored config says everything.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeVar, get_args

from bcosvit.nn.attention import AttentionKind
from bcosvit.nn.linear import check_bcos

Family = Literal["bcos", "conventional"]
Flavor = Literal["v1", "v2", "conventional"]
Position = Literal["none", "emb", "add", "mul"]
Activation = Literal["sigmoid", "softmax"]

NUMBERS = (
    *("mlp_ratio", "b", "attention_b", "gain", "prior_gain", "feature_scale"),
    *("logit_scale", "logit_bias", "eps"),
)
"""Fields of a `ModelConfig` that need not be whole."""

FROM_FAMILY: Any = None
"""The default of fields that are resolved in ``__post_init__``; no config ever holds it."""

LOGIT_BIAS = math.log(0.01 / 0.99)
"""The paper's (Sec. C.1): before any evidence a class has a probability of 1 %."""

OLD_FIELDS = {"heads": "num_heads", "flavour": "flavor"}
"""Names of fields in files of version 0.1, with the names that replaced them."""

C = TypeVar("C", bound="Config")


@dataclass(frozen=True)
class FeatureInfo:
    """What the feature maps of a model are like, with the interface of timm's ``feature_info``."""

    modules: tuple[str, ...]
    """The module at the end of each stage."""
    widths: tuple[int, ...]
    reductions: tuple[int, ...]
    """How many pixels of the image one position covers along a side, per stage."""

    def channels(self) -> list[int]:
        """The channels of each stage."""
        return list(self.widths)

    def reduction(self) -> list[int]:
        """The reduction of each stage."""
        return list(self.reductions)

    def module_name(self) -> list[str]:
        """The name of each stage's last module."""
        return list(self.modules)


@dataclass(frozen=True, kw_only=True)
class Config:
    """What every config knows about its model; subclasses describe one kind of model each.

    A subclass has ``family`` as a field or a property, and may have ``image_size`` as a field.
    """

    num_classes: int = 1000
    logit_scale: float = FROM_FAMILY
    """The factor on the last layer's output."""
    logit_bias: float = FROM_FAMILY
    """The logit before any evidence."""

    noun: ClassVar[str] = "model"
    """What the kind of model is called in a sentence."""

    @property
    def family(self) -> Family:
        """``"bcos"`` where the model explains itself, else ``"conventional"``."""
        raise NotImplementedError

    @property
    def activation(self) -> Activation:
        """What makes probabilities of logits; B-cos models are trained with sigmoids."""
        return "sigmoid" if self.family == "bcos" else "softmax"

    @property
    def image_size(self) -> tuple[int, int]:
        """Height and width of the images that the model takes; 224 where it takes any."""
        return (224, 224)

    @property
    def grid(self) -> tuple[int, int] | None:
        """Rows and columns of tokens; None for models that have none."""
        return None

    @property
    def feature_info(self) -> FeatureInfo:
        """What ``bcosvit.features`` returns for the model."""
        raise ValueError(f"A {self.noun} has no stages that bcosvit knows.")

    @property
    def title(self) -> str:
        """The heading of the model card, e.g. "B-cos ViT, 192 wide, 12 blocks, on a DenseNet"."""
        return f"{self._family_name} {self.noun}"

    def describe(self) -> str:
        """Describes the model in words.

        Examples:
            >>> DenseNetConfig(num_classes=10).describe()
            'B-cos DenseNet, 10 classes, 224×224 pixels'
        """
        height, width = self.image_size
        name = f"{self._family_name} {self.noun}"
        return f"{name}, {self.num_classes} classes, {height}×{width} pixels"

    @property
    def _family_name(self) -> str:
        return "B-cos" if self.family == "bcos" else "Conventional"

    def replace(self: C, **changes: Any) -> C:
        """A config with other values; a logit bias that followed from them follows the new ones.

        Raises:
            ValueError: A field does not exist, or a value is not allowed.

        Examples:
            >>> dense = DenseNetConfig(flavor="v2", num_classes=11)
            >>> round(dense.logit_bias, 2), round(dense.replace(num_classes=101).logit_bias, 2)
            (-2.3, -4.61)
        """
        self.check_fields(changes)
        if dataclasses.replace(self, logit_bias=FROM_FAMILY) == self:
            changes.setdefault("logit_bias", FROM_FAMILY)
        return dataclasses.replace(self, **changes)

    @classmethod
    def fields(cls) -> list[str]:
        """The names of all options; ``image_size`` is one where the size has to be chosen."""
        return [field.name for field in dataclasses.fields(cls)]

    @classmethod
    def check_fields(cls, values: Iterable[str], name: str = "The model") -> None:
        """Raises ``ValueError`` where there is no field of one of these names."""
        allowed = cls.fields()
        for value in values:
            if value not in allowed:
                raise ValueError(f"{name} has no option {value!r}; it has {', '.join(allowed)}.")

    def values(self) -> dict[str, Any]:
        """All fields as plain values for JSON or YAML."""
        return dataclasses.asdict(self)

    @classmethod
    def from_values(cls: type[C], values: Mapping[str, Any]) -> C:
        """The config that wrote these ``values``, also where version 0.1 did."""
        return cls(**_renamed(values))


@dataclass(frozen=True, kw_only=True)
class DenseNetConfig(Config):
    """A DenseNet, as a tokenizer's backbone or on its own.

    ``num_classes`` and what follows from it belong to the classifier, which a backbone lacks.

    Examples:
        >>> DenseNetConfig(flavor="v2").width_at(2)
        512
    """

    noun: ClassVar[str] = "DenseNet"

    flavor: Flavor = "v1"
    """``v1``: the paper's; ``v2``: the later public models'; ``conventional``: torchvision's."""
    growth: int = 32
    blocks: tuple[int, ...] = (6, 12, 24, 16)
    """Layers per dense block; the default is DenseNet-121."""
    stem_width: int = 64
    bottleneck: int = 4
    """Width of a layer's 1×1 convolution, in multiples of ``growth``."""

    def __post_init__(self) -> None:
        _check_choice("backbone flavor", self.flavor, get_args(Flavor))
        object.__setattr__(self, "blocks", _several(self.blocks))
        for name in ("growth", "stem_width", "bottleneck", "num_classes"):
            _check_positive(name, getattr(self, name))
        if not self.blocks or not all(map(_is_positive, self.blocks)):
            raise ValueError(f"blocks = {self.blocks} is not allowed: give >= 1 layer per block.")
        scale, bias = {
            "v1": (1e-3, LOGIT_BIAS),
            # 1/n for each of n classes; a lone class starts undecided.
            "v2": (1.0, -math.log(max(self.num_classes - 1, 1))),
            "conventional": (1.0, 0.0),
        }[self.flavor]
        _resolve(self, logit_scale=scale, logit_bias=bias)
        for name in ("logit_scale", "logit_bias"):
            _check_number(name, getattr(self, name))

    @property
    def family(self) -> Family:
        return "conventional" if self.flavor == "conventional" else "bcos"

    @property
    def title(self) -> str:
        return f"{super().title}, flavor {self.flavor}"

    @property
    def feature_info(self) -> FeatureInfo:
        blocks = range(1, len(self.blocks) + 1)
        return FeatureInfo(
            modules=tuple(f"features.denseblock{block}" for block in blocks),
            widths=tuple(self.width_at(block) for block in blocks),
            reductions=tuple(2 ** (1 + block) for block in blocks),
        )

    def width_at(self, tap: int) -> int:
        """Channels of dense block ``tap``'s output (counted from 1), before the transition."""
        width = self.stem_width
        for block, layers in enumerate(self.blocks[:tap], start=1):
            width += layers * self.growth
            if block < tap:
                width //= 2
        return width

    def convolutions_at(self, tap: int) -> int:
        """How many convolutions lead to that output: 13, 38, 87 in a DenseNet-121."""
        return 1 + 2 * sum(self.blocks[:tap]) + tap - 1


@dataclass(frozen=True, kw_only=True)
class StemConfig:
    """A few 3×3 convolutions of stride 2 in place of a DenseNet: small models from scratch."""

    widths: tuple[int, ...] = (32, 64)
    gain: float = 100.0
    """f in γ = f/√c of the stem's B-cos convolutions."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "widths", _several(self.widths))
        if not self.widths or not all(map(_is_positive, self.widths)):
            raise ValueError(f"widths = {self.widths} is not allowed: give positive channels.")


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Config):
    """A vision transformer on a convolutional tokenizer, B-cos or conventional.

    Examples:
        >>> config = ModelConfig(width=384, num_heads=6, num_classes=10)
        >>> config.position, config.maxout, config.grid
        ('mul', 2, (14, 14))
    """

    noun: ClassVar[str] = "vision transformer"

    family: Family = "bcos"
    width: int = 192
    num_heads: int = 3
    depth: int = 12
    """Transformer blocks."""
    mlp_ratio: float = 4.0
    position: Position = FROM_FAMILY
    """Positional information; default ``mul`` (B-cos), ``emb`` (conventional)."""
    attention: AttentionKind = FROM_FAMILY
    """Default ``shifted`` (B-cos), ``standard`` (conventional)."""
    maxout: int = FROM_FAMILY
    """Units per output of every B-cos transform but the head; default 2."""
    b: float = 2.0
    attention_b: float = 2.0
    """B in the value and output projections of ``shifted`` attention."""
    backbone: DenseNetConfig | StemConfig = FROM_FAMILY
    """Default: DenseNet-121 of flavor ``v1`` (B-cos) or ``conventional``; a flavor's name means
    DenseNet-121 of that flavor."""
    tap: int = 3
    """Tokens come from this dense block's output: 1, 2, 3 = 13, 38, 87 convolutions."""
    patch: int = FROM_FAMILY
    """Kernel and stride of the tokens' convolution; default 4, 2, 1 for taps 1, 2, 3."""
    train_backbone: bool = FROM_FAMILY
    """Default: a DenseNet is frozen, a stem is trained."""
    image_size: tuple[int, int] = (224, 224)
    """Height and width; an int means a square."""
    gain: float = FROM_FAMILY
    """f in γ = f/√c (the paper's Sec. C.1); default 15, 20, 25 at width 192, 384, 768, which is 5
    more per doubling, never below 5."""
    prior_gain: float = 10.0
    """Further factor on ``gain`` with ``mul``, whose products of two attentions decay faster."""
    feature_scale: float = FROM_FAMILY
    """Factor on the backbone's features; default 10³ for a B-cos DenseNet, else 1."""
    eps: float = 1e-6

    def __post_init__(self) -> None:
        _check_choice("family", self.family, get_args(Family))
        bcos = self.family == "bcos"
        size = self.image_size
        pair = tuple(size) if isinstance(size, list | tuple) else (size, size)
        object.__setattr__(self, "image_size", pair)
        for name in ("width", "tap"):
            _check_positive(name, getattr(self, name))
        backbone = self.backbone or ("v1" if bcos else "conventional")
        if isinstance(backbone, str):
            backbone = DenseNetConfig(flavor=backbone)  # type: ignore[arg-type]
            object.__setattr__(self, "backbone", backbone)
        dense = isinstance(backbone, DenseNetConfig)
        _resolve(
            self,
            position="mul" if bcos else "emb",
            attention="shifted" if bcos else "standard",
            maxout=2 if bcos else 1,
            patch={1: 4, 2: 2}.get(self.tap, 1) if dense else 1,
            train_backbone=not dense,
            gain=max(5.0, 15 + 5 * math.log2(self.width / 192)),
            feature_scale=1e3 if bcos and dense else 1.0,
            logit_scale=1e-3 if bcos else 1.0,
            logit_bias=LOGIT_BIAS if bcos else 0.0,
        )
        self._check()

    def _check(self) -> None:
        _check_choice("position", self.position, get_args(Position))
        _check_choice("attention", self.attention, get_args(AttentionKind))
        for name in NUMBERS:
            _check_number(name, getattr(self, name))
        check_bcos(self.b, self.maxout)
        check_bcos(self.attention_b, self.maxout)
        for name in ("num_heads", "depth", "patch", "num_classes"):
            _check_positive(name, getattr(self, name))
        if self.width * self.mlp_ratio < 1:
            raise ValueError(
                f"mlp_ratio = {self.mlp_ratio} is not allowed: it leaves no unit of a width of "
                f"{self.width}; give 1 or more."
            )
        if len(self.image_size) != 2 or not all(map(_is_positive, self.image_size)):
            raise ValueError(
                f"image_size = {self.image_size} is not allowed: give pixels, or (height, width)."
            )
        if self.width % self.num_heads:
            raise ValueError(
                f"width = {self.width} cannot be split into {self.num_heads} heads; "
                f"give a width that is a multiple of num_heads."
            )
        if self.family == "conventional":
            for name, allowed in {"attention": "standard", "maxout": 1, "b": 2.0}.items():
                if (value := getattr(self, name)) != allowed:
                    raise ValueError(
                        f"{name} = {value!r} does not exist in the conventional family, which has "
                        f"no B-cos layers; leave it at {allowed!r} or use family='bcos'."
                    )
        if isinstance(self.backbone, DenseNetConfig):
            if not 1 <= self.tap <= len(self.backbone.blocks):
                raise ValueError(
                    f"tap = {self.tap} is not allowed: the backbone has dense blocks 1 to "
                    f"{len(self.backbone.blocks)}."
                )
            if self.backbone.family != self.family:
                raise ValueError(
                    f"backbone flavor {self.backbone.flavor!r} does not fit the {self.family} "
                    f"family; use {'v1 or v2' if self.family == 'bcos' else 'conventional'}."
                )
        if min(self.grid) < 1:
            raise ValueError(
                f"image_size = {self.image_size} is too small: no token is left of it; "
                f"give at least {self.min_size} pixels a side."
            )

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of tokens."""
        return self.grid_of(*self.image_size)

    @property
    def title(self) -> str:
        backbone = "a convolutional stem" if isinstance(self.backbone, StemConfig) else "a DenseNet"
        return f"{self._family_name} ViT, {self.width} wide, {self.depth} blocks, on {backbone}"

    @property
    def feature_info(self) -> FeatureInfo:
        stem = self.backbone
        halvings = len(stem.widths) if isinstance(stem, StemConfig) else 1 + self.tap
        return FeatureInfo(
            modules=tuple(f"blocks.{block}" for block in range(self.depth)),
            widths=(self.width,) * self.depth,
            reductions=(2**halvings * self.patch,) * self.depth,
        )

    def values(self) -> dict[str, Any]:
        values = super().values()
        values["backbone"]["kind"] = "stem" if isinstance(self.backbone, StemConfig) else "densenet"
        return values

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> "ModelConfig":
        backbone = _renamed(values["backbone"])
        kind = {"stem": StemConfig, "densenet": DenseNetConfig}[backbone.pop("kind")]
        return cls(**{**_renamed(values), "backbone": kind(**backbone)})

    def grid_of(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of tokens that an image of this size is cut into."""
        return self._tokens_along(height), self._tokens_along(width)

    def _tokens_along(self, pixels: int) -> int:
        halvings = len(self.backbone.widths) if isinstance(self.backbone, StemConfig) else 2
        for _ in range(halvings):
            pixels = (pixels + 1) // 2
        if isinstance(self.backbone, DenseNetConfig):
            pixels //= 2 ** (self.tap - 1)
        return pixels // self.patch

    @property
    def min_size(self) -> int:
        """The fewest pixels a side that still make a token."""
        return next(pixels for pixels in itertools.count(1) if self._tokens_along(pixels))

    @property
    def layer_gain(self) -> float:
        """f of the transformer's layers, the prior's factor included."""
        return self.gain * (self.prior_gain if self.position == "mul" else 1.0)


def _renamed(values: Mapping[str, Any]) -> dict[str, Any]:
    return {OLD_FIELDS.get(name, name): value for name, value in values.items()}


def _resolve(config: object, **defaults: Any) -> None:
    for name, default in defaults.items():
        if getattr(config, name) is None:
            object.__setattr__(config, name, default)


def _check_choice(what: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{what} = {value!r} is not allowed: choose from {', '.join(allowed)}.")


def _several(values: Any) -> tuple[Any, ...]:
    return tuple(values) if isinstance(values, list | tuple) else (values,)


def _is_positive(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _check_number(what: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{what} = {value!r} is not allowed: give a number.")


def _check_positive(what: str, value: object) -> None:
    if not _is_positive(value):
        raise ValueError(f"{what} = {value!r} is not allowed: give an integer >= 1.")
