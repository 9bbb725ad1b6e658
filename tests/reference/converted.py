"""W(x) of converted networks as a product of explicit matrices, from the original's weights.

Written from torchvision's architectures; nothing is differentiated. Every layer is the dense
matrix that it multiplies its flattened input with at this input, plus the constant that it adds,
times the factor ``fade`` on all constants. ``b`` is the exponent of the B-cos layers.
"""

import math
from dataclasses import dataclass

import numpy as np

from tests.reference.dynamic import Affine, Image, block_diagonal, softmax

State = dict[str, np.ndarray]


@dataclass
class Setting:
    """What a network was converted with."""

    weights: State
    mean: np.ndarray
    std: np.ndarray
    fade: float = 1.0
    b: float | None = None


def conv_matrix(weight: np.ndarray, shape, stride: int, padding: int, groups: int = 1):
    """The matrix of a convolution of a (channels, height, width) map, and the output's shape."""
    c, h, w = shape
    out, per_group, k, _ = weight.shape
    oh, ow = (h + 2 * padding - k) // stride + 1, (w + 2 * padding - k) // stride + 1
    matrix = np.zeros((out, oh, ow, c, h, w))
    for o in range(out):
        first = (o // (out // groups)) * per_group
        for i in range(oh):
            for j in range(ow):
                for di in range(k):
                    for dj in range(k):
                        y, x = i * stride - padding + di, j * stride - padding + dj
                        if 0 <= y < h and 0 <= x < w:
                            channels = slice(first, first + per_group)
                            matrix[o, i, j, channels, y, x] = weight[o, :, di, dj]
    return matrix.reshape(out * oh * ow, c * h * w), (out, oh, ow)


def cosines(state: Affine, matrix, weight, shape, stride, padding, groups=1):
    """|cos| between every patch of the map and its unit."""
    ones, _ = conv_matrix(np.ones_like(weight), shape, stride, padding, groups)
    patch = np.sqrt(ones @ state.value**2 + 1e-6)
    unit = np.sqrt((weight**2).sum((1, 2, 3)))
    unit = np.repeat(unit, matrix.shape[0] // len(unit))
    return np.abs(matrix @ state.value) / (patch * unit)


def convolution(state, shape, setting: Setting, name: str, *, stride=1, padding=0, groups=1):
    weight = setting.weights[name + ".weight"]
    matrix, out = conv_matrix(weight, shape, stride, padding, groups)
    constant = 0.0
    if name + ".bias" in setting.weights:
        constant = setting.fade * np.repeat(setting.weights[name + ".bias"], out[1] * out[2])
    depthwise = groups > 1 and weight.shape[1] == 1
    if setting.b is not None and not depthwise:
        cos = cosines(state, matrix, weight, shape, stride, padding, groups)
        matrix = matrix * (cos ** (setting.b - 1))[:, None]
    return state.then(matrix, constant), out


def stem(encoded: np.ndarray, setting: Setting, name: str, *, stride: int, padding: int):
    """The first convolution, of the six channels [x, 1 − x]."""
    shape = encoded.shape
    weight = setting.weights[name + ".weight"]
    matrix, out = conv_matrix(weight, (3, *shape[1:]), stride, padding)
    pixels = shape[1] * shape[2]
    scale = np.repeat(1 / setting.std, pixels)
    # x = (1 + [x] − [1 − x])/2, so that (x − mean)/std has a linear and a constant part.
    rows = np.concatenate([matrix * scale, -matrix * scale], axis=1) / 2
    constant = setting.fade * matrix @ (np.repeat(0.5 - setting.mean, pixels) * scale)
    if name + ".bias" in setting.weights:
        constant = constant + setting.fade * np.repeat(
            setting.weights[name + ".bias"], out[1] * out[2]
        )
    state = Image(encoded)
    if setting.b is not None:
        half = weight / (2 * setting.std)[None, :, None, None]
        both = np.concatenate([half, -half], axis=1)
        cos = cosines(state, rows, both, shape, stride, padding)
        rows = rows * (cos ** (setting.b - 1))[:, None]
    return state.then(rows, constant), out


def batch_norm(state, shape, setting: Setting, name: str, eps: float):
    w = {k.removeprefix(name + "."): v for k, v in setting.weights.items() if k.startswith(name)}
    scale = w["weight"] / np.sqrt(w["running_var"] + eps)
    constant = setting.fade * (w["bias"] - w["running_mean"] * scale)
    pixels = shape[1] * shape[2]
    return gated(state, np.repeat(scale, pixels)).then_constant(np.repeat(constant, pixels))


class Wide(Affine):
    def then_constant(self, constant):
        return Affine(self.matrix, self.offset + constant, self.value + constant)


def gated(state: Affine, gate: np.ndarray) -> Wide:
    """A diagonal matrix."""
    return Wide(gate[:, None] * state.matrix, gate * state.offset, gate * state.value)


def relu(state: Affine) -> Affine:
    return gated(state, (state.value > 0).astype(float))


def hard_sigmoid(x: np.ndarray) -> np.ndarray:
    return np.clip(x + 3, 0, 6) / 6


def hard_swish(state: Affine) -> Affine:
    return gated(state, hard_sigmoid(state.value))


def gelu(state: Affine) -> Affine:
    return gated(state, np.array([(1 + math.erf(v / math.sqrt(2))) / 2 for v in state.value]))


def max_pool(state: Affine, shape, *, kernel: int, stride: int, padding: int):
    c, h, w = shape
    oh, ow = (h + 2 * padding - kernel) // stride + 1, (w + 2 * padding - kernel) // stride + 1
    image = state.value.reshape(shape)
    winners = []
    for channel in range(c):
        for i in range(oh):
            for j in range(ow):
                inside = [
                    (y, x)
                    for y in range(i * stride - padding, i * stride - padding + kernel)
                    for x in range(j * stride - padding, j * stride - padding + kernel)
                    if 0 <= y < h and 0 <= x < w
                ]
                y, x = max(inside, key=lambda at: image[channel, at[0], at[1]])
                winners.append((channel * h + y) * w + x)
    rows = np.array(winners)
    return Affine(state.matrix[rows], state.offset[rows], state.value[rows]), (c, oh, ow)


def average(state: Affine, shape) -> Affine:
    c, h, w = shape
    return state.then(np.kron(np.eye(c), np.full((1, h * w), 1 / (h * w))))


def linear(state: Affine, setting: Setting, name: str) -> Affine:
    weight, bias = setting.weights[name + ".weight"], setting.weights[name + ".bias"]
    if setting.b is not None:
        norm = np.sqrt((state.value**2).sum() + 1e-6) * np.sqrt((weight**2).sum(1))
        weight = weight * (np.abs(weight @ state.value / norm) ** (setting.b - 1))[:, None]
    return state.then(weight, setting.fade * bias)


def resnet18(encoded: np.ndarray, setting: Setting) -> Affine:
    def norm(state, shape, name):
        return batch_norm(state, shape, setting, name, 1e-5)

    state, shape = stem(encoded, setting, "conv1", stride=2, padding=3)
    state = relu(norm(state, shape, "bn1"))
    state, shape = max_pool(state, shape, kernel=3, stride=2, padding=1)
    for layer in range(1, 5):
        for block in range(2):
            name = f"layer{layer}.{block}."
            stride = 2 if layer > 1 and block == 0 else 1
            inner, out = convolution(
                state, shape, setting, name + "conv1", stride=stride, padding=1
            )
            inner = relu(norm(inner, out, name + "bn1"))
            inner, out = convolution(inner, out, setting, name + "conv2", padding=1)
            inner = norm(inner, out, name + "bn2")
            if stride == 2:
                state, _ = convolution(state, shape, setting, name + "downsample.0", stride=stride)
                state = norm(state, out, name + "downsample.1")
            state, shape = relu(inner.plus(state)), out
    return linear(average(state, shape), setting, "fc")


def mobilenet_v3(encoded: np.ndarray, setting: Setting, blocks) -> Affine:
    """``blocks``: (kernel, expands, squeezes, hard swish, stride, adds its input) of each."""

    def norm(state, shape, name):
        return batch_norm(state, shape, setting, name, 1e-3)

    state, shape = stem(encoded, setting, "features.0.0", stride=2, padding=1)
    state = hard_swish(norm(state, shape, "features.0.1"))
    for number, (kernel, expands, squeezes, swish, stride, adds) in enumerate(blocks, start=1):
        act = hard_swish if swish else relu
        before, part = state, 0

        def name(part, number=number):
            return f"features.{number}.block.{part}"

        if expands:
            state, shape = convolution(state, shape, setting, name(part) + ".0")
            state = act(norm(state, shape, name(part) + ".1"))
            part += 1
        state, shape = convolution(
            state,
            shape,
            setting,
            name(part) + ".0",
            stride=stride,
            padding=kernel // 2,
            groups=shape[0],
        )
        state = act(norm(state, shape, name(part) + ".1"))
        part += 1
        if squeezes:
            w = setting.weights
            pooled = state.value.reshape(shape).mean((1, 2))
            for fc, act_of_gate in (("fc1", lambda x: np.maximum(x, 0)), ("fc2", hard_sigmoid)):
                weight = w[f"{name(part)}.{fc}.weight"][:, :, 0, 0]
                pooled = act_of_gate(weight @ pooled + w[f"{name(part)}.{fc}.bias"])
            state = gated(state, np.repeat(pooled, shape[1] * shape[2]))
            part += 1
        state, shape = convolution(state, shape, setting, name(part) + ".0")
        state = norm(state, shape, name(part) + ".1")
        if adds:
            state = state.plus(before)
    last = f"features.{len(blocks) + 1}"
    state, shape = convolution(state, shape, setting, last + ".0")
    state = hard_swish(norm(state, shape, last + ".1"))
    state = hard_swish(linear(average(state, shape), setting, "classifier.0"))
    return linear(state, setting, "classifier.3")


def by_token(state: Affine, n: int, weight, bias, setting: Setting, bcos: bool) -> Affine:
    """A linear layer on each of n tokens."""
    blocks = []
    for token in state.value.reshape(n, -1):
        rows = weight
        if setting.b is not None and bcos:
            norm = np.sqrt((token**2).sum() + 1e-6) * np.sqrt((weight**2).sum(1))
            rows = weight * (np.abs(weight @ token / norm) ** (setting.b - 1))[:, None]
        blocks.append(rows)
    return state.then(block_diagonal(blocks), setting.fade * np.tile(bias, n))


def layer_norm(state: Affine, n: int, setting: Setting, name: str, eps: float = 1e-6) -> Affine:
    weight, bias = setting.weights[name + ".weight"], setting.weights[name + ".bias"]
    d = len(weight)
    center = np.eye(d) - np.ones((d, d)) / d
    tokens = state.value.reshape(n, d)
    blocks = [np.diag(weight / np.sqrt(token.var() + eps)) @ center for token in tokens]
    return state.then(block_diagonal(blocks), setting.fade * np.tile(bias, n))


def vit(encoded: np.ndarray, setting: Setting, layers: int, heads: int, patch: int) -> Affine:
    """torchvision's VisionTransformer."""
    w = setting.weights
    state, (d, h, v) = stem(encoded, setting, "conv_proj", stride=patch, padding=0)
    order = np.arange(d * h * v).reshape(d, h * v).T.reshape(-1)
    state = state.then(np.eye(d * h * v)[order])
    n = h * v + 1
    token = setting.fade * w["class_token"].reshape(-1)
    state = Affine(
        np.concatenate([np.zeros((d, state.matrix.shape[1])), state.matrix]),
        np.concatenate([token, state.offset]),
        np.concatenate([token, state.value]),
    )
    state = state.then(np.eye(n * d), setting.fade * w["encoder.pos_embedding"].reshape(-1))
    per = d // heads
    for layer in range(layers):
        name = f"encoder.layers.encoder_layer_{layer}."
        normed = layer_norm(state, n, setting, name + "ln_1")
        weight, bias = (w[f"{name}self_attention.in_proj_{k}"] for k in ("weight", "bias"))
        parts = [
            by_token(
                normed, n, weight[i * d : (i + 1) * d], bias[i * d : (i + 1) * d], setting, False
            )
            for i in range(3)
        ]
        query, key = (part.value.reshape(n, heads, per) for part in parts[:2])
        mix = np.zeros((n, heads, per, n, heads, per))
        for head in range(heads):
            a = softmax(query[:, head] @ key[:, head].T / np.sqrt(per))
            for channel in range(per):
                mix[:, head, channel, :, head, channel] = a
        branch = parts[2].then(mix.reshape(n * d, n * d))
        weight, bias = (w[f"{name}self_attention.out_proj.{k}"] for k in ("weight", "bias"))
        state = state.plus(by_token(branch, n, weight, bias, setting, True))
        branch = layer_norm(state, n, setting, name + "ln_2")
        for part in ("0", "3"):
            weight, bias = (w[f"{name}mlp.{part}.{k}"] for k in ("weight", "bias"))
            branch = by_token(branch, n, weight, bias, setting, True)
            branch = gelu(branch) if part == "0" else branch
        state = state.plus(branch)
    state = layer_norm(state, n, setting, "encoder.ln")
    state = state.then(np.eye(d, n * d))
    return linear(state, setting, "heads.head")
