"""A converted network: layers, and a list of instructions that says how they are called.

The instructions are plain data, so that a weights file describes its network completely: loading
it needs neither the library that the original came from nor the execution of stored code. For
speed they are turned into the source of one Python function, which `torch.compile` sees like any
other.
"""

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from bcosvit.models.tracing import COMPARISONS, OPERATORS, torch_functions
from bcosvit.nn.bcosified import LAYERS, Container, ConvertedStem, Normalize
from bcosvit.nn.views import DynamicModule


@dataclass(frozen=True)
class Variable:
    """The result of an instruction, as an argument of another one."""

    number: int


@dataclass
class Program:
    """What a `Network` is made of, in values that JSON can hold."""

    layers: dict[str, list[Any]] = field(default_factory=dict)
    """Path -> [class, options]."""
    parameters: dict[str, list[int]] = field(default_factory=dict)
    """Path -> shape, of parameters that belong to no layer."""
    buffers: dict[str, list[Any]] = field(default_factory=dict)
    """Path -> [shape, dtype]."""
    instructions: list[list[Any]] = field(default_factory=list)
    """[result, what, target, arguments, keyword arguments]; the last result is returned."""
    features: int = 0
    """The result that the head averages or picks from."""
    names: dict[str, int] = field(default_factory=dict)
    """Path of a module of the original -> what it returned."""

    def __getstate__(self) -> dict[str, Any]:
        # What `taps` keeps beside the fields holds functions that cannot be pickled.
        return {each.name: getattr(self, each.name) for each in fields(self)}


MOST_LAYERS, MOST_INSTRUCTIONS = 20_000, 100_000
"""Of a program; the largest networks of timm have some thousands."""


def check_program(program: Any) -> None:
    """Checks that values which may come from a file have the form of a `Program`.

    Raises:
        ValueError: They have not.
    """

    def check(is_right: bool, what: str) -> None:
        if not is_right:
            raise ValueError(f"The program of a converted network has {what}.")

    def is_shape(shape: object) -> bool:
        return isinstance(shape, list | tuple) and all(type(size) is int for size in shape)

    names = {each.name for each in fields(Program)}
    check(isinstance(program, dict) and program.keys() <= names, f"other parts than {names}")
    for part in ("layers", "parameters", "buffers", "names"):
        found = program.get(part, {})
        check(isinstance(found, dict) and len(found) <= MOST_LAYERS, f"too many {part}, or no dict")
        for path in found:
            known = isinstance(path, str) and path.isprintable() and len(path) <= 1000
            check(known and path.count(".") < 50, f"a path in {part} that is none")
    for layer in program.get("layers", {}).values():
        check(isinstance(layer, list | tuple) and len(layer) == 2, "a layer without options")
        kind, options = layer
        check(isinstance(kind, str) and kind in LAYERS, "a layer of an unknown kind")
        check(isinstance(options, dict) and all(map(_is_plain, options.values())), "wrong options")
    check(all(map(is_shape, program.get("parameters", {}).values())), "a shape that is none")
    for buffer in program.get("buffers", {}).values():
        check(isinstance(buffer, list | tuple) and len(buffer) == 2, "a buffer without a dtype")
        check(is_shape(buffer[0]) and isinstance(buffer[1], str), "a shape that is none")
        check(isinstance(getattr(torch, buffer[1], None), torch.dtype), "an unknown dtype")
    instructions = program.get("instructions", [])
    check(isinstance(instructions, list) and len(instructions) <= MOST_INSTRUCTIONS, "no list")
    for instruction in instructions:
        check(isinstance(instruction, list | tuple) and len(instruction) == 5, "no instruction")
        result, what, target, args, kwargs = instruction
        check(type(result) is int and result > 0, "a result without a number")
        check(isinstance(what, str) and isinstance(target, str), "an instruction without a target")
        check(isinstance(args, list) and isinstance(kwargs, dict), "no arguments")
        # A converted layer takes the image's path (the first one also that of ones), λ and B:
        # results, never values of their own.
        kind = program.get("layers", {}).get(target, [""])[0] if what == "layer" else ""
        if kind.startswith("Converted"):
            taken = args[: 4 if kind == "ConvertedStem" else 3]
            check(all(isinstance(a, dict) for a in taken), "a layer of values instead of results")
    check(type(program.get("features", 0)) is int, "features without a number")
    check(all(type(n) is int for n in program.get("names", {}).values()), "names without numbers")


