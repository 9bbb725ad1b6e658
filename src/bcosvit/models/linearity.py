"""Which of a recording's steps carry the image to the logits, and what only steers them.

Every value is a *constant*, which depends on parameters alone; *linear* in the image once the
gates, attention matrices and norms on its way are held; or *dynamic*, which may be a factor in
such a linear function but no term of it. The rules below say how kinds combine. A function that
no rule knows gives a dynamic value, so that it is refused if the logits depend on it in any other
way than through factors.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

from bcosvit.models.tracing import Recording, Ref, Step
from bcosvit.nn.bcosified import ACTIVATIONS


class Kind(Enum):
    CONSTANT = "constant"
    LINEAR = "linear"
    DYNAMIC = "dynamic"


@dataclass
class Finding:
    """What is known about the result of a step."""

    kind: Kind
    terms: tuple[int, ...] = ()
    """The steps that a linear result is linear in."""
    cause: str = ""
    """Why a dynamic result is not linear."""
    gate: bool = False
    """Whether it is an activation's output, up to a constant factor."""
    items: tuple[Kind, ...] = ()
    """Of the parts of a result that is a tuple of different kinds."""


MOVES = {
    *("reshape", "view", "flatten", "unflatten", "permute", "transpose", "t", "squeeze"),
    *("unsqueeze", "expand", "expand_as", "repeat", "repeat_interleave", "narrow", "select"),
    *("chunk", "split", "split_with_sizes", "tensor_split", "unbind", "roll", "flip", "rot90"),
    *("getitem", "index_select", "gather", "movedim", "moveaxis", "swapaxes", "swapdims", "tile"),
    *("contiguous", "clone", "detach", "to", "float", "double", "type_as", "alias", "view_as"),
    *("reshape_as", "broadcast_to", "unfold", "pixel_shuffle", "pixel_unshuffle", "item"),
    *("channel_shuffle", "dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout"),
    *("feature_dropout", "feature_alpha_dropout", "diagonal", "native_channel_shuffle"),
}
"""Functions that rearrange what they are given."""

LINEAR = MOVES | {
    *("mean", "sum", "neg", "negative", "cumsum", "fold", "positive", "interpolate", "upsample"),
    *(f"{kind}_pool{n}d" for kind in ("avg", "adaptive_avg") for n in (1, 2, 3)),
}
"""Functions that are linear in their first argument."""

HOMOGENEOUS = {
    *("relu", "leaky_relu", "rrelu", "prelu", "abs", "absolute", "amax", "amin"),
    *(f"{kind}_pool{n}d" for kind in ("max", "adaptive_max") for n in (1, 2, 3)),
}
"""Functions that are piecewise linear and zero at zero: their slope is their matrix."""

ALIASES = {
    alias: name
    for name, aliases in {
        "add": ("radd",),
        "sub": ("subtract",),
        "mul": ("multiply", "rmul"),
        "div": ("divide", "true_divide", "truediv"),
        "matmul": ("bmm", "mm", "rmatmul"),
        "cat": ("concat", "concatenate"),
        "clamp": ("clip", "clamp_min"),
    }.items()
    for alias in aliases
}


def canonical(step: Step) -> str:
    """The name under which the rules know a step's function."""
    return ALIASES.get(step.name, step.name)


def arguments(step: Step, *names: str) -> dict[str, Any]:
    """A step's arguments by these names, in the function's order; absent ones are None."""
    return {**dict.fromkeys(names), **dict(zip(names, step.args, strict=False)), **step.kwargs}


def refs(value: Any) -> Iterator[int]:
    """The steps that an argument refers to."""
    if isinstance(value, Ref):
        yield value.step
    elif isinstance(value, slice):
        yield from refs((value.start, value.stop, value.step))
    elif isinstance(value, tuple | list):
        for item in value:
            yield from refs(item)
    elif isinstance(value, dict):
        yield from refs(list(value.values()))


def inputs(step: Step) -> tuple[int, ...]:
    """The steps whose results a step takes, each once."""
    return tuple(dict.fromkeys(refs([*step.args, step.kwargs])))


