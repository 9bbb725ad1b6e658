"""Where a converted network can be cut, and its two halves as programs of their own.

A tap is a result of the network: a map [n, c, h, w] on the path of the image. Where all that comes
later depends on the image through this map alone, the network can be cut there, and what comes
later is a network that takes the map.
"""

import dataclasses
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from bcosvit.messages import and_more, printable
from bcosvit.models.network import Network, Program, compiled, variables_in

SAMPLES = 5
"""Images in the batch that shapes are computed with; few axes have this length by chance."""
LARGE = 1792
"""Pixels a side at which strides are read off: a multiple of 2⁸ and of 7."""

MOST_PARTS = 10_000
"""Into which a tensor may be cut at once."""
MOST_NUMBERS = 2**40
"""In a tensor of the batch, at the largest image that shapes are computed for."""

Shapes = dict[int, tuple[int, ...]]
Run = Callable[[nn.Module, Tensor], Tensor]
"""Takes the network whose layers are used, and its input or that of a part."""


class _Bounded(TorchDispatchMode):
    """Refuses calls that would take memory or time though nothing is computed."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        device = kwargs.get("device")
        if device is not None and torch.device(device).type != "meta":
            raise ValueError(f"{func} makes a tensor on a device of its own.")
        name = func.overloadpacket.__name__
        if name in ("unbind", "split", "unsafe_split", "unsafe_chunk"):
            place = 1 if name == "unbind" else 2
            size = args[0].shape[args[place] if len(args) > place else kwargs.get("dim", 0)]
            parts = size if name == "unbind" else size // max(int(args[1]), 1)
            if parts > MOST_PARTS:
                raise ValueError(f"{func} cuts a tensor into {parts} parts.")
        results = func(*args, **kwargs)
        for result in results if isinstance(results, list | tuple) else (results,):
            if isinstance(result, torch.Tensor) and result.numel() > MOST_NUMBERS:
                raise ValueError(f"{func} makes a tensor of the shape {list(result.shape)}.")
        return results


def shapes(program: Program, height: int, width: int) -> Shapes:
    """The shape of every tensor that the network computes from images of this size.

    Raises:
        ValueError: Images of this size do not fit.
    """
    # Linear layers have the shapes of B-cos transforms, and are faster.
    layers = {
        path: [kind, {**options, "bcos": False} if "bcos" in options else options]
        for path, (kind, options) in program.layers.items()
    }
    program = dataclasses.replace(program, layers=layers)
    with torch.device("meta"):
        network = Network(program)
    images = torch.empty(SAMPLES, 6, height, width, device="meta")
    run = compiled(program, every=True, bounded=True)
    with torch.no_grad(), torch.device("meta"), _Bounded():  # type: ignore[no-untyped-call]
        try:
            found: Any = run(network, images)
        # A program from a file may call any function of torch with any arguments.
        except Exception as error:
            first = printable((str(error).splitlines() or [type(error).__name__])[0])
            raise ValueError(f"Images of {height}×{width} pixels do not fit: {first}") from error
    return {n: tuple(t.shape) for n, t in found.items() if isinstance(t, torch.Tensor)}


def named(program: Program, name: str) -> int:
    """The result that a name stands for: of a module, of a layer, or ``v12`` for the twelfth.

    Raises:
        ValueError: There is no such name.
    """
    if name in program.names:
        return program.names[name]
    results = [instruction[0] for instruction in program.instructions]
    if re.fullmatch(r"v\d+", name) and int(name[1:]) in results:
        return int(name[1:])
    path = f"original.{name}"
    for result, what, target, *_ in reversed(program.instructions):
        if what == "layer" and (target in (name, path) or target.startswith(f"{path}.")):
            return int(result)
    known = [*program.names] or [p.removeprefix("original.") for p in program.layers]
    raise ValueError(
        f"tap = {name!r} does not exist in the backbone; give the name of a module "
        f"({and_more(known, 12)}), or a stride."
    )


def name_of(program: Program, number: int) -> str:
    """A name of this result, which `named` finds again."""
    same = [name for name, result in program.names.items() if result == number and name]
    return min(same, key=len) if same else f"v{number}"


def is_map(shape: tuple[int, ...] | None) -> bool:
    """Whether a result of `shapes` is a map [n, c, h, w]."""
    return shape is not None and len(shape) == 4 and shape[0] == SAMPLES


def at_stride(program: Program, stride: int | None, found: Shapes, size: tuple[int, int]) -> int:
    """The last map of this stride, or of the largest, at which the network can be cut.

    Where only layers that look at one position each lead to that map from a narrower one, such as
    the widening 1×1 convolution in front of a pool, it is the narrower one.

    Args:
        program: The network.
        stride: Pixels per position; None for the largest stride.
        found: The shapes of all results at ``size``.
        size: Height and width of the image.

    Raises:
        ValueError: There is none.
    """
    strides: dict[int, list[int]] = {}
    on_path = path(program)
    for number, _, target, *_ in program.instructions:
        shape = found.get(number)
        if number not in on_path or not is_map(shape) or target.endswith("pad"):
            continue
        assert shape is not None
        across, down = (round(s / n) for s, n in zip(size, shape[2:], strict=True))
        if across == down and min(shape[2:]) > 1 and _is_cut(program, number):
            strides.setdefault(across, []).append(number)
    stride = max(strides, default=None) if stride is None else stride
    if stride is None or stride not in strides:
        raise ValueError(
            f"tap = {stride} is not allowed: the backbone has no map of stride {stride} at which "
            f"it can be cut; give one of {', '.join(map(str, sorted(strides)))}, or the name of a "
            f"module."
        )
    *others, last = strides[stride]
    for number in reversed(others):
        if any(_is_spatial(program, i) for i in program.instructions if number < i[0] <= last):
            break
        if found[number][1] < found[last][1]:
            last = number
    return last


def _is_spatial(program: Program, instruction: list[Any]) -> bool:
    """Whether positions of a map are mixed or left out."""
    _, what, target, *_ = instruction
    if what != "layer":
        return any(word in target for word in ("pool", "interpolate", "matmul", "conv"))
    kind, options = program.layers[target]
    if not kind.startswith(("ConvertedConv", "ConvertedStem")):
        return kind in ("AveragePool", "ConvertedAttention")
    stride = options.get("stride", 1)
    strides = stride if isinstance(stride, list | tuple) else [stride]
    return {*(options["weight"] or [0, 0, 3])[2:], *strides} != {1}


def path(program: Program) -> set[int]:
    """The results that are linear in the image once the network is frozen."""
    on_path = {0}
    for (result, what, target, *_), (_, uses) in zip(
        program.instructions, _uses(program), strict=True
    ):
        if what in ("get", "guard", "operator") or target == "torch.Tensor.size":
            continue
        if what == "layer" and program.layers[target][0] in ("Freeze", "Ones"):
            continue
        if not on_path.isdisjoint(uses):
            on_path.add(result)
    return on_path


def front(program: Program, number: int) -> Program:
    """The part of the network that computes the result ``number``, with all guards on sizes."""
    keep = _needed(program, {number})
    later = _depends(program, number)
    for instruction, (result, uses) in zip(program.instructions, _uses(program), strict=True):
        if instruction[1] == "guard" and result not in later:
            keep |= {result} | _needed(program, uses)
    kept = [i for i in program.instructions if i[0] in keep]
    # What is returned is the last result.
    last = next(i for i in kept if i[0] == number)
    return _part(program, [*(i for i in kept if i is not last), last], features=number)


def halves(program: Program, number: int) -> tuple[Program, Program] | None:
    """The network up to the result ``number`` and the rest of it, which takes that result.

    Returns:
        The halves; None where the rest also uses what was computed before.
    """
    if not _is_cut(program, number):
        return None
    later = _depends(program, number)
    rest = [i for i in program.instructions if i[0] in later]
    used = set().union(*(uses for result, uses in _uses(program) if result in later))
    copied = [i for i in program.instructions if i[0] in used - later - {number}]
    # A program's input is the result 0, here the map; it has as many samples as the image.
    moved = [_renamed(i, number) for i in (*copied, *rest)]
    return front(program, number), _part(program, moved, features=moved[-1][0])


def around(network: Network, path: str) -> tuple[Run, Run]:
    """What a network computes before and from a layer on, with the network's own layers.

    Args:
        network: The network, which both functions take first.
        path: The path of the layer.

    Returns:
        A function from the network's input to the layer's, and one from there to the result.

    Raises:
        ValueError: The layer is used several times, or the network cannot be cut before it.
    """
    program = network.program
    known: dict[str, tuple[Run, Run]] = program.__dict__.setdefault("_around", {})
    if path not in known:
        calls = [i for i in program.instructions if i[1] == "layer" and i[2] == path]
        inputs = variables_in(calls[0][3][:1]) if len(calls) == 1 else set()
        parts = halves(program, inputs.pop()) if len(inputs) == 1 else None
        if parts is None:
            raise ValueError(
                f"The network cannot be cut before its layer {path}; train it as a whole, with "
                f"another recipe."
            )
        known[path] = (compiled(parts[0]), compiled(parts[1]))
    return known[path]


def _is_cut(program: Program, number: int) -> bool:
    """Whether all results behind this one can be computed from it alone."""
    later = _depends(program, number)
    if program.instructions[-1][0] not in later:
        return False
    free = {
        result
        for result, what, target, args, _ in program.instructions
        if what == "get" or (target == "torch.Tensor.size" and args == [{"variable": 0}, 0])
    }
    return all(
        uses <= later | free | {number} for result, uses in _uses(program) if result in later
    )


def _uses(program: Program) -> list[tuple[int, set[int]]]:
    """The results that each result is computed from."""
    known: list[tuple[int, set[int]]] | None = program.__dict__.get("_uses")
    if known is None:
        known = [(i[0], variables_in([i[3], *i[4].values()])) for i in program.instructions]
        program.__dict__["_uses"] = known
    return known


def _depends(program: Program, number: int) -> set[int]:
    """The results that are computed from the result ``number``, without itself."""
    found = {number}
    for result, uses in _uses(program):
        if not found.isdisjoint(uses):
            found.add(result)
    return found - {number}


def _needed(program: Program, wanted: set[int]) -> set[int]:
    """The results that others are computed from, with those."""
    wanted = set(wanted)
    for result, uses in reversed(_uses(program)):
        if result in wanted:
            wanted |= uses
    return wanted


def _renamed(instruction: list[Any], number: int) -> list[Any]:
    def rename(value: Any) -> Any:
        if isinstance(value, list):
            return [rename(item) for item in value]
        if isinstance(value, dict):
            ((kind, content),) = value.items()
            if kind == "variable":
                return {"variable": 0 if content == number else content}
            return {kind: rename(content)}
        return value

    result, what, target, args, kwargs = instruction
    return [result, what, target, rename(args), {k: rename(v) for k, v in kwargs.items()}]


def _part(program: Program, instructions: list[list[Any]], features: int) -> Program:
    """A program of these instructions, with the layers and tensors that they use."""
    used = set(_targets(instructions))
    return dataclasses.replace(
        program,
        layers={k: v for k, v in program.layers.items() if k in used},
        parameters={k: v for k, v in program.parameters.items() if k in used},
        buffers={k: v for k, v in program.buffers.items() if k in used},
        instructions=instructions,
        features=features,
        names={},
    )


def _targets(instructions: list[list[Any]]) -> Iterator[str]:
    for _, what, target, *_ in instructions:
        if what in ("layer", "get"):
            yield target
