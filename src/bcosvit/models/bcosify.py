"""From any image classifier to an equal one that explains itself.

The original is recorded (`tracing`), every step is judged (`linearity`) and rewritten (`rewriting`)
with layers that can be frozen and that keep additive constants apart (`nn.bcosified`). The result
computes the same logits, and in a frozen view logits = W(x)·x + residual holds exactly, where the
residual is the share of all additive constants: biases, shifts of norms, class tokens, positional
embeddings and the mean that is subtracted from the image.

B-cosification (Arya et al., NeurIPS 2024) then turns the copy into a B-cos network by training:
`BcosifySchedule` lets the constants fade and raises B.
"""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bcosvit.models import taps
from bcosvit.models.base import Classifier, LogitLayer
from bcosvit.models.config import BcosifiedConfig, ModelConfig
from bcosvit.models.network import Network, Program
from bcosvit.models.registry import register_model
from bcosvit.models.rewriting import Writer, WriterOptions, recordings
from bcosvit.nn.bcosified import ConvertedConv, ConvertedLinear
from bcosvit.nn.encoding import BcosEncoding
from bcosvit.nn.linear import check_bcos
from bcosvit.nn.views import frozen_view, unwrapped, view

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


@register_model("bcosified", BcosifiedConfig)
class Bcosified(Classifier[BcosifiedConfig]):
    """A converted model: logits = W(x)·x + residual + bias, exactly.

    ``fade`` (λ) and ``b`` are tensors; change them with `BcosifySchedule` or ``fill_``.
    """

    head_name = "network"

    def __init__(self, config: BcosifiedConfig) -> None:
        super().__init__()
        self.config = config
        self.encoding = BcosEncoding()
        self.network = Network(Program(**config.program))
        self.logit = LogitLayer(config.logit_scale, config.logit_bias)

    @property
    def fade(self) -> Tensor:
        """λ, the factor on all additive constants: 1 in the original, 0 in a B-cos network."""
        return self.network.fade

    @property
    def b(self) -> Tensor:
        """B, the exponent of the B-cos layers: 1 in the original."""
        return self.network.b

    def from_encoded(self, encoded: Tensor) -> Tensor:
        size = (encoded.shape[-2], encoded.shape[-1])
        if not self.config.any_size and size != self.config.image_size:
            raise ValueError(
                f"Images are {size[0]}×{size[1]}, but the model was converted for "
                f"{self.config.image_size[0]}×{self.config.image_size[1]}; resize the images, or "
                f"convert it with image_size={size}."
            )
        return self.logit(self.network(encoded))

    def forward_features(self, images: Tensor) -> Tensor:
        return self.network.features(self.encoding(images))

    def head_inputs(self, encoded: Tensor) -> Tensor:
        return taps.around(self.network, self.config.head)[0](self.network, encoded)

    def from_head_inputs(self, inputs: Tensor) -> Tensor:
        return self.logit(taps.around(self.network, self.config.head)[1](self.network, inputs))

    def get_classifier(self) -> nn.Module:
        return self.network.get_submodule(self.config.head)

    def _replace_head(self, num_classes: int) -> None:
        head = self.get_classifier()
        self.config = self.config.with_classes(num_classes)
        self.network.program = Program(**self.config.program)
        options = self.network.program.layers[self.config.head][1]
        assert isinstance(head, ConvertedLinear | ConvertedConv)
        fresh = type(head)(**options).to(next(head.parameters())).train(self.training)
        assert fresh.weight is not None
        nn.init.trunc_normal_(fresh.weight, std=0.02)
        if fresh.bias is not None:
            nn.init.zeros_(fresh.bias)
        parent, _, name = self.config.head.rpartition(".")
        setattr(self.network.get_submodule(parent), name, fresh)