class Analysis:
    """The findings for every step of a recording, and which of them are on the image's path."""

    def __init__(self, recording: Recording) -> None:
        self.steps = recording.steps
        self.findings: list[Finding] = []
        for step in self.steps:
            self.findings.append(self._find(step))
        output = self.findings[recording.output]
        if output.kind is Kind.DYNAMIC:
            raise ValueError(
                f"The model cannot be converted: {output.cause}, which is not dynamic linear, and "
                f"the logits depend on it other than by a factor. Replace it, or use a post-hoc "
                f"method."
            )
        if output.kind is Kind.CONSTANT:
            raise ValueError("The model cannot be converted: its logits ignore the images.")
        self.path = self._path(recording.output)

    def kind(self, value: Any) -> Kind:
        """Of an argument; of several together the least linear."""
        kinds = {self.findings[step].kind for step in refs(value)}
        for kind in (Kind.DYNAMIC, Kind.LINEAR):
            if kind in kinds:
                return kind
        return Kind.CONSTANT

    def _path(self, output: int) -> set[int]:
        path, left = set(), [output]
        while left:
            step = left.pop()
            if step not in path:
                path.add(step)
                left += self.findings[step].terms
        return path

    def _find(self, step: Step) -> Finding:
        if step.call == "input":
            return Finding(Kind.LINEAR)
        if step.call == "item":
            return self._item(step)
        if step.name == "size" or self.kind([*step.args, step.kwargs]) is Kind.CONSTANT:
            return Finding(Kind.CONSTANT)
        rule = _RULES.get(canonical(step))
        if rule is None and canonical(step) in LINEAR | HOMOGENEOUS:
            rule = _first
        found = rule(self, step) if rule is not None else None
        # Casting to integers rounds.
        if found is None or not (step.dtype is None or step.dtype.is_floating_point):
            return self._dynamic(step)
        return found

    def _item(self, step: Step) -> Finding:
        source = step.args[0].step
        found = self.findings[source]
        kind = found.items[step.args[1]] if found.items else found.kind
        return Finding(kind, (source,) if kind is Kind.LINEAR else (), found.cause)

    def _dynamic(self, step: Step) -> Finding:
        for source in inputs(step):
            if cause := self.findings[source].cause:
                return Finding(Kind.DYNAMIC, cause=cause)
        at = f"at {step.place!r}" if step.place else "in the model's forward"
        return Finding(Kind.DYNAMIC, cause=f"{step.call.removeprefix('torch.')} {at}")

    def terms(self, value: Any) -> tuple[int, ...]:
        """The linear steps in an argument."""
        return tuple(s for s in dict.fromkeys(refs(value)) if self._is(s, Kind.LINEAR))

    def _is(self, step: int, kind: Kind) -> bool:
        return self.findings[step].kind is kind


Rule = Callable[[Analysis, Step], Finding | None]
_RULES: dict[str, Rule] = {}


def _rule(*names: str) -> Callable[[Rule], Rule]:
    def register(rule: Rule) -> Rule:
        _RULES.update(dict.fromkeys(names, rule))
        return rule

    return register


def _linear_in(analysis: Analysis, value: Any) -> Finding | None:
    """Linear in ``value`` if that is."""
    if analysis.kind(value) is not Kind.LINEAR:
        return None
    return Finding(Kind.LINEAR, analysis.terms(value))


def _first(analysis: Analysis, step: Step) -> Finding | None:
    args = list(step.args) + list(step.kwargs.values())
    value = step.kwargs.get("input", args[0])
    others = [arg for arg in args if arg is not value]
    if analysis.kind(others) is not Kind.CONSTANT:
        return None
    found = _linear_in(analysis, value)
    if found and canonical(step) in HOMOGENEOUS:
        found.gate = True
    return found


@_rule("pad")
def _pad(analysis: Analysis, step: Step) -> Finding | None:
    given = arguments(step, "input", "pad", "mode", "value")
    if given["mode"] in (None, "constant") and given["value"] not in (None, 0):
        return None
    return _linear_in(analysis, given["input"])


@_rule("add", "sub", "rsub", "cat", "stack", "hstack", "vstack", "dstack")
def _sum(analysis: Analysis, step: Step) -> Finding | None:
    return _linear_in(analysis, [*step.args, step.kwargs])


@_rule("mul")
def _product(analysis: Analysis, step: Step) -> Finding | None:
    left, right = step.args[:2] if len(step.args) > 1 else tuple(step.kwargs.values())[:2]
    kinds = (analysis.kind(left), analysis.kind(right))
    if kinds == (Kind.LINEAR, Kind.LINEAR):
        gates = [analysis.findings[ref.step].gate for ref in (left, right)]
        sizes = [_size(analysis, ref) for ref in (left, right)]
        # A gate is what came from an activation, or what is one number per channel or position.
        if sizes[0] != sizes[1]:
            return _linear_in(analysis, left if sizes[0] > sizes[1] else right)
        if gates[0] != gates[1]:
            return _linear_in(analysis, right if gates[0] else left)
        return None
    for value, kind, other in ((left, *kinds), (right, *kinds[::-1])):
        if kind is Kind.LINEAR:
            found = _linear_in(analysis, value)
            if found and other is Kind.CONSTANT:
                found.gate = analysis.findings[value.step].gate
            return found
    return None


