"""What every explanation method is and what it returns, and the registry of all methods.

An explainer is an object that describes itself: its name and title, how its maps are drawn, what
it costs and to which models it applies. ``register_explainer`` makes it known everywhere at once:
in `explainers`, `explain`, the command line, reports, the metrics and the web page. Other packages
register theirs on import, or by an entry point of the group ``bcosvit.explainers``.
"""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, TypeVar

import torch
from torch import Tensor

from bcosvit.attribution.passes import check_cancelled
from bcosvit.models.base import AnyModel
from bcosvit.nn.views import is_frozen, unverified, unwrapped, view
from bcosvit.ops.dispatch import computed_in
from bcosvit.registry import Registry


@dataclass(frozen=True)
class Top:
    """A target: the ``count`` classes of each image with the highest logits."""

    count: int = 1

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError(f"Top({self.count}) is not allowed: give an integer >= 1.")


Target = int | Tensor | Top | Literal["all"] | None
"""Which class is explained: the predicted one (None), one for all images (int), one per image
(a tensor [B]), several per image (a tensor [B, C], or ``Top(C)``), or ``"all"``."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Attribution:
    """How much each pixel contributes to the logit of a class.

    Where several classes per image are explained, an axis C follows B in all fields but ``logits``.
    """

    map: Tensor
    """[B, H, W]: the contribution of each pixel."""
    target: Tensor
    """[B]: the class that is explained."""
    logits: Tensor | None = None
    """[B, K]: the model's prediction, so that nobody needs to predict again."""
    weights: Tensor | None = None
    """[B, 6, H, W]: the row of W(x) of the target class (inherent explanations)."""
    residual: Tensor | None = None
    """[B]: the share of the model's constants in the logit (inherent explanations)."""
    logit: Tensor | None = None
    """[B]: the logit that is explained (inherent explanations)."""
    bias: float = 0.0
    """The constant that the model adds to every logit."""
    computed_in: torch.dtype | None = None
    """What the model multiplied in, where that is not the dtype of the map (half precision)."""

    def completeness_error(self) -> Tensor:
        """Measures by how much the contributions miss the logit.

        Returns:
            |Σ map + residual − (logit − bias)| for each sample, summed in float64.

        Raises:
            ValueError: If the method does not claim completeness.
        """
        if self.residual is None or self.logit is None:
            raise ValueError(
                "This attribution has no residual, so it does not claim completeness; "
                "only inherent explanations do."
            )
        explained = self.map.double().sum((-2, -1)) + self.residual.double()
        return (explained - (self.logit.double() - self.bias)).abs()


class CompletenessWarning(UserWarning):
    """Contributions do not sum to the logit that they explain, beyond rounding."""


TOLERANCES = {
    torch.float64: 1e-8,
    torch.float32: 1e-3,
    torch.bfloat16: 5e-2,
    torch.float16: 5e-2,
}
"""By how much contributions may miss the logit, as a share of the largest of logit, residual and
bias, for each dtype that a model computes in; under autocast its dtype counts."""


def check_completeness(attribution: Attribution, strict: bool = False, why: str = "") -> None:
    """Warns where contributions miss the logit by more than rounding explains.

    Args:
        attribution: An explanation that claims completeness.
        strict: Whether this is an error.
        why: A likely reason, for the message.

    Raises:
        ValueError: The contributions miss the logit, and ``strict`` is set.
    """
    message = incompleteness(attribution, why)
    if message is None:
        return
    if strict:
        raise ValueError(message)
    warnings.warn(message, CompletenessWarning, stacklevel=4)


def incompleteness(attribution: Attribution, why: str = "") -> str | None:
    """Says by how much contributions miss the logit, if rounding does not explain it.

    Args:
        attribution: An explanation that claims completeness.
        why: A likely reason.

    Returns:
        A sentence, or None where they add up.
    """
    assert attribution.residual is not None and attribution.logit is not None
    dtype = attribution.computed_in or computed_in(attribution.map)
    tolerance = TOLERANCES.get(dtype, TOLERANCES[torch.float32])
    error = attribution.completeness_error()
    parts = (attribution.residual, attribution.logit)
    scale = torch.stack([part.double().abs() for part in parts]).amax(0)
    share = error / scale.clamp_min(max(abs(attribution.bias), 1e-30))
    # Also where it is not a number.
    if bool((share <= tolerance).all()):
        return None
    return (
        f"The contributions miss the logit by {share.max().item():.1e} of it, "
        f"{tolerance:.0e} is the tolerance in {str(dtype).removeprefix('torch.')}: "
        f"{why or 'compute in a wider dtype, and check that weights and images are finite'}."
    )