def _is_plain(value: object) -> bool:
    """Whether an option of a layer is a small value, or a few of them."""
    if isinstance(value, dict):
        return len(value) < 20 and all(map(_is_plain, value.values()))
    if isinstance(value, list | tuple):
        return len(value) < 20 and all(isinstance(each, int | float | str) for each in value)
    if isinstance(value, float):
        return math.isfinite(value)
    return value is None or isinstance(value, int | str)


class Network(DynamicModule):
    """Encoded images [B, 6, H, W] -> logits [B, K], as a `Program` says."""

    fade: Tensor
    """λ, the factor on all additive constants."""
    b: Tensor
    """B, the exponent of the layers that are B-cos transforms."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program = program
        self.register_buffer("fade", torch.ones(()))
        self.register_buffer("b", torch.ones(()))
        for path, (kind, options) in program.layers.items():
            parent, name = self._parent(path)
            parent.add_module(name, LAYERS[kind](**options))
        for path, shape in program.parameters.items():
            parent, name = self._parent(path)
            parent.register_parameter(name, nn.Parameter(torch.empty(shape)))
        for path, (shape, dtype) in program.buffers.items():
            parent, name = self._parent(path)
            parent.register_buffer(name, torch.empty(shape, dtype=getattr(torch, dtype)))
        self._run = compiled(program)

    def forward(self, encoded: Tensor) -> Tensor:
        return self._run(self, encoded)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Random weights, for a network that is not filled with those of its original."""
        for module in self.modules():
            for name, tensor in module.named_parameters(recurse=False):
                if name == "weight" and tensor.ndim > 1:
                    nn.init.kaiming_normal_(tensor)
                elif name in ("weight", "bias"):
                    nn.init.constant_(tensor, float(name == "weight"))
                else:
                    nn.init.trunc_normal_(tensor, std=0.02)
            for name, buffer in module.named_buffers(recurse=False):
                # Statistics and λ have their start already.
                if isinstance(module, ConvertedStem | Normalize | Container):
                    buffer.fill_(name == "std")

    def features(self, encoded: Tensor) -> Tensor:
        """What the head averages or picks from: maps [n, c, h, w] or tokens [n, t, d]."""
        results = [instruction[0] for instruction in self.program.instructions]
        end = results.index(self.program.features) + 1
        kept = replace(self.program, instructions=self.program.instructions[:end])
        return compiled(kept)(self, encoded)

    def _parent(self, path: str) -> tuple[nn.Module, str]:
        *parents, name = path.split(".")
        module: nn.Module = self
        for part in parents:
            if part not in module._modules:
                module.add_module(part, Container())
            module = module.get_submodule(part)
        return module, name

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "_run"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._run = compiled(self.program)