def _size(analysis: Analysis, ref: Ref) -> int:
    total = 1
    for size in analysis.steps[ref.step].shape or ():
        total *= size
    return total


@_rule("div")
def _quotient(analysis: Analysis, step: Step) -> Finding | None:
    if analysis.kind(step.args[1]) is Kind.LINEAR or step.name.startswith("r"):
        return None
    if step.kwargs.get("rounding_mode") is not None:
        return None
    found = _linear_in(analysis, step.args[0])
    if found and analysis.kind(step.args[1]) is Kind.CONSTANT:
        found.gate = analysis.findings[step.args[0].step].gate
    return found


@_rule("matmul", "einsum")
def _bilinear(analysis: Analysis, step: Step) -> Finding | None:
    linear = analysis.terms([*step.args, step.kwargs])
    return Finding(Kind.LINEAR, linear) if len(linear) == 1 else None


@_rule("linear", "conv1d", "conv2d", "conv3d")
def _layer(analysis: Analysis, step: Step) -> Finding | None:
    given = arguments(step, "input", "weight", "bias")
    if analysis.kind([given["weight"], given["bias"]]) is not Kind.CONSTANT:
        return None
    return _linear_in(analysis, given["input"])


@_rule("batch_norm")
def _batch_norm(analysis: Analysis, step: Step) -> Finding | None:
    if step.kwargs["training"] or step.kwargs["running_var"] is None:
        return None
    return _linear_in(analysis, step.kwargs["input"])


@_rule("layer_norm", "group_norm", "instance_norm", "rms_norm")
def _norm(analysis: Analysis, step: Step) -> Finding | None:
    if analysis.kind([step.kwargs.get("weight"), step.kwargs.get("bias")]) is not Kind.CONSTANT:
        return None
    if step.kwargs.get("running_mean") is not None:
        return None
    return _linear_in(analysis, step.kwargs["input"])


@_rule("scaled_dot_product_attention")
def _attention(analysis: Analysis, step: Step) -> Finding | None:
    value = arguments(step, "query", "key", "value")["value"]
    return _linear_in(analysis, value)


@_rule("var_mean")
def _var_mean(analysis: Analysis, step: Step) -> Finding | None:
    found = _linear_in(analysis, arguments(step, "input")["input"])
    if found:
        found.items = (Kind.DYNAMIC, Kind.LINEAR)
        found.cause = f"var_mean at {step.place!r}"
    return found


@_rule("max", "min")
def _extreme(analysis: Analysis, step: Step) -> Finding | None:
    given = arguments(step, "input", "dim")
    if not isinstance(given["dim"], int):
        return None
    found = _linear_in(analysis, given["input"])
    if found:
        found.items = (Kind.LINEAR, Kind.DYNAMIC)
        found.cause = f"the position of the largest value at {step.place!r}"
    return found


@_rule("masked_fill")
def _masked_fill(analysis: Analysis, step: Step) -> Finding | None:
    given = arguments(step, "input", "mask", "value")
    value = given.get("self", given["input"])
    if given["value"] != 0 or analysis.kind(value) is not Kind.LINEAR:
        return None
    return _linear_in(analysis, value)


@_rule(*ACTIVATIONS, "relu6", "logsigmoid")
def _activation(analysis: Analysis, step: Step) -> Finding | None:
    options = activation(step)
    if options is None:
        return None
    found = _linear_in(analysis, first_argument(step))
    if found:
        found.gate = True
    return found


def first_argument(step: Step) -> Any:
    """What a function of one tensor is applied to."""
    return step.args[0] if step.args else step.kwargs["input"]


def activation(step: Step) -> tuple[str, dict[str, Any]] | None:
    """The name and the options of an activation with f(0) = 0; None for other functions."""
    name = canonical(step)
    if name == "relu6":
        return "hardtanh", {"min_val": 0.0, "max_val": 6.0}
    if name not in ACTIVATIONS:
        return None
    options = dict(step.kwargs)
    for ignored in ("input", "inplace", "training"):
        options.pop(ignored, None)
    if name == "clamp":
        options = dict(zip(("min", "max"), step.args[1:], strict=False)) | options
        if step.name == "clamp_min":
            options = {"min": options["min"]}
        low, high = options.get("min"), options.get("max")
    elif name == "hardtanh":
        low, high = options["min_val"], options["max_val"]
    else:
        low, high = None, None
    for bound, sign in ((low, -1), (high, 1)):
        if bound is not None and (not isinstance(bound, int | float) or bound * sign < 0):
            return None
    return name, options
