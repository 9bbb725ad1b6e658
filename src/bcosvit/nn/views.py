"""Views of a model: frozen ones for explanations, prepared ones for inference.

Every layer of a B-cos network computes W(x)·x with a matrix that depends on x. Reading that
matrix off by differentiation needs W(x) held constant. Instead of switching a flag on the model
(which leaks into other threads, nested calls and pickles), ``frozen_view`` returns a *copy of the
module objects* that shares parameters and buffers and has ``frozen = True`` on every dynamic
layer. The model itself is never touched, so there is nothing to restore.

A frozen view is affine in its input: logits = W·x + Σ constants. The constants' share (positional
embedding, biases) is found the same way as W: each constant enters through ``offset``, which a
view can multiply by a per-sample ``probe`` of ones; the gradient of a logit with respect to the
probe is the residual.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from bcosvit.ops.dispatch import Backend, constant_if, wide

M = TypeVar("M", bound=nn.Module)
D = TypeVar("D", bound="DynamicModule")


class DynamicModule(nn.Module):
    """The base class of layers that are linear once what they compute *from* the input is constant.

    A subclass passes what belongs to W(x) through :meth:`constant`, and what it adds through
    :meth:`offset`.

    Examples:
        >>> class Gate(DynamicModule):
        ...     def forward(self, x):
        ...         return self.constant(x.sigmoid()) * x
        >>> x = torch.ones(1, requires_grad=True)
        >>> torch.autograd.grad(frozen_view(Gate())(x), x)[0] == x.sigmoid()
        tensor([True])
    """

    frozen: bool = False
    """Whether this object belongs to a frozen view. Never set on a model by hand."""

    probe: Tensor | None = None
    """In a view that measures the residual: ones [batch], a factor on every constant."""

    backend: Backend = "auto"
    """Which implementation of its op a layer calls; a view may choose."""

    is_end: bool = False
    """Whether this is where images enter a model or logits leave it."""

    def constant(self, tensor: Tensor) -> Tensor:
        """``tensor`` as part of W(x): in a frozen view no gradient flows into it."""
        return constant_if(self.frozen, tensor)

    def prepare(self, dtype: torch.dtype | None) -> None:
        """Computes what depends on the weights alone; called on the layers of a prepared view."""

    def offset(self, constant: Tensor, like: Tensor) -> Tensor:
        """``constant`` ready to be added to ``like``; every additive constant goes through here."""
        if self.probe is None:
            return constant
        return constant * self.probe.view(-1, *[1] * (like.ndim - 1)).to(like.dtype)


# Modules of torch that are linear and add nothing, or only arrange other modules.
_LINEAR = (nn.Identity, nn.AdaptiveAvgPool2d, nn.Flatten, nn.Unflatten, nn.Dropout)
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)

# Layers of torch that need freezing or add a constant -> our class with the same state.
_TWINS: dict[type[nn.Module], type[DynamicModule]] = {}


def twin_of(torch_layer: type[nn.Module]) -> Callable[[type[D]], type[D]]:
    """Returns a class decorator for the class that replaces a layer of PyTorch in frozen views.

    Args:
        torch_layer: The class that is replaced; only its exact type is, not subclasses.

    Returns:
        The decorator. The decorated class has the same attributes and state as ``torch_layer``.
    """

    def register(ours: type[D]) -> type[D]:
        _TWINS[torch_layer] = ours
        return ours

    return register


Mark = Callable[[nn.Module], dict[str, Any]]


def view(model: M, *, mark: Mark | None = None, with_parameter_grad: bool = True) -> M:
    """Copies the module objects of a model, which share its tensors.

    Whatever is set on the copy leaves the model as it is.

    Args:
        model: The model; wrappers such as that of ``torch.compile`` are left out.
        mark: Returns the attributes to set on the copy of each module.
        with_parameter_grad: False cuts the parameters off autograd, so that no activations are
            stored for gradients of weights that nobody needs.

    Returns:
        The copy.

    Examples:
        >>> model = nn.Linear(2, 2)
        >>> copy = view(model).eval()
        >>> model.training, copy.weight is model.weight
        (True, True)
    """
    return _copy(unwrapped(model), mark or (lambda module: {}), with_parameter_grad, {})


def frozen_view(model: M, *, probe: Tensor | None = None, with_parameter_grad: bool = True) -> M:
    """Makes a view of a model whose gradient with respect to its input is W(x).

    Args:
        model: The model, which stays as it is.
        probe: Ones [batch], a factor on every additive constant; the gradient of a logit with
            respect to it is the residual.
        with_parameter_grad: As for :func:`view`.

    Returns:
        The view.

    Raises:
        ValueError: A module is not dynamic linear, so that there is no W(x), or it has a
            ``forward`` that was set on the object and is no method of it. A module of others
            that has children may compute anything between them: the first call of the view proves
            by its numbers that it does not, or raises the error.

    Examples:
        >>> import bcosvit
        >>> model = bcosvit.nn.BcosLinear(3, 1)
        >>> x = torch.rand(3, requires_grad=True)
        >>> y = frozen_view(model)(x)
        >>> torch.allclose(torch.autograd.grad(y, x)[0] @ x, y)
        True
    """
    for name, child in unwrapped(model).named_modules():
        if not _may_be_frozen(child):
            raise ValueError(
                f"{type(child).__name__} at {name or 'the root'!r} is not dynamic linear, so the "
                f"model has no exact explanation; put a layer of bcosvit.nn in its place."
            )
        own = child.__dict__.get("forward")
        if (
            own is not None
            and _method_of(child, own) is None
            and any(map(freezing, child.modules()))
        ):
            raise ValueError(
                f"{type(child).__name__} at {name or 'the root'!r} has a forward that was set on "
                f"the object and would run the model's own layers instead of frozen ones; define "
                f"it as a method of a class."
            )

    frozen = view(model, mark=_freezing(probe), with_parameter_grad=with_parameter_grad)
    originals = unwrapped(model).modules()
    for original, copy in zip(originals, frozen.modules(), strict=True):
        # Where images enter and logits leave, constants are counted apart; `explain` checks there.
        ends = any(isinstance(part, DynamicModule) and part.is_end for part in original.modules())
        if not ends and not _is_trusted(original):
            copy.register_forward_hook(_Proof(original), with_kwargs=True)
    return frozen


def _freezing(probe: Tensor | None) -> Mark:
    return lambda module: {**freezing(module), "probe": probe} if freezing(module) else {}


def freezing(module: nn.Module) -> dict[str, Any]:
    """Returns what freezes the copy of a single module, for a :func:`view` that freezes some."""
    dynamic = isinstance(module, DynamicModule) or type(module) in _TWINS
    return {"frozen": True} if dynamic else {}


def prepared_view(model: M, dtype: torch.dtype | None = None) -> M:
    """Makes a view for inference whose B-cos weights are normalized once, not in every call.

    Args:
        model: The model, which stays as it is; training it further does not change the view.
        dtype: What the normalized weights are stored as, e.g. the dtype of autocast.

    Returns:
        The view, in evaluation mode; it predicts and explains as the model does.

    Examples:
        >>> import bcosvit
        >>> model = bcosvit.nn.BcosLinear(3, 2)
        >>> x = torch.rand(3)
        >>> torch.equal(prepared_view(model)(x), model(x))
        True
    """
    snapshot = view(model, with_parameter_grad=False)
    with torch.no_grad():
        for module in snapshot.modules():
            if isinstance(module, DynamicModule):
                module.prepare(dtype)
    return snapshot.eval()


@contextmanager
def explaining(model: M) -> Iterator[M]:
    """Yields a frozen view of a model, for use as ``with explaining(model) as view``.

    Args:
        model: The model, which stays as it is.

    Yields:
        What :func:`frozen_view` returns.
    """
    yield frozen_view(model)


def unwrapped(model: M) -> M:
    """The model inside wrappers that change how it runs, not what it computes."""
    while True:
        inner = getattr(model, "_orig_mod", None)  # torch.compile's wrapper
        if inner is None and isinstance(model, nn.parallel.DistributedDataParallel):
            inner = model.module
        if inner is None:
            return model
        model = inner


def _may_be_frozen(module: nn.Module) -> bool:
    """Whether ``module`` is dynamic linear, its children (asked on their own) aside."""
    if isinstance(module, nn.Conv2d):
        return module.bias is None and module.padding_mode == "zeros"
    if isinstance(module, (DynamicModule, *_LINEAR, *_CONTAINERS)) or type(module) in _TWINS:
        return True
    # A module of somebody's own that has children is taken to arrange them until its first call,
    # which proves it; torch's composite modules (MultiheadAttention, ...) compute between them.
    is_torchs = type(module).__module__.startswith("torch.nn.")
    return not is_torchs and next(module.children(), None) is not None


def is_frozen(model: nn.Module) -> bool:
    """Whether a model is a frozen view, whose gradients are rows of W(x)."""
    return any(isinstance(part, DynamicModule) and part.frozen for part in model.modules())


def unverified(model: nn.Module) -> str | None:
    """The class of the first module that is not known to be dynamic linear, if there is one."""
    for part in unwrapped(model).modules():
        known = str(type(part).__module__).startswith(_TRUSTED)
        if not _is_trusted(part) or not (known or isinstance(part, DynamicModule)):
            return type(part).__name__
    return None


_TRUSTED = ("torch.", "bcosvit.")


def _is_trusted(module: nn.Module) -> bool:
    """Whether what ``module`` computes between its children is known to be linear.

    The author of a `DynamicModule` guarantees that it is, and so do torch and this library for
    theirs. All others, including subclasses of torch's with a ``forward`` of their own, are checked
    by numbers (`_Proof`).
    """
    if isinstance(module, DynamicModule):
        return True
    forward = module.__dict__.get("forward", type(module).forward)
    return str(getattr(forward, "__module__", "")).startswith(_TRUSTED)


class _Proof:
    """A forward hook that proves, in its first call, that a frozen module is affine in its input.

    With y the result and W the gradient, y = W·x + the share of the constants: the equation is
    checked along one random direction, in at least float32.
    """

    def __init__(self, original: nn.Module) -> None:
        self.original = original
        self.proved = False

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if self.proved or torch.compiler.is_compiling():
            return
        given = [x for x in tree_leaves((args, kwargs)) if _is_real(x)]
        if not given:
            return
        device = given[0].device.type
        with (
            torch.inference_mode(False),
            torch.enable_grad(),
            torch.autocast(device, enabled=False),
        ):
            inputs = [wide(constant_if(True, x)).clone().requires_grad_() for x in given]
            probe = inputs[0].new_ones(len(inputs[0]), requires_grad=True)
            replaced = iter(inputs)
            args, kwargs = tree_map(lambda x: next(replaced) if _is_real(x) else x, (args, kwargs))
            alone = view(self.original, mark=_freezing(probe), with_parameter_grad=False).eval()
            # Tensors of the view are its own once they are cast.
            alone = alone.to(inputs[0].dtype)
            results = [y for y in tree_leaves(alone(*args, **kwargs)) if _is_real(y)]
            generator = torch.Generator().manual_seed(0)
            seeds = [torch.randn(y.shape, generator=generator).to(y) for y in results]
            terms = [
                (seed * constant_if(True, y)).double()
                for seed, y in zip(seeds, results, strict=True)
            ]
            slopes: Sequence[Tensor | None] = [None] * (len(inputs) + 1)
            if any(y.requires_grad for y in results):
                sources = (*inputs, probe)
                slopes = torch.autograd.grad(results, sources, seeds, allow_unused=True)
        for x, slope in zip((*inputs, probe), slopes, strict=True):
            if slope is not None:
                terms.append(-(slope * constant_if(True, x)).double())
        missing = sum(term.sum() for term in terms)
        scale = sum(term.abs().sum() for term in terms)
        tolerance = 1e-8 if inputs[0].dtype == torch.float64 else 1e-3
        assert isinstance(missing, Tensor) and isinstance(scale, Tensor)
        if not missing.abs() <= tolerance * scale.clamp_min(1e-30):
            raise ValueError(
                f"{type(self.original).__name__} computes something between its children that is "
                f"not dynamic linear, so the model has no exact explanation; put layers of "
                f"bcosvit.nn in its place, or make it a DynamicModule."
            )
        self.proved = True


def _method_of(module: nn.Module, value: object) -> Any:
    """The function of a method of ``module``, compiled or not, that was stored as an attribute."""
    method = getattr(value, "_torchdynamo_orig_callable", value)
    if isinstance(method, MethodType) and method.__self__ is module:
        return method.__func__
    return None


def _is_real(x: object) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def _copy(module: M, mark: Mark, with_grad: bool, done: dict[int, nn.Module]) -> M:
    """Copies the object, not its tensors; a module that stands in two places stays one."""
    if id(module) in done:
        return done[id(module)]  # type: ignore[return-value]
    marks = mark(module)
    copy = object.__new__(_TWINS.get(type(module), type(module)) if marks else type(module))
    done[id(module)] = copy
    state = copy.__dict__
    state.update(module.__dict__)
    # torch keeps tensors, children and hooks in dicts: give the view its own.
    state.update({key: value.copy() for key, value in state.items() if isinstance(value, dict)})
    # What `module.compile()` left behind, and methods of its own, would run the unfrozen original.
    state["_compiled_call_impl"] = None
    for name, value in module.__dict__.items():
        if (function := _method_of(module, value)) is not None:
            state[name] = MethodType(function, copy)
    state["_modules"] = {
        name: child if child is None else _copy(child, mark, with_grad, done)
        for name, child in module._modules.items()
    }
    for tensors in (state["_parameters"], state["_buffers"]):
        for name, tensor in tensors.items():
            if tensor is None:
                continue
            # Autograd cannot save a tensor that was made under `inference_mode`.
            tensor = tensor.clone() if tensor.is_inference() else tensor
            tensors[name] = constant_if(not with_grad, tensor)
    state.update(marks)
    return copy  # type: ignore[return-value]