# Whether the caller checks what an explainer returns, and by which rule.
_checks: ContextVar[bool] = ContextVar("_checks", default=False)


def check_direct_call(attribution: Attribution) -> Attribution:
    """Checks what an explainer returns to a caller that is not `explain`, which does so itself."""
    if not _checks.get():
        check_completeness(attribution)
    return attribution


Cost = Literal["forward", "gradient", "many"]


class Explainer(ABC):
    """An explanation method. Subclasses are frozen dataclasses of hyperparameters.

    A subclass sets the class attributes that differ from the defaults below and implements
    ``__call__`` for one class per image; `explain` takes care of several classes.

    Examples:
        >>> import torch, bcosvit
        >>> from dataclasses import dataclass
        >>> from bcosvit.attribution import Attribution, Explainer
        >>> @dataclass(frozen=True)
        ... class Brightness(Explainer):
        ...     title = "Brightness"
        ...     cost = "forward"
        ...     def __call__(self, model, images, target=None):
        ...         logits = model(images)
        ...         return Attribution(map=images.mean(1), target=logits.argmax(1), logits=logits)
        >>> stem = bcosvit.StemConfig(widths=(8,))
        >>> config = bcosvit.ModelConfig(width=12, depth=1, image_size=16, backbone=stem)
        >>> model = bcosvit.create_model(config).eval()
        >>> bcosvit.explain(model, torch.rand(1, 3, 16, 16), method=Brightness()).map.shape
        torch.Size([1, 16, 16])
    """

    name: ClassVar[str] = ""
    """Set by ``register_explainer``."""
    title: ClassVar[str] = ""
    """What papers call the method; the class name where it is empty."""
    signed: ClassVar[bool] = True
    """Whether maps have a negative side, i.e. show what speaks against the class."""
    colormap: ClassVar[str] = "bwr"
    """The matplotlib color map of maps: symmetric about 0, or from 0 up (``jet``)."""
    color: ClassVar[str] = "#8a8a94"
    """Of the method's bars and lines in charts."""
    cost: ClassVar[Cost] = "gradient"
    """One forward pass, one forward and one backward pass, or many of either."""
    exact: ClassVar[bool] = False
    """Whether maps, residual and bias add up to the logit."""
    baseline: ClassVar[bool] = False
    """Whether the method explains nothing and serves as a floor for others."""
    blank: ClassVar[str] = ""
    """Why a map may be zero everywhere, for those who see one."""
    several: ClassVar[bool] = False
    """Whether ``__call__`` takes targets of several classes per image itself."""
    version: ClassVar[int] = 1
    """Increased when the method's maps change, so that cached measurements are taken again."""

    def applies_to(self, model: AnyModel) -> bool:
        """Returns whether the method is defined for ``model``."""
        return True

    def passes(self, height: int, width: int) -> int:
        """Returns what explaining one class of one image costs, in predictions of one image.

        Args:
            height: Of the image.
            width: Of the image.

        Returns:
            The number of forward passes, of which a backward pass takes the time of two. A method
            that costs many passes overrides this.
        """
        return {"forward": 1, "gradient": 3, "many": 100}[self.cost]

    @abstractmethod
    def __call__(self, model: AnyModel, images: Tensor, target: Target = None) -> Attribution:
        """Explains a batch.

        Args:
            model: The model, which is left untouched.
            images: RGB in [0, 1], [B, 3, H, W].
            target: The class to explain; None stands for the predicted class.

        Returns:
            Maps [B, H, W], with the logits that the method computed on its way.
        """

    def with_shared(
        self, model: AnyModel, images: Tensor, target: Target, shared: dict[str, Any]
    ) -> Attribution:
        """Like ``__call__``, for methods that share work on one batch through ``shared``."""
        return self(model, images, target)


ExplainFunction = Callable[[AnyModel, Tensor, Target], Attribution]
"""Any function of this form may be given as a method, too."""

Method = str | Explainer | ExplainFunction

