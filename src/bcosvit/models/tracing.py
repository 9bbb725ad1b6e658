"""Records what any image classifier computes, as a list of calls of torch functions.

The model runs once on random images while a `TorchFunctionMode` sees every call, whether a module,
a method or an operator makes it. Python code between the calls runs as ever, so control flow needs
no support; what it depends on are sizes, which are integers that record their own arithmetic. A
recording is thus good for every batch size and, where the code allows it, for every image size.
"""

import functools
import inspect
import math
import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, get_overridable_functions, resolve_name
from torch.utils._pytree import tree_leaves, tree_map

from bcosvit.nn.views import DynamicModule, view


@dataclass(frozen=True)
class Ref:
    """The result of the step with this number."""

    step: int


@dataclass
class Step:
    """One call: a torch function by its qualified name, or one of the operations below."""

    call: str
    """``input``, ``parameter``, ``buffer``, ``value``, ``item``, ``guard``, ``operator.NAME``, or
    the qualified name of a torch function."""
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    place: str = ""
    """The module that made the call, by its path in the model."""
    shape: tuple[int, ...] | None = None
    """Of the result, if it is a tensor."""
    dtype: torch.dtype | None = None

    @property
    def name(self) -> str:
        """The last part of ``call`` without underscores: ``add`` for ``torch.Tensor.__add__``."""
        return self.call.rsplit(".", 1)[-1].strip("_")


@functools.cache
def torch_functions() -> dict[str, Callable[..., Any]]:
    """Every function that a recording can hold, by qualified name."""
    found = {}
    for functions in get_overridable_functions().values():
        for function in functions:
            if name := resolve_name(function):
                found[name] = function
    # Some that are written in Python are missing there.
    for name in dir(Tensor):
        if not name.startswith("_") and callable(getattr(Tensor, name)):
            found.setdefault(f"torch.Tensor.{name}", getattr(Tensor, name))
    for name, function in vars(F).items():
        home = getattr(function, "__module__", None)
        if callable(function) and not name.startswith("_") and home in (F.__name__, None):
            found[f"{F.__name__}.{name}"] = function
    return found


