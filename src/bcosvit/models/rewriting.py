"""Writes a recording as a program of layers that can be frozen and keep constants apart.

Steps on the path of the image become layers of `nn.bcosified`, or stay as they are where they are
linear and add nothing. Steps beside it, which compute gates and attention matrices, are kept as
recorded; what they take from the path is frozen.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any

import torch
from torch import Tensor, nn

from bcosvit.models.linearity import (
    MOVES,
    Analysis,
    Kind,
    activation,
    arguments,
    canonical,
    first_argument,
    inputs,
)
from bcosvit.models.network import Network, Program, Variable, encode
from bcosvit.models.tracing import Recording, Ref, Step, record
from bcosvit.nn.bcosified import Container, ConvertedBatchNorm, ConvertedStem, Normalize


def recordings(
    model: nn.Module, size: tuple[int, int], example: Tensor
) -> tuple[Recording, list[int | None], bool]:
    """A recording, the axis that holds the samples in each step, and whether any size works."""

    def images(batch: int, height: int, width: int) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        return torch.rand(batch, 3, height, width, generator=generator).to(example)

    # Two and three samples show which axis of a tensor holds them.
    two, three = record(model, images(2, *size)), record(model, images(3, *size))
    if not _same(two, three):
        raise ValueError(
            "The model cannot be converted: what it computes depends on how many images it is "
            "given, beyond the sizes of its tensors."
        )
    axes = [_batch_axis(a.shape, b.shape) for a, b in zip(two.steps, three.steps, strict=True)]
    try:
        other = record(model, images(2, size[0] + 32, size[1] + 64))
        any_size = _same(two, other)
    except Exception:  # whatever the model raises for a size that it does not take
        any_size = False
    return two, axes, any_size


def _same(one: Recording, other: Recording) -> bool:
    """Whether two recordings are of the same calls."""
    return len(one.steps) == len(other.steps) and all(
        a.call == b.call and (_equal((a.args, a.kwargs), (b.args, b.kwargs)) or _repeats(a, b))
        for a, b in zip(one.steps, other.steps, strict=True)
    )


def _repeats(two: Step, three: Step) -> bool:
    """Whether a value that Python code made is the same for each of two and of three samples."""
    axis = _batch_axis(two.shape, three.shape)
    if two.call != "value" or axis is None or two.shape is None or two.shape[axis] != 2:
        return False
    first = two.args[0].narrow(axis, 0, 1)
    return all(bool((step.args[0] == first).all()) for step in (two, three))


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, tuple | list):
        return len(one) == len(other) and all(map(_equal, one, other))
    if isinstance(one, dict):
        return list(one) == list(other) and _equal(list(one.values()), list(other.values()))
    if isinstance(one, slice):
        return _equal((one.start, one.stop, one.step), (other.start, other.stop, other.step))
    if isinstance(one, Tensor):
        return one.shape == other.shape and bool(torch.equal(one, other))
    return bool(one == other)


def _batch_axis(two: tuple[int, ...] | None, three: tuple[int, ...] | None) -> int | None:
    """The axis that is 2·k long with two samples and 3·k with three."""
    if two is None or three is None:
        return None
    differing = [axis for axis, (a, b) in enumerate(zip(two, three, strict=True)) if a != b]
    if len(differing) == 1 and two[differing[0]] * 3 == three[differing[0]] * 2:
        return differing[0]
    return None


@dataclass(frozen=True)
class WriterOptions:
    """Which layers become B-cos transforms, as for `bcosify`."""

    bcos: bool
    uncentered: bool
    linear: tuple[str, ...]
    depthwise: bool


class Writer:
    """Writes a recording as a program."""

    def __init__(
        self, recording: Recording, axes: list[int | None], options: WriterOptions, guards: bool
    ) -> None:
        self.recording, self.steps = recording, recording.steps
        self.axes, self.options, self.guards = axes, options, guards
        self.analysis = Analysis(recording)
        self.program = Program()
        self.head = ""
        self.stem = ""
        self.users: list[list[int]] = [[] for _ in self.steps]
        for number, step in enumerate(self.steps):
            for source in inputs(step):
                self.users[source].append(number)
        self._variables: dict[int, Variable] = {}
        self._cache: dict[Any, Variable] = {}
        self._next = 1
        self._values: dict[str, Tensor] = {}

    # Instructions

    def emit(
        self, what: str, target: str, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Variable:
        given = {key: encode(value) for key, value in (kwargs or {}).items()}
        number, self._next = self._next, self._next + 1
        self.program.instructions.append([number, what, target, encode(list(args)), given])
        return Variable(number)

    def layer(self, path: str, kind: str, options: dict[str, Any], *args: Any) -> Variable:
        self.program.layers[path] = [
            kind,
            {k: list(v) if isinstance(v, tuple) else v for k, v in options.items()},
        ]
        return self.emit("layer", path, args)

    def shared(self, kind: str, name: str, options: dict[str, Any], *args: Any) -> Variable:
        """A call of a layer without weights, of which the network has one."""
        return self.layer(f"shared.{name}", kind, options, *args)

    def get(self, path: str) -> Variable:
        key = ("get", path)
        if key not in self._cache:
            self._cache[key] = self.emit("get", path)
        return self._cache[key]

    @property
    def fade(self) -> Variable:
        return self.get("fade")

    @property
    def b(self) -> Variable:
        return self.get("b")

    def frozen(self, step: int) -> Variable:
        """A step's result where it is no longer the image's path."""
        key = ("frozen", step)
        if key not in self._cache:
            self._cache[key] = self.shared("Freeze", "freeze", {}, self._variables[step])
        return self._cache[key]

    # Values

    def value(self, argument: Any, *, on_path: bool) -> Any:
        """An argument with variables in the place of steps."""
        if isinstance(argument, Ref):
            step = argument.step
            if step in self.analysis.path and not on_path:
                if self.steps[step].shape is None:
                    return self._variables[step]
                return self.frozen(step)
            return self._variables[step]
        if isinstance(argument, slice):
            parts = (argument.start, argument.stop, argument.step)
            return slice(*(self.value(part, on_path=on_path) for part in parts))
        if isinstance(argument, tuple | list):
            return type(argument)(self.value(item, on_path=on_path) for item in argument)
        if isinstance(argument, dict):
            return {k: self.value(v, on_path=on_path) for k, v in argument.items()}
        return argument

    def write(self) -> Program:
        needed = self._needed()
        for number, step in enumerate(self.steps):
            if number in needed:
                written = self._step(number, step)
                if written is not None:
                    self._variables[number] = written
        self.program.features = self._features()
        self.program.names = self._names()
        # The last instruction's result is what the network returns.
        assert self.program.instructions[-1][0] == self._variables[self.recording.output].number
        return self.program

    def _features(self) -> int:
        """The last result on the path that still has positions."""
        step = self.recording.output
        while sum(size > 1 for size in (self.steps[step].shape or ())[1:]) < 2:
            terms = self.analysis.findings[step].terms
            if not terms:
                break
            step = terms[0]
        return self._variables[step].number

    def _names(self) -> dict[str, int]:
        """The last result on the path within each module."""
        names: dict[str, int] = {}
        for number, step in enumerate(self.steps):
            if number in self.analysis.path and number in self._variables and step.shape:
                parts = step.place.split(".") if step.place else []
                for end in range(1, len(parts) + 1):
                    names[".".join(parts[:end])] = self._variables[number].number
        return names

    def _needed(self) -> set[int]:
        needed: set[int] = set()
        output = self.recording.output
        guards = [n for n in range(output) if self.guards and self.steps[n].call == "guard"]
        left = [output, *guards]
        while left:
            number = left.pop()
            if number not in needed:
                needed.add(number)
                left += inputs(self.steps[number])
        return needed

    def _step(self, number: int, step: Step) -> Variable | None:
        if step.call == "input":
            return self._input(number)
        if step.call in ("parameter", "buffer"):
            return None if self._belongs_to_layer(number) else self._tensor(number, step)
        if step.call == "value":
            path = f"values.{number}"
            (tensor,) = step.args
            axis = self.axes[number]
            if axis is not None:
                # One for each sample, all alike.
                tensor = tensor.narrow(axis, 0, 1).clone()
            self._values[path] = tensor
            dtype = str(tensor.dtype).removeprefix("torch.")
            self.program.buffers[path] = [list(tensor.shape), dtype]
            value = self.get(path)
            if axis is None:
                return value
            sizes: list[Any] = [-1] * tensor.ndim
            sizes[axis] = self.emit("function", "torch.Tensor.size", [Variable(0), 0])
            return self.emit("function", "torch.Tensor.expand", [value, sizes])
        if step.call == "guard":
            args = [self.value(argument, on_path=False) for argument in step.args]
            self.emit("guard", "", args)
            return None
        if step.call.startswith("operator."):
            args = [self.value(argument, on_path=False) for argument in step.args]
            return self.emit("operator", step.name, args)
        if number in self.analysis.path:
            return self._on_path(number, step)
        if step.call == "item":
            # A tuple cannot be frozen, but what is taken out of it can.
            item = self.emit("item", "", [self.value(a, on_path=True) for a in step.args])
            if step.args[0].step not in self.analysis.path:
                return item
            return self.shared("Freeze", "freeze", {}, item)
        return self._plain(step, on_path=step.name == "size")

    def _plain(self, step: Step, *, on_path: bool) -> Variable:
        step = _any_layout(step)
        args = [self.value(argument, on_path=on_path) for argument in step.args]
        kwargs = {k: self.value(v, on_path=on_path) for k, v in step.kwargs.items()}
        return self.emit("function", step.call, args, kwargs)

    def _tensor(self, number: int, step: Step) -> Variable:
        path, shape = _path(step.args[0]), list(step.shape or ())
        if step.call == "parameter":
            self.program.parameters[path] = shape
        else:
            self.program.buffers[path] = [shape, str(step.dtype).removeprefix("torch.")]
        return self.get(path)

    # The image's path

    def _input(self, number: int) -> Variable | None:
        if self.options.bcos and (stem := self._stem(number)) is not None:
            self.stem = stem
            self._cache["ones", number] = self.shared("Ones", "ones", {}, Variable(0))
            return Variable(0)
        return self.shared("Normalize", "normalize", {}, Variable(0), self.fade)

    def _stem(self, number: int) -> str | None:
        """The path of the only convolution on the image, if nothing but padding comes before."""
        step = number
        while True:
            users = [u for u in self.users[step] if self.steps[u].name != "size"]
            if len(users) != 1:
                return None
            (user,) = users
            if canonical(self.steps[user]) == "pad":
                step = user
                continue
            found = self.steps[user]
            if canonical(found) != "conv2d" or arguments(found, *_CONV)["groups"] not in (None, 1):
                return None
            return self._own_path(user)

    def _on_path(self, number: int, step: Step) -> Variable:
        name = canonical(step)
        if name in ("add", "sub", "rsub", "cat", "stack", "hstack", "vstack", "dstack"):
            return self._sum(number, step)
        if name in ("conv1d", "conv2d", "conv3d", "linear"):
            return self._weighted(number, step, name)
        if name == "batch_norm":
            return self._batch_norm(number, step)
        if name in ("layer_norm", "group_norm", "instance_norm", "rms_norm"):
            return self._norm(number, step, name)
        if name in _SHARED:
            args = [self._operand(number, argument) for argument in step.args]
            kwargs = {k: self._operand(number, v) for k, v in step.kwargs.items()}
            self.program.layers[f"shared.{name}"] = [_SHARED[name], {}]
            return self.emit("layer", f"shared.{name}", args, kwargs)
        if (found := activation(step)) is not None:
            function, options = found
            label = "_".join([function, *(f"{v}" for v in options.values())])
            label = "".join(c if c.isalnum() else "_" for c in label)
            given = {"function": function, "options": options}
            x = self._operand(number, first_argument(step))
            return self.shared("Activation", label, given, x)
        if name.startswith("dropout") or name in ("alpha_dropout", "feature_dropout"):
            return self._variables[self.analysis.findings[number].terms[0]]
        if name == "item":
            return self.emit("item", "", [self.value(a, on_path=True) for a in step.args])
        step = _any_layout(step)
        args = [self._operand(number, argument) for argument in step.args]
        kwargs = {k: self._operand(number, v) for k, v in step.kwargs.items()}
        if name == "pad":
            source = first_argument(step).step
            if (ones := self._cache.get(("ones", source))) is not None:
                rest = {k: v for k, v in kwargs.items() if k != "input"}
                padded = self.emit("function", step.call, [ones, *args[1:]], rest)
                self._cache["ones", number] = padded
        return self.emit("function", step.call, args, kwargs)

    def _operand(self, number: int, argument: Any) -> Any:
        """An argument of a step on the path: its terms as they are, the others frozen."""
        terms = self.analysis.findings[number].terms
        if isinstance(argument, Ref):
            return self.value(argument, on_path=argument.step in terms)
        if isinstance(argument, tuple | list):
            return type(argument)(self._operand(number, item) for item in argument)
        return self.value(argument, on_path=False)

    def _axis(self, number: int) -> int:
        axis = self.axes[number]
        if axis is None:
            step = self.steps[number]
            raise ValueError(
                f"The model cannot be converted: {step.call} at {step.place!r} mixes the images of "
                f"a batch, so that contributions would not belong to one image."
            )
        return axis

    def _sum(self, number: int, step: Step) -> Variable:
        joins = step.name in ("cat", "concat", "concatenate", "stack", "hstack", "vstack", "dstack")
        like = self._variables[self.analysis.findings[number].terms[0]]

        def term(argument: Any) -> Any:
            constant = not (isinstance(argument, Ref) and self._is_linear(argument.step))
            if not constant:
                return self.value(argument, on_path=True)
            value = self.value(argument, on_path=False)
            # What is joined has samples of its own; what is added takes those of the result.
            source = argument.step if joins else number
            axis = self._axis(source)
            return self.shared(
                "Constant",
                f"constant{axis}",
                {"batch_axis": axis},
                value,
                value if joins else like,
                self.fade,
            )

        if joins:
            tensors, *rest = step.args or (step.kwargs["tensors"],)
            kwargs = {k: v for k, v in step.kwargs.items() if k != "tensors"}
            return self.emit("function", step.call, [[term(t) for t in tensors], *rest], kwargs)
        left, right = step.args[:2]
        kwargs = {k: self.value(v, on_path=False) for k, v in step.kwargs.items()}
        call = {"radd": "torch.Tensor.add"}.get(step.name, step.call)
        return self.emit("function", call, [term(left), term(right)], kwargs)

    def _is_linear(self, step: int) -> bool:
        return self.analysis.findings[step].kind is Kind.LINEAR

    def _own_path(self, number: int) -> str | None:
        """The path of a layer whose weight and bias are parameters of one module, else None."""
        step = self.steps[number]
        if canonical(step) == "batch_norm":
            tensors = [step.kwargs[k] for k in ("running_mean", "weight", "bias")]
            leaves = ["running_mean", "weight", "bias"]
        else:
            given = arguments(step, "input", "weight", "bias")
            tensors, leaves = [given["weight"], given["bias"]], ["weight", "bias"]
        parents = set()
        for tensor, leaf in zip(tensors, leaves, strict=True):
            if tensor is None:
                continue
            source = self.steps[tensor.step]
            if source.call not in ("parameter", "buffer"):
                return None
            parent, _, last = str(source.args[0]).rpartition(".")
            others = [u for u in self.users[tensor.step] if u != number]
            if last != leaf or any(self.steps[u].name != "size" for u in others):
                return None
            parents.add(parent)
        return _path(parents.pop()) if len(parents) == 1 and "" not in parents else None

    def _belongs_to_layer(self, number: int) -> bool:
        """Whether a tensor lives in a layer that takes it from there."""
        users = [u for u in self.users[number] if self.steps[u].name != "size"]
        return all(
            user in self.analysis.path
            and canonical(self.steps[user]) in _WITH_WEIGHTS
            and self._own_path(user) is not None
            for user in users
        )

    def _weighted(self, number: int, step: Step, name: str) -> Variable:
        given = arguments(step, *(_CONV if name != "linear" else ("input", "weight", "bias")))
        path = self._own_path(number)
        weight = self.steps[given["weight"].step]
        shape = list(weight.shape or ())
        bias = None if given["bias"] is None else list(self.steps[given["bias"].step].shape or ())
        options: dict[str, Any] = {
            "weight": shape if path else None,
            "bias": bias if path else None,
            "bcos": self._is_bcos(number, name, given, shape, path),
            # Samples cannot be told apart only where there is nothing to add.
            "batch_axis": 0 if bias is None else self._axis(number),
        }
        if name != "linear":
            for key, default in (("stride", 1), ("padding", 0), ("dilation", 1), ("groups", 1)):
                options[key] = default if given[key] is None else given[key]
        x = self._operand(number, given["input"])
        kind = "ConvertedLinear" if name == "linear" else "ConvertedConv"
        if path is None:
            extra = [self.value(given[k], on_path=False) for k in ("weight", "bias")]
            return self.layer(f"steps.{name}{number}", kind, options, x, self.fade, self.b, *extra)
        self.head = path
        if path == self.stem:
            options["weight"] = [shape[0], 6, *shape[2:]]
            ones = self._cache["ones", given["input"].step]
            return self.layer(path, "ConvertedStem", options, x, ones, self.fade, self.b)
        return self.layer(path, kind, options, x, self.fade, self.b)

    def _is_bcos(
        self, number: int, name: str, given: dict[str, Any], shape: list[int], path: str | None
    ) -> bool:
        if not self.options.bcos or name in ("conv1d", "conv3d"):
            return False
        name_there = (path or "").removeprefix(_path(""))
        if path is not None and any(fnmatch(name_there, p) for p in self.options.linear):
            return False
        if name == "conv2d" and shape[1] == 1 and (given["groups"] or 1) > 1:
            return self.options.depthwise
        return not self._gives_queries(number)

    def _gives_queries(self, number: int) -> bool:
        """Whether a layer's output, only moved or scaled, becomes queries or keys."""
        left, seen = [number], set()
        while left:
            step = left.pop()
            for user in self.users[step]:
                found = self.steps[user]
                name = canonical(found)
                if name == "scaled_dot_product_attention":
                    given = arguments(found, "query", "key", "value")
                    if Ref(step) in (given["query"], given["key"]):
                        return True
                elif name == "matmul" and user not in self.analysis.path:
                    return True
                elif (name in MOVES or name in ("mul", "div")) and user not in seen:
                    seen.add(user)
                    left.append(user)
        return False

    def _batch_norm(self, number: int, step: Step) -> Variable:
        given = step.kwargs
        path = self._own_path(number)
        if path is None:
            raise ValueError(
                f"The model cannot be converted: the batch norm at {step.place!r} takes its "
                f"statistics or parameters from elsewhere."
            )
        options = {
            "features": (self.steps[given["running_mean"].step].shape or (0,))[0],
            "weight": given["weight"] is not None,
            "bias": given["bias"] is not None,
            "eps": given["eps"],
            "momentum": given["momentum"] or 0.0,
            "uncentered": self.options.uncentered,
            "batch_axis": self._axis(number),
        }
        x = self._operand(number, given["input"])
        return self.layer(path, "ConvertedBatchNorm", options, x, self.fade)

    def _norm(self, number: int, step: Step, name: str) -> Variable:
        given = step.kwargs
        path = self._own_path(number) if given.get("weight") is not None else None
        tensors = {k: given.get(k) for k in ("weight", "bias")}
        shapes = {
            k: None if t is None or path is None else list(self.steps[t.step].shape or ())
            for k, t in tensors.items()
        }
        eps = given["eps"]
        options = {
            "kind": name.removesuffix("_norm"),
            **shapes,
            "eps": torch.finfo(torch.float32).eps if eps is None else eps,
            "dims": len(given.get("normalized_shape", [0])),
            "groups": given.get("num_groups", 1),
            "batch_axis": self._axis(number) if tensors["bias"] is not None else 0,
        }
        x = self._operand(number, given["input"])
        if path is None:
            extra = [self.value(t, on_path=False) for t in tensors.values()]
            return self.layer(
                f"steps.{name}{number}", "ConvertedNorm", options, x, self.fade, *extra
            )
        return self.layer(path, "ConvertedNorm", options, x, self.fade)

    # Weights

    @torch.no_grad()
    def load(self, network: Network, model: nn.Module, mean: Tensor, std: Tensor) -> None:
        """Fills a network with the original's weights."""
        named = dict(model.named_parameters()) | dict(model.named_buffers())
        found = {_path(name): tensor for name, tensor in named.items()} | self._values
        for name, tensor in (*network.named_parameters(), *network.named_buffers()):
            path, _, leaf = name.rpartition(".")
            layer = network.get_submodule(path)
            if isinstance(layer, ConvertedBatchNorm) and layer.uncentered:
                if leaf == "running_square":
                    layer.uncenter(
                        found[f"{path}.running_mean"],
                        found[f"{path}.running_var"],
                        found.get(f"{path}.weight"),
                        found.get(f"{path}.bias"),
                    )
            elif isinstance(layer, ConvertedStem) and leaf in ("weight", "shift"):
                if leaf == "shift":
                    layer.shift.copy_(0.5 - mean)
                    continue
                half = found[name] / (2 * std.to(found[name])).view(1, 3, 1, 1)
                tensor.copy_(torch.cat([half, -half], 1))
            elif isinstance(layer, Normalize):
                tensor.copy_(mean if leaf == "mean" else std)
            elif path or leaf not in ("fade", "b"):
                tensor.copy_(found[name])


_CONV = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
_SHARED = {"scaled_dot_product_attention": "ConvertedAttention", "avg_pool2d": "AveragePool"}
_WITH_WEIGHTS = {
    *("conv1d", "conv2d", "conv3d", "linear", "batch_norm"),
    *("layer_norm", "group_norm", "instance_norm", "rms_norm"),
}


def _path(name: str) -> str:
    """Where a network keeps what has this name in the original."""
    # Names that our modules need for themselves get an underscore.
    parts = [part + "_" if hasattr(Container, part) else part for part in name.split(".")]
    return ".".join(["original", *parts])


def _any_layout(step: Step) -> Step:
    """``view`` as ``reshape``, which also works where channels lie last in memory."""
    if step.call == "torch.Tensor.view" and not isinstance(step.args[1], torch.dtype):
        return dataclasses.replace(step, call="torch.Tensor.reshape")
    return step