def encode(value: Any) -> Any:
    """An argument of an instruction as JSON."""
    if isinstance(value, Variable):
        return {"variable": value.number}
    if isinstance(value, slice):
        return {"slice": [encode(value.start), encode(value.stop), encode(value.step)]}
    if isinstance(value, list):
        return [encode(item) for item in value]
    if isinstance(value, tuple):
        return {"tuple": [encode(item) for item in value]}
    if isinstance(value, torch.dtype | torch.memory_format):
        return {"torch": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": None}
    if value is Ellipsis:
        return {"ellipsis": None}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ValueError(f"{type(value).__name__} is no argument that a converted model can hold.")


def _source(value: Any) -> str:
    """The Python expression for an encoded argument."""
    if isinstance(value, list):
        return "[" + ", ".join(map(_source, value)) + "]"
    if not isinstance(value, dict):
        return f"float({str(value)!r})" if isinstance(value, float) else repr(value)
    ((kind, content),) = value.items()
    if kind == "variable":
        return f"v{int(content)}"
    if kind == "tuple":
        return "(" + "".join(f"{_source(item)}, " for item in content) + ")"
    if kind == "slice":
        return f"slice({', '.join(map(_source, content))})"
    if kind == "torch":
        if not isinstance(getattr(torch, content), torch.dtype | torch.memory_format):
            raise ValueError(f"torch.{content} is no dtype.")
        return f"torch.{content}"
    return {"device": "self.fade.device", "ellipsis": "..."}[kind]


def variables_in(value: Any) -> set[int]:
    """The results that an encoded argument refers to."""
    if isinstance(value, list):
        return set().union(*map(variables_in, value)) if value else set()
    if isinstance(value, dict):
        ((kind, content),) = value.items()
        return {content} if kind == "variable" else variables_in(content)
    return set()


def _attribute(path: str) -> str:
    """``self.layer1.0.conv1`` as an expression."""
    source = "self"
    for part in path.split("."):
        source = f"{source}.{part}" if part.isidentifier() else f"getattr({source}, {part!r})"
    return source


def _guard(comparison: str, left: Any, right: Any, outcome: bool) -> None:
    # A bool before it is compared: symbolic sizes of an export compare with nothing else.
    if bool(COMPARISONS[comparison](left, right)) != outcome:
        raise ValueError(
            "Images of this size take another way through the original model than those that it "
            "was converted with; convert it again with image_size set to theirs."
        )


def _bounded(function: Callable[..., Any]) -> Callable[..., Any]:
    """An operator that refuses numbers which no size of a tensor is."""

    def call(*operands: Any) -> Any:
        for operand in operands:
            if not isinstance(operand, int | float) or not abs(operand) < 2**53:
                raise ValueError(f"{type(operand).__name__} is no size of a tensor.")
        if function is operator.pow and abs(operands[1]) > 64:
            raise ValueError(f"{operands[1]} is no exponent of a size.")
        return function(*operands)

    return call


def compiled(
    program: Program, *, every: bool = False, bounded: bool = False
) -> Callable[[nn.Module, Tensor], Tensor]:
    """The function (self, encoded) -> logits that runs the instructions.

    With ``every`` it returns a dict of all results by their numbers, with ``bounded`` it refuses
    arithmetic on numbers that are no sizes.
    """
    functions = torch_functions()
    scope: dict[str, Any] = {"torch": torch, "guard": _guard}
    lines = ["def run(self, v0):"]
    last_use: dict[int, int] = {}
    for position, (_, _, _, args, kwargs) in enumerate(program.instructions):
        for number in variables_in(args) | variables_in(list(kwargs.values())):
            last_use[number] = position
    result = 0
    for position, (result, what, target, args, kwargs) in enumerate(program.instructions):
        given = [_source(arg) for arg in args]
        given += [f"{key}={_source(value)}" for key, value in kwargs.items()]
        if not all(key.isidentifier() for key in kwargs):
            raise ValueError(f"{kwargs} are no keyword arguments.")
        arguments = ", ".join(given)
        if what == "layer" and target in program.layers:
            call = f"{_attribute(target)}({arguments})"
        elif what == "get" and target in ("fade", "b", *program.parameters, *program.buffers):
            call = _attribute(target)
        elif what == "item":
            call = f"{given[0]}[{given[1]}]"
        elif what == "guard":
            call = f"guard({arguments})"
        else:
            known = {"operator": OPERATORS, "function": functions}.get(what, {})
            if target not in known:
                raise ValueError(f"{target} is no function that a converted model can call.")
            name = "f_" + target.replace(".", "_")
            known_function = known[target]
            is_bounded = bounded and what == "operator"
            scope[name] = _bounded(known_function) if is_bounded else known_function
            call = f"{name}({arguments})"
        lines.append(f"    v{int(result)} = {call}")
        used = variables_in(args) | variables_in(list(kwargs.values()))
        # What nobody needs any more is given back at once, as between layers of any model.
        done = sorted(number for number in used if last_use[number] == position)
        if not every:
            lines += [f"    v{number} = None" for number in done if number != result]
    results = ", ".join(f"{int(i[0])}: v{int(i[0])}" for i in program.instructions)
    lines.append(f"    return {{{results}}}" if every else f"    return v{int(result)}")
    try:
        exec("\n".join(lines), scope)
    except SyntaxError as error:
        raise ValueError(
            f"The instructions of a converted model are none ({error.msg})."
        ) from error
    run: Callable[[nn.Module, Tensor], Tensor] = scope["run"]
    return run