METHODS: Registry[Explainer] = Registry("method", group="bcosvit.explainers")
"""All registered methods by name."""

E = TypeVar("E", bound=type[Explainer])


def register_explainer(name: str) -> Callable[[E], E]:
    """Class decorator that registers an explainer with its default hyperparameters.

    Args:
        name: The name under which users ask for the method.

    Raises:
        ValueError: If the name is taken.

    Examples:
        >>> from bcosvit.attribution import METHODS
        >>> METHODS.get("rollout").title
        'Rollout'
    """

    def register(cls: E) -> E:
        cls.name = name
        cls.title = cls.title or cls.__name__
        METHODS.register(name)(cls())
        return cls

    return register


def explainers(model: AnyModel | None = None) -> tuple[str, ...]:
    """Lists the explanation methods.

    Args:
        model: If given, only methods that apply to this model are listed.

    Returns:
        The names, in the order of their registration.

    Examples:
        >>> import bcosvit
        >>> bcosvit.explainers()[:2]
        ('inherent', 'ixg')
    """
    if model is None:
        return METHODS.names()
    model = unwrapped(model)
    return tuple(name for name in METHODS.names() if METHODS.get(name).applies_to(model))


def get_explainer(method: Method) -> Explainer | ExplainFunction:
    """Returns an explainer by its name; one that is given itself is returned as it is."""
    if isinstance(method, str):
        return METHODS.get(method)
    if not callable(method):
        raise ValueError(f"method = {method!r} is no method; give a name or a function.")
    return method


def method_name(method: Method) -> str:
    """Returns the name by which results of ``method`` are known: its own, or its repr."""
    return method if isinstance(method, str) else repr(method)


def method_title(name: str) -> str:
    """Returns the title of a method; one that is not registered goes by its name."""
    return describe_method(name).title or name


def describe_method(name: str) -> Explainer | type[Explainer]:
    """Returns what a method says about itself, such as its colors.

    Args:
        name: Its name, as in `explain_all`.

    Returns:
        The registered explainer; where there is none, the class with all defaults.
    """
    return METHODS.get(name) if name in METHODS else Explainer


def explain(
    model: AnyModel,
    images: Tensor,
    target: Target = None,
    method: Method = "inherent",
    *,
    strict: bool = False,
) -> Attribution:
    """Explains how much each pixel contributes to the logit of a class.

    The model is explained as it predicts in evaluation mode, and is left untouched.

    Args:
        model: A model of this library.
        images: RGB in [0, 1], [B, 3, H, W].
        target: ``None`` explains the predicted class, an int one class for all images, a tensor
            [B] one class per image, a tensor [B, C] or ``Top(C)`` several classes per image, and
            ``"all"`` every class. With several classes a class axis follows B in the results.
        method: One of `explainers`, or an explainer with other hyperparameters, e.g.
            ``Rollout(start=1)``.
        strict: Whether contributions that miss the logit beyond rounding are an error. By default
            they are a `CompletenessWarning`.

    Returns:
        The attribution.

    Raises:
        ValueError: If the target or the method does not exist, or the method does not apply; or
            contributions miss the logit, and ``strict`` is set or the model has modules of others
            that may compute something that cannot be frozen.

    Examples:
        >>> import torch, bcosvit
        >>> stem = bcosvit.StemConfig(widths=(8,))
        >>> config = bcosvit.ModelConfig(width=12, depth=1, image_size=16, backbone=stem)
        >>> model = bcosvit.create_model(config).eval()
        >>> a = bcosvit.explain(model, torch.rand(2, 3, 16, 16))
        >>> a.map.shape
        torch.Size([2, 16, 16])
        >>> bool((a.completeness_error() < 1e-4).all())
        True
    """
    return _explain(get_explainer(method), model, images, target, {}, strict)


