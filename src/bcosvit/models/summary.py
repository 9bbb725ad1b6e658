"""What a model costs, counted without running it: shapes on the meta device, no memory used."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from bcosvit.models.base import AnyModel, create_model
from bcosvit.models.config import Config


@dataclass(frozen=True, kw_only=True)
class PartSummary:
    """One part of a model."""

    name: str
    layers: int
    """Layers with weights of their own."""
    parameters: int
    trained: int
    """Of ``parameters``, those that training changes."""
    flops: int
    """Floating-point operations of one image, a multiply-add counted as two."""


@dataclass(frozen=True, kw_only=True)
class ModelSummary:
    """A model's parts and what a batch of it takes."""

    parts: list[PartSummary]
    grid: tuple[int, int] | None
    image_size: tuple[int, int]
    batch: int
    weights_bytes: int
    inference_bytes: int
    """Weights, and the largest input and output of one layer at a time."""
    training_bytes: int
    """Weights, gradients, Adam's two moments, and what autograd keeps for the backward pass."""


def summarize(config: Config, *, batch: int = 1) -> ModelSummary:
    """Counts layers, parameters, FLOPs and memory of a model, in float32, without running it.

    Args:
        config: The model's config.
        batch: Images per batch, for the memory.

    Returns:
        The summary.

    Examples:
        >>> from bcosvit.models import model_config
        >>> summary = summarize(model_config("bcos_vit_ti_38"))
        >>> summary.grid, sum(part.parameters for part in summary.parts)
        ((14, 14), 14688064)
    """
    with torch.device("meta"):
        model = create_model(config)
    image = torch.zeros(1, 3, *config.image_size, device="meta")
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), counter:
        model(image)
    flops = {name: sum(ops.values()) for name, ops in counter.get_flop_counts().items()}
    # The counter names modules from the root class down.
    root = type(model).__name__
    parts = [
        _part(name, child, flops.get(f"{root}.{path}", 0)) for name, path, child in _parts(model)
    ]
    weights = _bytes([*model.parameters(), *model.buffers()])
    trained = _bytes([p for p in model.parameters() if p.requires_grad])
    return ModelSummary(
        parts=parts,
        grid=config.grid,
        image_size=config.image_size,
        batch=batch,
        weights_bytes=weights,
        inference_bytes=weights + batch * _largest_layer(model, image),
        training_bytes=weights + 3 * trained + batch * _kept_for_backward(model, image),
    )


def _parts(model: AnyModel) -> list[tuple[str, str, nn.Module]]:
    """(title, path, module); the tokenizer is split into its frozen and its trained half."""
    parts = []
    for name, child in model.named_children():
        if name == "tokenizer":
            parts += [
                (f"{name}.{inner}", f"{name}.{inner}", part)
                for inner, part in child.named_children()
            ]
        elif name not in ("encoding", "logit") and not isinstance(child, nn.Identity):
            parts.append((name, name, child))
    return parts


def _part(name: str, module: nn.Module, flops: int) -> PartSummary:
    own = [m for m in module.modules() if next(m.parameters(recurse=False), None) is not None]
    return PartSummary(
        name=name,
        layers=len(own),
        parameters=sum(p.numel() for p in module.parameters()),
        trained=sum(p.numel() for p in module.parameters() if p.requires_grad),
        flops=flops,
    )


def _bytes(tensors: list[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _largest_layer(model: nn.Module, image: Tensor) -> int:
    largest = 0

    def measure(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        nonlocal largest
        largest = max(largest, _bytes([*inputs, output]))

    leaves = [module for module in model.modules() if next(module.children(), None) is None]
    handles = [module.register_forward_hook(measure) for module in leaves]
    with torch.no_grad():
        model(image)
    for handle in handles:
        handle.remove()
    return largest


def _kept_for_backward(model: nn.Module, image: Tensor) -> int:
    kept: dict[int, Tensor] = {}
    weights = {id(p) for p in model.parameters()}

    def pack(tensor: Tensor) -> Tensor:
        base = tensor if tensor._base is None else tensor._base
        if id(base) not in weights:
            kept[id(base)] = base
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model.train()(image).sum()
    return _bytes(list(kept.values()))