OPERATORS = {
    name: getattr(operator, name)
    for name in ("add", "sub", "mul", "floordiv", "mod", "neg", "truediv", "pow")
} | {"ceil": math.ceil, "floor": math.floor, "trunc": math.trunc, "round": round}
COMPARISONS = {name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")}


class _Tracked:
    """A size, or what was computed from sizes, that remembers the step that gave it."""

    trace: "Recorder"
    ref: Ref

    def __reduce__(self) -> Any:
        return (type(self).__mro__[2], (type(self).__mro__[2](self),))

    def __deepcopy__(self, memo: Any) -> Any:
        return self

    def __bool__(self) -> bool:
        return bool(operator.ne(self, 0))


class TrackedInt(_Tracked, int):
    __hash__ = int.__hash__


class TrackedFloat(_Tracked, float):
    __hash__ = float.__hash__


def _arithmetic(name: str, swapped: bool) -> Callable[..., Any]:
    function = OPERATORS[name]

    def method(self: Any, *others: Any) -> Any:
        if others and not isinstance(others[0], int | float):
            return NotImplemented
        operands = (*others, self) if swapped else (self, *others)
        value = function(*map(plain, operands))
        return self.trace.number(value, "operator." + name, operands)

    return method


def _comparison(name: str) -> Callable[..., Any]:
    function = COMPARISONS[name]

    def method(self: Any, other: Any) -> Any:
        if not isinstance(other, int | float):
            return NotImplemented
        outcome = function(plain(self), plain(other))
        self.trace.add(Step("guard", (name, self.ref, self.trace.refer(other), outcome)))
        return outcome

    return method


for _name in ("add", "sub", "mul", "floordiv", "mod", "truediv"):
    for _cls in (TrackedInt, TrackedFloat):
        setattr(_cls, f"__{_name}__", _arithmetic(_name, False))
        setattr(_cls, f"__r{_name}__", _arithmetic(_name, True))
for _name in ("neg", "ceil", "floor", "trunc", "round"):
    for _cls in (TrackedInt, TrackedFloat):
        setattr(_cls, f"__{_name}__", _arithmetic(_name, False))
for _cls in (TrackedInt, TrackedFloat):
    _cls.__pow__ = _arithmetic("pow", False)  # type: ignore[method-assign]
for _name in COMPARISONS:
    for _cls in (TrackedInt, TrackedFloat):
        setattr(_cls, f"__{_name}__", _comparison(_name))


def plain(value: Any) -> Any:
    """A tracked number as an ordinary one."""
    if isinstance(value, TrackedInt):
        return int.__int__(value)
    return float.__float__(value) if isinstance(value, TrackedFloat) else value


class TrackedShape(tuple[int, ...]):
    def numel(self) -> int:
        return math.prod(self)


_SIZES = ("shape", "size")


class Recorder(TorchFunctionMode):
    """While it is entered, calls on recorded tensors become ``steps``."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.steps: list[Step] = []
        self.places: list[str] = []
        self.named = {id(p): ("parameter", name) for name, p in model.named_parameters()}
        self.named |= {id(t): ("buffer", name) for name, t in model.named_buffers()}
        self._refs: dict[int, Ref] = {}
        # An id is good only as long as its object lives.
        self._kept: list[Any] = []

    def add(self, step: Step) -> Ref:
        step.place = self.places[-1] if self.places else ""
        self.steps.append(step)
        return Ref(len(self.steps) - 1)

    def number(self, value: Any, call: str, operands: tuple[Any, ...]) -> Any:
        ref = self.add(Step(call, tuple(map(self.refer, operands))))
        tracked: Any = (TrackedInt if isinstance(value, int) else TrackedFloat)(value)
        tracked.trace, tracked.ref = self, ref
        return tracked

    def tensor(self, tensor: Tensor, step: Step) -> Ref:
        step.shape, step.dtype = tuple(tensor.shape), tensor.dtype
        ref = self.add(step)
        self._refs[id(tensor)] = ref
        self._kept.append(tensor)
        return ref

    def known(self, value: Any) -> bool:
        return isinstance(value, Tensor) and (id(value) in self._refs or id(value) in self.named)

    def refer(self, value: Any) -> Any:
        """``value`` as an argument of a step."""
        if isinstance(value, _Tracked):
            return value.ref
        if isinstance(value, slice):
            return slice(*map(self.refer, (value.start, value.stop, value.step)))
        if isinstance(value, torch.Size | TrackedShape):
            return tuple(map(self.refer, value))
        if not isinstance(value, Tensor):
            return value
        if id(value) in self._refs:
            return self._refs[id(value)]
        if id(value) in self.named:
            return self.tensor(value, Step(*_named(self.named[id(value)])))
        # Made by Python code from nothing that is recorded, so the same in every call.
        return self.tensor(value, Step("value", (value.clone(),)))

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        leaves = list(tree_leaves((args, kwargs), is_leaf=_is_tracked))
        for leaf in list(leaves):
            if isinstance(leaf, slice):
                leaves += [leaf.start, leaf.stop, leaf.step]
        on_recorded = any(map(self.known, leaves))
        name = _name_of(func)
        if on_recorded and (name in _SIZES or name == "numel"):
            return self._sizes(name, args)
        if on_recorded and name == "iter":
            with self:
                return iter(torch.unbind(args[0]))
        if on_recorded and func in _DECOMPOSED:
            with self:
                return _DECOMPOSED[func](*args, **kwargs)
        result = func(*_plain(args), **_plain(kwargs))
        creates = name.startswith("new_") or name.endswith("_like")
        if not on_recorded or creates or not _has_tensor(result):
            return result
        if name == "setitem" or "out" in kwargs:
            self.refuse(f"writes into a part of a tensor ({name})")
        call, args, kwargs = self._functional(func, name, args, kwargs)
        args, kwargs = _map(self.refer, args), _map(self.refer, kwargs)
        if isinstance(result, Tensor):
            self.tensor(result, Step(call, args, kwargs))
        else:
            ref = self.add(Step(call, args, kwargs))
            for i, item in enumerate(result):
                if isinstance(item, Tensor):
                    self.tensor(item, Step("item", (ref, i)))
        return result

    def refuse(self, what: str) -> None:
        raise ValueError(
            f"The model {what} at {self.places[-1] if self.places else 'its root'!r}, which "
            f"cannot be converted; rewrite that part, or leave it to post-hoc methods."
        )

    def _sizes(self, name: str, args: tuple[Any, ...]) -> Any:
        tensor = args[0]
        ref = self.refer(tensor)
        if self.steps[ref.step].call in ("parameter", "buffer", "value"):
            shape = tuple(tensor.shape)
            if name == "size" and len(args) > 1:
                return shape[plain(args[1])]
            return tensor.numel() if name == "numel" else tensor.shape

        def size(axis: int) -> Any:
            return self.number(tensor.size(axis), "torch.Tensor.size", (ref, axis))

        if name == "size" and len(args) > 1:
            return size(plain(args[1]))
        shape = TrackedShape(size(axis) for axis in range(tensor.dim()))
        return shape.numel() if name == "numel" else shape

    def _functional(
        self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
        """The call as one that changes nothing in place, with Python's arguments by name."""
        if _is_property(func):
            if name in ("T", "mT"):
                return "torch.transpose", (args[0], -2, -1), {}
            if name in ("data",):
                return "torch.Tensor.clone", args[:1], {}
        try:
            call = resolve_name(func) or ""
        except Exception:
            call = ""
        signature = _signature(func)
        if signature and ".functional." in call:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            given = dict(bound.arguments)
            given.pop("_stacklevel", None)
            if "inplace" in given:
                given["inplace"] = False
            args, kwargs = (), given
        else:
            # Torch's own functions take these two first.
            kwargs = dict(kwargs)
            args = (*_taken(kwargs, "input"), *args, *_taken(kwargs, "other"))
        head, _, last = call.rpartition(".")
        if last.startswith("__i") and f"__{last[3:]}" in dir(Tensor) and last != "__invert__":
            last = f"__{last[3:]}"
        elif last.endswith("_") and not last.endswith("__"):
            last = last[:-1]
        call = f"{head}.{last}"
        if call not in torch_functions():
            self.refuse(f"calls {call if last else func!r}, which is not a function of torch,")
        return call, args, kwargs


def _signature(func: Any) -> inspect.Signature | None:
    """The signature of a function in Python, if all its arguments can be given by name."""
    if not inspect.isfunction(func):
        return None
    try:
        signature = inspect.signature(func)
    except ValueError:  # It wraps one that is not in Python.
        return None
    kinds = {parameter.kind for parameter in signature.parameters.values()}
    several = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
    return None if kinds & several else signature


def _taken(kwargs: dict[str, Any], name: str) -> list[Any]:
    return [kwargs.pop(name)] if name in kwargs else []


def _named(entry: tuple[str, str]) -> tuple[str, tuple[str]]:
    return entry[0], (entry[1],)


def _is_property(func: Any) -> bool:
    return getattr(func, "__name__", "") == "__get__"


def _name_of(func: Any) -> str:
    if _is_property(func):
        return str(getattr(func.__self__, "__name__", ""))
    return str(getattr(func, "__name__", "")).strip("_")


def _is_tracked(value: Any) -> bool:
    return isinstance(value, _Tracked | slice)


def _map(function: Callable[[Any], Any], tree: Any) -> Any:
    leaves = (_Tracked, slice, torch.Size, TrackedShape)
    return tree_map(function, tree, is_leaf=lambda value: isinstance(value, leaves))


def _plain(tree: Any) -> Any:
    def leaf(value: Any) -> Any:
        if isinstance(value, slice):
            return slice(plain(value.start), plain(value.stop), plain(value.step))
        return tuple(map(plain, value)) if isinstance(value, TrackedShape) else plain(value)

    return tree_map(leaf, tree, is_leaf=_is_tracked)


def _has_tensor(result: Any) -> bool:
    return any(isinstance(leaf, Tensor) for leaf in tree_leaves(result))


def _normalize(
    input: Tensor, p: float = 2.0, dim: int = 1, eps: float = 1e-12, out: None = None
) -> Tensor:
    """`F.normalize` as a division, whose parts are recorded apart."""
    return input / torch.linalg.vector_norm(input, p, dim, keepdim=True).clamp_min(eps)


def _addcmul(input: Tensor, tensor1: Tensor, tensor2: Tensor, *, value: float = 1) -> Tensor:
    product = tensor1 * tensor2
    return input + (product if value == 1 else value * product)


def _multi_head_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Tensor | None = None,
    k_proj_weight: Tensor | None = None,
    v_proj_weight: Tensor | None = None,
    static_k: Tensor | None = None,
    static_v: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, None]:
    """`F.multi_head_attention_forward` in its parts; tensors are [tokens, batch, width]."""
    unusual = (bias_k, bias_v, key_padding_mask, static_k, static_v)
    if any(part is not None for part in unusual) or add_zero_attn or query.dim() != 3:
        raise ValueError(
            "nn.MultiheadAttention is converted without bias_k, bias_v, key_padding_mask and "
            "add_zero_attn, and with a batch; the model uses one of them."
        )
    width = query.shape[-1]
    weights: Any = (q_proj_weight, k_proj_weight, v_proj_weight)
    projected: tuple[Tensor, ...]
    if query is key and key is value and in_proj_weight is not None:
        projected = torch.chunk(F.linear(query, in_proj_weight, in_proj_bias), 3, dim=-1)
    else:
        weights = weights if in_proj_weight is None else torch.chunk(in_proj_weight, 3)
        biases: Any = (None,) * 3 if in_proj_bias is None else torch.chunk(in_proj_bias, 3)
        projected = tuple(
            F.linear(x, weight, bias)
            for x, weight, bias in zip((query, key, value), weights, biases, strict=True)
        )
    heads = [
        x.reshape(x.shape[0], x.shape[1], num_heads, width // num_heads).permute(1, 2, 0, 3)
        for x in projected
    ]
    if attn_mask is not None and attn_mask.dim() == 3:
        attn_mask = attn_mask.reshape(query.shape[1], num_heads, *attn_mask.shape[1:])
    q, k, v = heads
    mixed = F.scaled_dot_product_attention(q, k, v, attn_mask, 0.0, is_causal)
    mixed = mixed.permute(2, 0, 1, 3).reshape(query.shape[0], query.shape[1], width)
    return F.linear(mixed, out_proj_weight, out_proj_bias), None


_DECOMPOSED: dict[Any, Callable[..., Any]] = {
    F.normalize: _normalize,
    torch.addcmul: _addcmul,
    Tensor.addcmul: _addcmul,
    Tensor.reshape_as: lambda x, other: x.reshape(other.shape),
    Tensor.view_as: lambda x, other: x.reshape(other.shape),
    Tensor.expand_as: lambda x, other: x.expand(other.shape),
    F.multi_head_attention_forward: _multi_head_attention,
}


@dataclass
class Recording:
    """What a model computes: ``steps``, of which ``output`` gives the logits."""

    steps: list[Step]
    output: int


def record(model: nn.Module, images: Tensor) -> Recording:
    """The calls that ``model`` makes on ``images``, in evaluation mode.

    Raises:
        ValueError: If the model does something that a recording cannot hold.
    """
    # Kernels of our own layers are no functions of torch; their reference is.
    traced = view(model, mark=_by_reference).eval()
    recorder = Recorder(traced)
    with torch.no_grad(), _places(traced, recorder.places):
        images = images.clone()
        recorder.tensor(images, Step("input"))
        with recorder:
            output = traced(images)
    logits = getattr(output, "logits", output)
    if not isinstance(logits, Tensor) or logits.ndim != 2 or not recorder.known(logits):
        raise ValueError(
            "The model must return logits [batch, classes] that are computed from the images; "
            f"it returned {type(output).__name__}"
            + (f" of shape {list(logits.shape)}." if isinstance(logits, Tensor) else ".")
        )
    return Recording(recorder.steps, recorder.refer(logits).step)


def _by_reference(module: nn.Module) -> dict[str, Any]:
    return {"backend": "reference"} if isinstance(module, DynamicModule) else {}


@contextmanager
def _places(model: nn.Module, places: list[str]) -> Iterator[None]:
    """Keeps the path of the running module at the end of ``places``."""
    # Hooks on a view: its dicts are its own, so the model never sees them.
    for name, module in model.named_modules():

        def enter(module: nn.Module, args: Any, name: str = name) -> None:
            places.append(name)

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            places.pop()

        module.register_forward_pre_hook(enter)
        module.register_forward_hook(leave)
    yield