def explain_all(
    model: AnyModel,
    images: Tensor,
    target: Target,
    methods: Sequence[Method],
    *,
    check: bool = True,
    strict: bool = False,
) -> dict[str, Attribution]:
    """Explains one batch by several methods, which share what they can.

    Args:
        model: A model of this library.
        images: RGB in [0, 1], [B, 3, H, W].
        target: As in `explain`; all methods explain the same classes.
        methods: Names or explainers.
        check: Whether contributions that miss the logit are a warning, as in `explain`. `evaluate`
            measures and reports by how much they do, instead.
        strict: Whether they are an error, as in `explain`.

    Returns:
        The attributions by name (`method_name`), in the order of ``methods``.
    """
    shared: dict[str, Any] = {}
    resolved = {method_name(method): get_explainer(method) for method in methods}
    # A method that takes several classes itself comes first, since it predicts on its way.
    ordered = sorted(resolved, key=lambda name: not getattr(resolved[name], "several", False))
    found: dict[str, Attribution] = {}
    for name in ordered:
        found[name] = _explain(resolved[name], model, images, target, shared, strict, check)
        if found[name].logits is not None:
            shared.setdefault("logits", found[name].logits)
        if not isinstance(target, Tensor | int):
            target = found[name].target
    return {name: found[name] for name in resolved}


def _explain(
    explainer: Explainer | ExplainFunction,
    model: AnyModel,
    images: Tensor,
    target: Target,
    shared: dict[str, Any],
    strict: bool = False,
    check: bool = True,
) -> Attribution:
    if isinstance(explainer, Explainer) and not explainer.exact and is_frozen(model):
        raise ValueError(
            f"The model is a frozen view, of which {explainer.title or explainer} would explain "
            f"W(x) instead of the model; give the model that the view was made of."
        )

    def one(target: Target) -> Attribution:
        check_cancelled()
        token = _checks.set(True)
        try:
            if isinstance(explainer, Explainer):
                return explainer.with_shared(model, images, target, shared)
            return explainer(model, images, target)
        finally:
            _checks.reset(token)

    single = (
        target is None
        or isinstance(target, int)
        or (isinstance(target, Tensor) and target.ndim < 2)
    )
    if single or getattr(explainer, "several", False):
        found = one(target)
    else:
        if (logits := shared.get("logits")) is None:
            with torch.no_grad():
                logits = shared["logits"] = view(model).eval()(images)
        classes = resolve_target(target, logits)
        found = _stacked([one(column) for column in classes.unbind(1)], classes)
    if check and found.residual is not None and found.logit is not None:
        foreign = unverified(model)
        why = f"{foreign} computes something that is not dynamic linear" if foreign else ""
        check_completeness(found, strict or foreign is not None, why)
    return found


def _stacked(each: list[Attribution], classes: Tensor) -> Attribution:
    """Explanations of one class as one of all ``classes`` [B, C]."""
    fields = [f for f in ("map", "weights", "residual", "logit") if getattr(each[0], f) is not None]
    stacked: Any = {field: torch.stack([getattr(a, field) for a in each], 1) for field in fields}
    return replace(each[0], target=classes, **stacked)


def resolve_target(target: Target, logits: Tensor) -> Tensor:
    """Turns a target into class indices.

    Args:
        target: As in `explain`.
        logits: The prediction [B, K].

    Returns:
        Indices [B], or [B, C] where the target is several classes per image.

    Raises:
        ValueError: If the target is not a class, or not one per image.
    """
    samples, classes = logits.shape
    if target is None:
        return logits.argmax(1)
    if isinstance(target, Top):
        return logits.topk(min(target.count, classes), 1).indices
    allowed = (
        f"allowed are None, 'all', Top(n), a class from 0 to {classes - 1}, or a tensor with one "
        f"or several classes for each of {samples} images"
    )
    if isinstance(target, str):
        if target != "all":
            raise ValueError(f"target = {target!r} is not a target; {allowed}.")
        return torch.arange(classes, device=logits.device).expand(samples, -1)
    if isinstance(target, int) and not isinstance(target, bool):
        # It may be too large for a tensor.
        if not 0 <= target < classes:
            raise ValueError(f"target {target} is out of range; {allowed}.")
        target = torch.full((samples,), target)
    if not isinstance(target, Tensor) or target.is_floating_point() or target.dtype == torch.bool:
        raise ValueError(f"target = {target!r} is not a class; {allowed}.")
    if target.ndim not in (1, 2) or len(target) != samples or not target.numel():
        raise ValueError(f"target has shape {list(target.shape)}; {allowed}.")
    if (wrong := (target < 0) | (target >= classes)).any():
        raise ValueError(f"target {target[wrong][0].item()} is out of range; {allowed}.")
    # A copy: the caller may change the tensor, or have made it in inference mode.
    return target.to(logits.device, torch.long, copy=True)
