"""What a model is, as data that is written into every weights file and every run.

Fields that are not given take the default of their family or flavor when the config is made, so
that a stored config says everything.
"""

import bisect
import copy
import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, TypeVar, get_args

from bcosvit.models import taps
from bcosvit.models.limits import (
    LIMITS,
    check_choice,
    check_flag,
    check_number,
    check_positive,
    check_size,
    check_stages,
    check_text,
)
from bcosvit.models.network import Program, check_program
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

    @classmethod
    def of(cls: type[C], **options: Any) -> C:
        """The config with these options, where some may stand for several fields."""
        return cls(**options)

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
        check_choice("backbone flavor", self.flavor, get_args(Flavor))
        object.__setattr__(self, "blocks", _several(self.blocks))
        for name in ("growth", "stem_width", "bottleneck", "num_classes"):
            check_positive(name, getattr(self, name))
        check_stages("blocks", self.blocks, "layers per block")
        scale, bias = {
            # Without norms, signals decay from layer to layer: with a smaller factor all logits of
            # an untrained network are equal to rounding, and it learns nothing.
            "v1": (1e3, LOGIT_BIAS),
            # 1/n for each of n classes; a lone class starts undecided.
            "v2": (1.0, -math.log(max(self.num_classes - 1, 1))),
            "conventional": (1.0, 0.0),
        }[self.flavor]
        _resolve(self, logit_scale=scale, logit_bias=bias)
        for name in ("logit_scale", "logit_bias"):
            check_number(name, getattr(self, name))

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

    def block_at(self, tap: int | str) -> int:
        """The dense block that a tap stands for: its number, its module's name, or its stride.

        A number up to that of the blocks is a block; larger ones are strides: 8, 16, 32.
        """
        info = self.feature_info
        for block, stride in enumerate(info.reductions, start=1):
            if tap in (f"denseblock{block}", f"features.denseblock{block}"):
                return block
            if tap == stride and stride > len(self.blocks):
                return block
        if isinstance(tap, str):
            raise ValueError(
                f"tap = {tap!r} does not exist in the backbone; give one of "
                f"{', '.join(info.modules)}, or the number of a block."
            )
        return tap

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
class BcosifiedConfig(Config):
    """A converted model: its network as data, which is all that is needed to build it again."""

    noun: ClassVar[str] = "converted network"

    source: str
    """The class of the original."""
    program: dict[str, Any] = field(repr=False)
    """The network's layers and instructions."""
    image_size: tuple[int, int] = (224, 224)
    """Height and width that it was converted with."""
    any_size: bool = True
    """Whether it takes images of other sizes, too."""
    bcos: bool = False
    """Whether its layers are B-cos transforms."""
    head: str = ""
    """The path of the last layer with weights."""
    activation: Activation = "softmax"
    """What makes probabilities of logits: that of the original, or that of training since."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "image_size", _several(self.image_size))
        check_size(self.image_size)
        object.__setattr__(self, "logit_scale", self.logit_scale or 1.0)
        object.__setattr__(self, "logit_bias", self.logit_bias or 0.0)
        object.__setattr__(self, "_shapes", {})
        check_positive("num_classes", self.num_classes)
        for name in ("logit_scale", "logit_bias"):
            check_number(name, getattr(self, name))
        for name in ("any_size", "bcos"):
            check_flag(name, getattr(self, name))
        for name in ("source", "head"):
            check_text(name, getattr(self, name))
        check_choice("activation", self.activation, get_args(Activation))
        check_program(self.program)

    @property
    def family(self) -> Family:
        return "bcos"

    @property
    def title(self) -> str:
        return f"{self.source.rsplit('.', 1)[-1]}, converted to explain itself"

    def with_classes(self, num_classes: int) -> "BcosifiedConfig":
        """The config with another number of classes, and a last layer that fits.

        Raises:
            ValueError: The last layer has not one output per class.
        """
        if num_classes == self.num_classes:
            return self
        program = copy.deepcopy(self.program)
        options = program["layers"].get(self.head, (None, {}))[1]
        if (options.get("weight") or [0])[0] != self.num_classes:
            raise ValueError(
                f"The last layer of this {self.source} has not one output per class, so it "
                f"cannot be replaced; replace it in the original, and convert that."
            )
        for name in ("weight", "bias"):
            if options[name] is not None:
                options[name][0] = num_classes
        return dataclasses.replace(self, num_classes=num_classes, program=program)

    def tap_at(self, tap: int | str | None, *, whole: bool) -> str:
        """The name of the map that tokens are made of.

        Args:
            tap: A module's name, a stride, or None for the last map.
            whole: Whether what comes behind the map is needed as well.

        Raises:
            ValueError: There is no such map, or the network cannot be cut there.
        """
        program = Program(**self.program)
        if isinstance(tap, str):
            number = taps.named(program, tap)
        else:
            size = (taps.LARGE, taps.LARGE) if self.any_size else self.image_size
            try:
                found = self.shapes(*size)
            except ValueError:
                size = self.image_size
                found = self.shapes(*size)
            number = taps.at_stride(program, tap, found, size)
        shape = self.shapes(*self.image_size).get(number)
        if not taps.is_map(shape) or number not in taps.path(program):
            raise ValueError(
                f"tap = {tap!r} is not allowed: its result is no map [n, c, h, w] that the image "
                f"becomes (its shape is {list(shape or ())}); name another module, or a stride."
            )
        if whole and taps.halves(program, number) is None:
            raise ValueError(
                f"tap = {tap!r} is not allowed: layers behind it also use what was computed before "
                f"it; name a module at the end of a stage, give a stride, or set keep_head=False."
            )
        return taps.name_of(program, number)

    def map_at(self, tap: str, height: int, width: int) -> tuple[int, int, int]:
        """Channels, rows and columns of the map at a tap; no rows where an image does not fit."""
        number = taps.named(Program(**self.program), tap)
        try:
            # A size that is being traced is fixed by this.
            _, channels, rows, columns = self.shapes(int(height), int(width))[number]
        except ValueError:
            return (0, 0, 0)
        return channels, rows, columns

    def shapes(self, height: int, width: int) -> taps.Shapes:
        """The shapes of all tensors in the network, for images of this size."""
        known: dict[tuple[int, int], taps.Shapes] = getattr(self, "_shapes")  # noqa: B009
        if (height, width) not in known:
            known[height, width] = taps.shapes(Program(**self.program), height, width)
        return known[height, width]


@dataclass(frozen=True, kw_only=True)
class StemConfig:
    """A few 3×3 convolutions of stride 2 in place of a DenseNet: small models from scratch."""

    widths: tuple[int, ...] = (32, 64)
    gain: float = 100.0
    """f in γ = f/√c of the stem's B-cos convolutions."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "widths", _several(self.widths))
        check_stages("widths", self.widths, "channels per convolution")
        check_number("gain", self.gain)


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
    backbone: DenseNetConfig | StemConfig | BcosifiedConfig = FROM_FAMILY
    """Default: DenseNet-121 of flavor ``v1`` (B-cos) or ``conventional``; a flavor's name means
    DenseNet-121 of that flavor."""
    tap: int | str = FROM_FAMILY
    """Tokens come from this dense block's output: 1, 2, 3 = 13, 38, 87 convolutions; default 3. In
    a converted network: from a module's output, by name, or from the last map of a stride; default:
    the last map."""
    keep_head: bool = False
    """Whether the backbone's layers behind the tap, its head included, follow the blocks. Tokens
    are then the features at the tap, as wide as these, and ``width`` is that of attention alone."""
    layer_scale: float | None = None
    """The start of learned factors, one per channel, on what attention and MLP add to the tokens;
    at 0 a block starts as the identity. None: there are no factors, as in the paper."""
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
        check_choice("family", self.family, get_args(Family))
        bcos = self.family == "bcos"
        size = self.image_size
        pair = tuple(size) if isinstance(size, list | tuple) else (size, size)
        object.__setattr__(self, "image_size", pair)
        check_positive("width", self.width)
        check_positive("num_classes", self.num_classes)
        check_size(pair)
        check_flag("keep_head", self.keep_head)
        self._resolve_backbone()
        backbone = self.backbone
        dense = isinstance(backbone, DenseNetConfig)
        stem = isinstance(backbone, StemConfig)
        _resolve(
            self,
            position="mul" if bcos else "emb",
            attention="shifted" if bcos else "standard",
            maxout=2 if bcos else 1,
            patch={1: 4, 2: 2}.get(self.block, 1) if dense and not self.keep_head else 1,
            train_backbone=stem,
            gain=max(5.0, 15 + 5 * math.log2(self.width / 192)),
            feature_scale=1e3 if bcos and dense and not self.keep_head else 1.0,
            logit_scale=1e-3 if bcos else 1.0,
            logit_bias=LOGIT_BIAS if bcos else 0.0,
        )
        self._check()

    def _resolve_backbone(self) -> None:
        """Makes a config of a flavor and a name of the tap, and takes over the head's settings."""
        given: Any = self.backbone
        if self.keep_head and (given is None or isinstance(given, StemConfig)):
            raise ValueError(
                "keep_head = True needs a backbone with a head: give backbone=, a converted model, "
                "a DenseNet, or the weights file or config of one."
            )
        backbone = given or ("v1" if self.family == "bcos" else "conventional")
        if isinstance(backbone, str):
            backbone = DenseNetConfig(flavor=backbone)  # type: ignore[arg-type]
        tap: int | str | None = self.tap
        if isinstance(backbone, BcosifiedConfig):
            if self.keep_head:
                backbone = backbone.with_classes(self.num_classes)
            tap = backbone.tap_at(tap, whole=self.keep_head)
        elif isinstance(backbone, DenseNetConfig):
            if self.keep_head:
                backbone = backbone.replace(num_classes=self.num_classes)
            last = len(backbone.blocks) if self.keep_head else 3
            tap = backbone.block_at(last if tap is None else tap)
            check_positive("tap", tap)
        else:
            tap = 3 if tap is None else tap
            check_positive("tap", tap)
        if self.keep_head:
            _resolve(self, logit_scale=backbone.logit_scale, logit_bias=backbone.logit_bias)
        object.__setattr__(self, "tap", tap)
        object.__setattr__(self, "backbone", backbone)

    def _check(self) -> None:
        check_choice("position", self.position, get_args(Position))
        check_choice("attention", self.attention, get_args(AttentionKind))
        for name in NUMBERS:
            check_number(name, getattr(self, name))
        check_bcos(self.b, self.maxout)
        check_bcos(self.attention_b, self.maxout)
        for name in ("num_heads", "depth", "patch", "maxout"):
            check_positive(name, getattr(self, name))
        check_flag("train_backbone", self.train_backbone)
        if not 1 <= self.width * self.mlp_ratio <= LIMITS["width"] * 16:
            raise ValueError(
                f"mlp_ratio = {self.mlp_ratio} is not allowed: it leaves no unit of a width of "
                f"{self.width}, or too many; give 1 or more, such as 4."
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
            if not 1 <= self.block <= len(self.backbone.blocks):
                raise ValueError(
                    f"tap = {self.tap} is not allowed: the backbone has dense blocks 1 to "
                    f"{len(self.backbone.blocks)}."
                )
            if self.backbone.family != self.family:
                raise ValueError(
                    f"backbone flavor {self.backbone.flavor!r} does not fit the {self.family} "
                    f"family; use {'v1 or v2' if self.family == 'bcos' else 'conventional'}."
                )
        if isinstance(self.backbone, BcosifiedConfig):
            if self.family != "bcos":
                raise ValueError(
                    "A converted network explains itself, so it is no backbone of the conventional "
                    "family; use family='bcos'."
                )
            if not self.backbone.any_size and self.image_size != self.backbone.image_size:
                raise ValueError(
                    f"image_size = {self.image_size} is not allowed: the backbone was converted "
                    f"for {self.backbone.image_size} and takes no other size; convert it again."
                )
        if self.keep_head and (self.family != "bcos" or self.patch != 1):
            raise ValueError(
                f"keep_head = True is not allowed with family = {self.family!r} and patch = "
                f"{self.patch}: give a B-cos backbone, and leave patch out."
            )
        if self.layer_scale is not None:
            check_number("layer_scale", self.layer_scale)
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
        backbone = "a DenseNet"
        if isinstance(self.backbone, StemConfig):
            backbone = "a convolutional stem"
        elif isinstance(self.backbone, BcosifiedConfig):
            backbone = f"a converted {self.backbone.source.rsplit('.', 1)[-1]}"
        return f"{self._family_name} ViT, {self.width} wide, {self.depth} blocks, on {backbone}"

    @property
    def feature_info(self) -> FeatureInfo:
        return FeatureInfo(
            modules=tuple(f"blocks.{block}" for block in range(self.depth)),
            widths=(self.token_width,) * self.depth,
            reductions=(self._reduction * self.patch,) * self.depth,
        )

    @property
    def _reduction(self) -> int:
        """How many pixels one position of the backbone's map covers along a side."""
        if isinstance(self.backbone, StemConfig):
            return int(2 ** len(self.backbone.widths))
        if isinstance(self.backbone, DenseNetConfig):
            return int(2 ** (1 + self.block))
        return round(self.image_size[0] / self.grid[0] / self.patch)

    @property
    def activation(self) -> Activation:
        if self.keep_head:
            assert isinstance(self.backbone, DenseNetConfig | BcosifiedConfig)
            return self.backbone.activation
        return super().activation

    @property
    def block(self) -> int:
        """The dense block at whose end a DenseNet is tapped."""
        assert isinstance(self.tap, int)
        return self.tap

    @property
    def feature_width(self) -> int:
        """Channels of the backbone's map."""
        if isinstance(self.backbone, StemConfig):
            return self.backbone.widths[-1]
        if isinstance(self.backbone, DenseNetConfig):
            return self.backbone.width_at(self.block)
        return self.backbone.map_at(str(self.tap), *self.image_size)[0]

    @property
    def token_width(self) -> int:
        """Width of the tokens between the blocks."""
        return self.feature_width if self.keep_head else self.width

    @classmethod
    def of(cls, **options: Any) -> "ModelConfig":
        """As the constructor, but the backbone of a kept head sets ``num_classes`` by default, and
        a converted one sets ``image_size``."""
        backbone = options.get("backbone")
        if isinstance(backbone, BcosifiedConfig):
            options.setdefault("image_size", backbone.image_size)
        if isinstance(backbone, Config) and options.get("keep_head"):
            options.setdefault("num_classes", backbone.num_classes)
        return cls(**options)

    def values(self) -> dict[str, Any]:
        values = super().values()
        kind = next(kind for kind, made in BACKBONES.items() if isinstance(self.backbone, made))
        values["backbone"]["kind"] = kind
        return values

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> "ModelConfig":
        backbone = _renamed(values["backbone"])
        kind = BACKBONES[backbone.pop("kind")]
        return cls(**{**_renamed(values), "backbone": kind(**backbone)})

    def grid_of(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of tokens that an image of this size is cut into."""
        if isinstance(self.backbone, BcosifiedConfig):
            _, rows, columns = self.backbone.map_at(str(self.tap), height, width)
            return rows // self.patch, columns // self.patch
        return self._tokens_along(height), self._tokens_along(width)

    def _tokens_along(self, pixels: int) -> int:
        if isinstance(self.backbone, BcosifiedConfig):
            return min(self.grid_of(pixels, pixels))
        halvings = len(self.backbone.widths) if isinstance(self.backbone, StemConfig) else 2
        for _ in range(halvings):
            pixels = (pixels + 1) // 2
        if isinstance(self.backbone, DenseNetConfig):
            pixels //= 2 ** (self.block - 1)
        return pixels // self.patch

    @property
    def min_size(self) -> int:
        """The fewest pixels a side that still make a token."""
        if isinstance(self.backbone, BcosifiedConfig) and not self.backbone.any_size:
            return self.image_size[0]
        most = 1
        while most < 2 * LIMITS["image_size"] and not self._tokens_along(most):
            most *= 2
        # More pixels never make fewer tokens.
        return 1 + bisect.bisect_left(range(1, most), 1, key=self._tokens_along)

    @property
    def layer_gain(self) -> float:
        """f of the transformer's layers, the prior's factor included."""
        return self.gain * (self.prior_gain if self.position == "mul" else 1.0)


BACKBONES: dict[str, type[Any]] = {
    "stem": StemConfig,
    "densenet": DenseNetConfig,
    "bcosified": BcosifiedConfig,
}
"""Kinds of backbones, as weights files name them."""


def _renamed(values: Mapping[str, Any]) -> dict[str, Any]:
    return {OLD_FIELDS.get(name, name): value for name, value in values.items()}


def _resolve(config: object, **defaults: Any) -> None:
    for name, default in defaults.items():
        if getattr(config, name) is None:
            object.__setattr__(config, name, default)


def _several(values: Any) -> tuple[Any, ...]:
    return tuple(values) if isinstance(values, list | tuple) else (values,)
