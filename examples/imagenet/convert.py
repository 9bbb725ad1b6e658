"""Turns a checkpoint of distill.py into a model of the library, and back to continue training.

python convert.py runs/lite2/final.safetensors model.safetensors --classes classes.txt
"""

import argparse
import json
from pathlib import Path

import torch
from efficientnet import MEAN, STD, EfficientNet, EfficientNetConfig
from network import (
    Bcos,
    Block,
    Student,
    TransformerBlock,
    TransformerShape,
    UncenteredNorm,
    widen,
)
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

import bcosvit
from bcosvit.models.weights import CLASSES_KEY, read_config
from bcosvit.shipped import shipped

BLOCKS_PREFIX = "transformer_blocks."
HALF_MAX = torch.finfo(torch.float16).max


def load_student(path: str | Path, student: Student) -> None:
    """Loads weights for inference or further training.

    Args:
        path: A checkpoint of distill.py, or a library model that convert.py wrote, in any
            precision. Where it has no transformer blocks, those of the student stay as they are.
        student: What receives the weights. Its reference cosines are kept for a library model,
            which does not have them; any values give the same network, and calibrated ones give
            weights of the size that the learning rate was chosen for.
    """
    if is_library_model(path):
        from_library(bcosvit.load(path).to(student.t.device), student)
        return
    state = {name: tensor.float() for name, tensor in load_file(path).items()}
    if not depth_of(path):
        own = student.state_dict().items()
        state |= {name: tensor for name, tensor in own if name.startswith(BLOCKS_PREFIX)}
    student.load_state_dict(state)


def is_library_model(path: str | Path) -> bool:
    """Whether this is a library model and no checkpoint of distill.py."""
    return path in shipped() or read_config(path) is not None


def depth_of(path: str | Path) -> int:
    """How many transformer blocks a checkpoint or library model has."""
    if is_library_model(path):
        return getattr(bcosvit.load(path).config, "depth", 0)
    with safe_open(path, "pt") as file:
        names = [name for name in [*file.keys()] if name.startswith(BLOCKS_PREFIX)]
    return len({name.split(".")[1] for name in names})


def to_library(student: Student) -> nn.Module:
    """Makes a library model with the logits of a student.

    Args:
        student: A student at the end of its way: t = 1 and fade = 0.

    Returns:
        A bcosified EfficientNet-lite2 for images in [0, 1], in evaluation mode; where the student
        has transformer blocks, a ViT on it for images of 224 pixels.

    Raises:
        ValueError: The student is not a B-cos network yet.
    """
    if student.t != 1 or student.fade != 0:
        raise ValueError(
            f"The student has t = {student.t:.2f} and fade = {student.fade:.2f}, but a B-cos "
            f"network has 1 and 0; convert a checkpoint from after both ramps."
        )
    original = EfficientNet(EfficientNetConfig(smooth_strides=True, local_logits=True)).eval()
    model = bcosvit.bcosify(original, mean=MEAN, std=STD, b=2.0, fade=0.0)
    to = model.network.original

    def dense(layer: nn.Module, source: Bcos) -> None:
        layer.weight.copy_((source.weight / source.reference).view(layer.weight.shape))

    def norm(layer: nn.Module, source: UncenteredNorm) -> None:
        layer.weight.copy_(source.gain)
        layer.bias.zero_()
        layer.running_square.copy_(source.mean_square)

    with torch.no_grad():
        stem = student.stem_weight() / student.stem.reference
        to.conv_stem.weight.copy_(stem.reshape(-1, 5, 5, 6).permute(0, 3, 1, 2))
        norm(to.bn0, student.stem_norm)
        for i, block in enumerate(student.blocks):
            assert isinstance(block, Block)
            layers = to.blocks.get_submodule(str(i))
            if hasattr(block, "expand"):
                dense(layers.expand_conv, block.expand)
                norm(layers.bn0, block.expand_norm)
            kernels, k = block.kernels(student.t)
            layers.depthwise_conv.weight.copy_(kernels.t().reshape(-1, 1, k, k))
            norm(layers.bn1, block.depthwise_norm)
            dense(layers.project_conv, block.project)
            norm(layers.bn2, block.project_norm)
        dense(to.conv_head, student.head)
        norm(to.bn1, student.head_norm)
        dense(to.fc, student.fc)
        to.fc.bias.zero_()
    if not student.transformer_blocks:
        return model
    shape = student.transformer
    vit = bcosvit.create_model(
        "bcos_vit_ti",
        backbone=model,
        depth=shape.depth,
        width=shape.width,
        num_heads=shape.num_heads,
        mlp_ratio=shape.hidden / shape.width,
        position="add",
        gain=shape.gain,
        image_size=32 * shape.grid,
    ).eval()
    with torch.no_grad():
        for block, source in zip(vit.blocks, student.transformer_blocks, strict=True):
            assert isinstance(source, TransformerBlock)
            for layer, weights in _transformer_layers(block, source):
                layer.copy_(weights)
            block.attention.prior.logits.copy_(source.prior_logits(shape.grid, shape.grid))
    return vit


def _transformer_layers(
    block: nn.Module, source: TransformerBlock
) -> list[tuple[nn.Parameter, nn.Parameter]]:
    """The tensors of a block of the library beside those of a student's block, but the prior."""
    attention = block.attention
    pairs = [
        (getattr(getattr(attention, layer), name), getattr(getattr(source, layer), name))
        for layer in ("norm", "query", "key")
        for name in ("weight", "bias")
    ]
    return [
        *pairs,
        (attention.value.weight, source.value.weight),
        (attention.project.weight, source.project.weight),
        (block.attention_scale.weight, source.attention_scale),
        (block.mlp[0].weight, source.up.weight),
        (block.mlp[1].weight, source.down.weight),
        (block.mlp_scale.weight, source.mlp_scale),
    ]