@dataclass(frozen=True)
class BcosifySchedule:
    """Lets a converted model's constants fade (λ 1 → 0) and its exponent rise (B 1 → ``b``).

    A B-cos ViT whose backbone is a converted model is moved, too: its backbone and, where it is
    kept, the backbone's head. Both values move along half a cosine over the first part of the
    training, which leaves the rest to a true B-cos network whose residual is exactly zero.

    Args:
        end: The share of the training after which λ = 0 and B = ``b``.
        start: The share of the training before which λ = 1 and B = 1.
        b: The final exponent.

    Examples:
        >>> schedule = BcosifySchedule(end=0.35)
        >>> schedule.at(0.0), schedule.at(1.0)
        ((1.0, 1.0), (0.0, 2.0))
    """

    end: float = 0.35
    start: float = 0.0
    b: float = 2.0

    def __post_init__(self) -> None:
        check_bcos(self.b, 1)
        if not 0 <= self.start <= self.end <= 1:
            raise ValueError(
                f"start = {self.start} and end = {self.end} are not allowed: they are shares of "
                f"the training with 0 <= start <= end <= 1."
            )

    def at(self, progress: float) -> tuple[float, float]:
        """λ and B when the share ``progress`` of the training is done."""
        if progress >= self.end:
            return 0.0, self.b
        if progress <= self.start:
            return 1.0, 1.0
        done = (progress - self.start) / (self.end - self.start)
        moved = (1 - math.cos(math.pi * done)) / 2
        return 1 - moved, 1 + moved * (self.b - 1)

    def apply(self, model: nn.Module, progress: float) -> None:
        """Sets λ and B of ``model`` (compiled or not) in place, without compiling it again.

        Raises:
            ValueError: The model is not converted and has no converted backbone, or it was
                converted without B-cos layers.
        """
        inner = unwrapped(model)
        converted = converted_part(getattr(inner, "config", None))
        if converted is None:
            raise ValueError(
                f"{type(inner).__name__} is not a converted model; give what bcosify returned, or "
                f"a B-cos ViT with such a model as its backbone."
            )
        fade, b = self.at(progress)
        if b != 1 and not converted.bcos:
            raise ValueError(
                "The model was converted without B-cos layers, so B cannot rise; convert it with "
                "bcosify(model, b=1.0)."
            )
        with torch.no_grad():
            for module in inner.modules():
                if isinstance(module, Network):
                    module.fade.fill_(fade)
                    module.b.fill_(b)


def converted_part(config: object) -> BcosifiedConfig | None:
    """The config of a converted model, or of a ViT's converted backbone; otherwise ``None``."""
    config = config.backbone if isinstance(config, ModelConfig) else config
    return config if isinstance(config, BcosifiedConfig) else None


def bcosify(
    model: nn.Module,
    *,
    mean: Sequence[float] = IMAGENET_MEAN,
    std: Sequence[float] = IMAGENET_STD,
    image_size: int | tuple[int, int] = 224,
    b: float | None = None,
    fade: float = 1.0,
    uncentered: bool | None = None,
    linear: Sequence[str] = (),
    depthwise: bool = False,
    logit_bias: float = 0.0,
    check: bool = True,
) -> Bcosified:
    """Converts an image classifier to an equal model that explains itself exactly.

    The copy takes RGB images in [0, 1] and computes the logits of ``model`` in evaluation mode on
    ``(images - mean) / std``. Its inherent explanation, ``bcosvit.explain(copy, images)``, is
    exact: the contributions of all pixels and the residual, the share of the model's additive
    constants, sum to the logit. The original is left as it is and shares no tensors with the copy.

    Args:
        model: Any module from images [B, 3, H, W] to logits [B, K], such as one of torchvision's
            or timm's.
        mean: What the original expects to be subtracted from each channel.
        std: What it then expects to be divided by.
        image_size: The size, or height and width, of images to convert it with. Models that allow
            it take other sizes afterwards.
        b: None leaves all layers linear. A number makes B-cos transforms of them,
            |cos(x, w)|^(b−1)·(w·x), and lets a `BcosifySchedule` change it; with b = 1.0 the
            copy is still equal to the original.
        fade: The factor λ on all additive constants; 1 keeps the copy equal to the original.
        uncentered: Whether batch norms divide by the root of the mean square and subtract no mean.
            By default, where ``b`` is given. In evaluation mode this changes nothing at first.
        linear: Patterns such as ``"*.proj"`` of layers that stay linear though ``b`` is given.
            Layers that compute queries and keys always do.
        depthwise: Whether depthwise convolutions become B-cos transforms, too.
        logit_bias: Added to every logit, as B-cos networks have it.
        check: Whether the copy is compared with the original, and its contributions with its
            logits, on random images.

    Returns:
        The copy, in evaluation mode, with the original's dtype and device.

    Raises:
        ValueError: If the model computes something that has no exact explanation. The message
            names the function and the module that calls it.

    Examples:
        >>> import bcosvit, torch
        >>> original = torch.nn.Sequential(
        ...     torch.nn.Conv2d(3, 8, 3), torch.nn.GELU(), torch.nn.AdaptiveAvgPool2d(1),
        ...     torch.nn.Flatten(), torch.nn.Linear(8, 10),
        ... )
        >>> model = bcosvit.bcosify(original, image_size=32)
        >>> attribution = bcosvit.explain(model, torch.rand(2, 3, 32, 32))
        >>> bool(attribution.completeness_error().max() < 1e-4)
        True
    """
    if b is not None:
        check_bcos(b, 1)
    if not (len(mean) == len(std) == 3 and all(s > 0 for s in std)):
        raise ValueError(
            f"mean = {mean!r} and std = {std!r} are not allowed: give three numbers each, one per "
            f"channel, and std above 0."
        )
    size = (image_size, image_size) if isinstance(image_size, int) else tuple(image_size)
    model = unwrapped(model)
    example = next(model.parameters(), torch.empty(0))
    recording, axes, any_size = recordings(model, (size[0], size[1]), example)
    options = WriterOptions(
        bcos=b is not None,
        uncentered=b is not None if uncentered is None else uncentered,
        linear=tuple(linear),
        depthwise=depthwise,
    )
    writer = Writer(recording, axes, options, guards=any_size)
    program = writer.write()
    logits = recording.steps[recording.output].shape
    assert logits is not None
    config = BcosifiedConfig(
        source=f"{type(model).__module__}.{type(model).__qualname__}",
        program=dataclasses.asdict(program),
        num_classes=logits[1],
        image_size=(size[0], size[1]),
        any_size=any_size,
        bcos=b is not None,
        head=writer.head,
        logit_bias=logit_bias,
    )
    converted = Bcosified(config).to(example.device, example.dtype)
    statistics = [torch.tensor(s, dtype=torch.float64) for s in (mean, std)]
    writer.load(converted.network, model, *statistics)
    converted.eval()
    if check:
        _check(model, converted, statistics)
    with torch.no_grad():
        converted.fade.fill_(fade)
        converted.b.fill_(1.0 if b is None else b)
    return converted


def _check(model: nn.Module, converted: Bcosified, statistics: Sequence[Tensor]) -> None:
    """Raises ``ValueError`` unless the copy computes the original's logits and explains them."""
    example = next(converted.parameters())
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(3, 3, *converted.config.image_size, generator=generator).to(example)
    mean, std = (s.to(example).view(3, 1, 1) for s in statistics)
    with torch.no_grad():
        expected = view(model).eval()((images - mean) / std)
        expected = getattr(expected, "logits", expected)
        found = converted(images) - converted.config.logit_bias
    # By default convolutions on a GPU round their inputs to 10 bits.
    tolerance = max(1000 * torch.finfo(expected.dtype).eps, 0.03 if example.is_cuda else 0)
    error = (found - expected).abs().max() / expected.abs().max().clamp_min(1e-30)
    if not error <= tolerance:
        raise ValueError(
            f"The converted model differs from the original by {error:.1e} of the largest logit, "
            f"so something that it computes was not seen; this model cannot be converted."
        )
    probe = torch.ones(len(images), dtype=example.dtype, device=example.device, requires_grad=True)
    frozen = frozen_view(converted, probe=probe, with_parameter_grad=False)
    with torch.enable_grad():
        encoded = converted.encoding(images).requires_grad_()
        logit = frozen.network(encoded).max(1).values
        rows, residual = torch.autograd.grad(logit.sum(), (encoded, probe))
    explained = (rows * encoded).sum((1, 2, 3)) + residual
    size = torch.stack([logit.abs(), residual.abs(), (rows * encoded).sum((1, 2, 3)).abs()]).amax(0)
    missed = ((explained - logit).abs() / size.clamp_min(1e-30)).max()
    if not missed <= 10 * tolerance:
        raise ValueError(
            f"The contributions of the converted model miss its logit by {missed:.1e} of it, so "
            f"this model cannot be converted; its samples may not lie in order along an axis."
        )