def fit_half(student: Student) -> None:
    """Halves the weights of channels until float16 holds the mean squares of their outputs.

    A batch norm follows, so that the network stays the same up to the norm's epsilon.
    """
    pairs = [(student.stem.weight, student.stem_norm), (student.head.weight, student.head_norm)]
    for block in student.blocks:
        assert isinstance(block, Block)
        if hasattr(block, "expand"):
            pairs.append((block.expand.weight, block.expand_norm))
        pairs.append((block.depthwise.t(), block.depthwise_norm))
        pairs.append((block.project.weight, block.project_norm))
    with torch.no_grad():
        for weight, norm in pairs:
            while (large := norm.mean_square > HALF_MAX / 2).any():
                weight[large] /= 2
                norm.mean_square[large] /= 4


def from_library(model: nn.Module, student: Student) -> None:
    """Copies a library model that `to_library` made to a student; its inverse.

    Args:
        model: The library model.
        student: What receives the weights; t becomes 1 and fade 0.
    """
    blocks = getattr(model, "blocks", [])
    source = model.tokenizer.backbone.original if blocks else model.network.original
    rest = model.head.original if blocks else source

    def dense(layer: Bcos, weight: Tensor) -> None:
        layer.weight.copy_(weight.reshape(layer.weight.shape) * layer.reference)

    def norm(layer: UncenteredNorm, source: nn.Module) -> None:
        layer.gain.copy_(source.weight)
        # What float16 could not hold was little more than its maximum; see `fit_half`.
        layer.mean_square.copy_(source.running_square.nan_to_num(posinf=HALF_MAX))

    with torch.no_grad():
        student.t.fill_(1.0)
        student.fade.fill_(0.0)
        stem = narrow(source.conv_stem.weight.permute(2, 3, 1, 0))  # [3, 3, 6, 32]
        dense(student.stem, stem.flatten(0, 2).t())
        norm(student.stem_norm, source.bn0)
        for i, block in enumerate(student.blocks):
            assert isinstance(block, Block)
            layers = source.blocks.get_submodule(str(i))
            if hasattr(block, "expand"):
                dense(block.expand, layers.expand_conv.weight)
                norm(block.expand_norm, layers.bn0)
            kernels = layers.depthwise_conv.weight[:, 0].permute(1, 2, 0)
            kernels = kernels if block.shape.stride == 1 else narrow(kernels)
            block.depthwise.copy_(kernels.flatten(0, 1))
            norm(block.depthwise_norm, layers.bn1)
            dense(block.project, layers.project_conv.weight)
            norm(block.project_norm, layers.bn2)
        dense(student.head, rest.conv_head.weight)
        norm(student.head_norm, rest.bn1)
        dense(student.fc, rest.fc.weight)
        for block, to in zip(blocks, student.transformer_blocks, strict=bool(blocks)):
            assert isinstance(to, TransformerBlock)
            for weights, layer in _transformer_layers(block, to):
                layer.copy_(weights)
            to.prior.copy_(_distances(block.attention.prior.logits, student.transformer.grid))


def _distances(logits: Tensor, grid: int) -> Tensor:
    """The entries [heads, 2·grid − 1, 2·grid − 1] that `TransformerBlock.prior_logits` spread."""
    pairs = logits.unflatten(2, (grid, grid)).unflatten(1, (grid, grid))
    table = logits.new_empty(len(logits), 2 * grid - 1, 2 * grid - 1)
    for y in range(1 - grid, grid):
        for x in range(1 - grid, grid):
            pair = pairs[:, max(-y, 0), max(-x, 0), max(y, 0), max(x, 0)]
            table[:, y + grid - 1, x + grid - 1] = pair
    return table


def narrow(kernels: Tensor) -> Tensor:
    """The kernels [k, k, ...] whose `widen` with t = 1 is nearest to [k + 2, k + 2, ...]."""
    wide, k = kernels.shape[0], kernels.shape[0] - 2
    unit = torch.eye(k * k, dtype=torch.float64).view(k, k, k * k)
    matrix = widen(unit, torch.tensor(1.0, dtype=torch.float64)).view(wide * wide, k * k)
    flat = kernels.reshape(wide * wide, -1)
    inverse = torch.linalg.pinv(matrix).to(flat.device)
    return (inverse @ flat.double()).float().view(k, k, *kernels.shape[2:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=Path, help="what distill.py wrote, or a library model")
    parser.add_argument("model", type=Path, help="the library model to write")
    parser.add_argument("--classes", type=Path, help="a text file with one class name per line")
    parser.add_argument(
        "--float32", action="store_true", help="store weights in float32, not float16"
    )
    options = parser.parse_args()
    shape = TransformerShape(depth=depth_of(options.checkpoint))
    student = Student(EfficientNet().state_dict(), shape).eval()
    load_student(options.checkpoint, student)
    if not options.float32:
        fit_half(student)
    model = to_library(student)
    metadata = {}
    if options.classes:
        names = options.classes.read_text("utf-8").splitlines()
        count = len(student.fc_constant)
        if len(names) != count:
            parser.error(f"{options.classes} has {len(names)} lines; give {count}, one per class.")
        metadata[CLASSES_KEY] = json.dumps(names)
    dtype = torch.float32 if options.float32 else torch.float16
    bcosvit.save(model, options.model, dtype=dtype, metadata=metadata)


if __name__ == "__main__":
    main()
