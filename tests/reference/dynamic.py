"""W(x) as a product of explicit matrices, one a layer.

Every layer is turned into the dense matrix that it multiplies its (flattened) input with *at this
input*, plus the constant that it adds. ``Affine`` carries their running product, so that at any
point of the network ``value == matrix @ x + offset`` with the image x. Written from the paper;
nothing is differentiated.

Feature maps are flattened as channel, row, column; tokens as token, width.
"""

from dataclasses import dataclass

import numpy as np

State = dict[str, np.ndarray]


@dataclass
class Affine:
    matrix: np.ndarray
    offset: np.ndarray
    value: np.ndarray

    def then(self, layer: np.ndarray, constant: np.ndarray | float = 0.0) -> "Affine":
        return Affine(
            layer @ self.matrix, layer @ self.offset + constant, layer @ self.value + constant
        )

    def plus(self, other: "Affine") -> "Affine":
        return Affine(
            self.matrix + other.matrix, self.offset + other.offset, self.value + other.value
        )


class Image(Affine):
    """What the product begins with. Its matrix, the identity, is large and changes no product."""

    def __init__(self, x: np.ndarray) -> None:
        self.value = x.reshape(-1).copy()

    def then(self, layer: np.ndarray, constant: np.ndarray | float = 0.0) -> Affine:
        return Affine(layer, np.zeros(len(layer)) + constant, layer @ self.value + constant)


def bcos_rows(a: np.ndarray, weight: np.ndarray, b: float, m: int, gamma: float, eps: float):
    """The dynamic matrix of one B-cos transform (with MaxOut) of the vector ``a``."""
    rows = []
    for first in range(0, len(weight), m):
        units = [w / np.sqrt((w * w).sum()) for w in weight[first : first + m]]
        winner = max(units, key=lambda unit: float(unit @ a))
        norm = np.sqrt((a * a).sum() + eps)
        rows.append(gamma * abs(float(winner @ a) / norm) ** (b - 1) * winner)
    return np.stack(rows)


def bcos_conv(state, shape, weight, *, stride, padding, b, m, gamma, eps=1e-6):
    """(Affine, (c, h, w)) after a B-cos convolution with a square kernel and zero padding."""
    c, h, w = shape
    k = weight.shape[-1]
    oh, ow = (h + 2 * padding - k) // stride + 1, (w + 2 * padding - k) // stride + 1
    out = len(weight) // m
    image = state.value.reshape(shape)
    layer = np.zeros((out, oh, ow, c, h, w))
    flat = weight.reshape(len(weight), -1)
    for i in range(oh):
        for j in range(ow):
            top, left = i * stride - padding, j * stride - padding
            patch = np.zeros((c, k, k))
            inside = [
                (di, dj)
                for di in range(k)
                for dj in range(k)
                if 0 <= top + di < h and 0 <= left + dj < w
            ]
            for di, dj in inside:
                patch[:, di, dj] = image[:, top + di, left + dj]
            rows = bcos_rows(patch.reshape(-1), flat, b, m, gamma, eps).reshape(out, c, k, k)
            for di, dj in inside:
                layer[:, i, j, :, top + di, left + dj] = rows[:, :, di, dj]
    return state.then(layer.reshape(out * oh * ow, -1)), (out, oh, ow)


def average_pool(state, shape, *, kernel, stride, padding):
    c, h, w = shape
    oh, ow = (h + 2 * padding - kernel) // stride + 1, (w + 2 * padding - kernel) // stride + 1
    layer = np.zeros((c, oh, ow, c, h, w))
    for channel in range(c):
        for i in range(oh):
            for j in range(ow):
                for di in range(kernel):
                    for dj in range(kernel):
                        y, x = i * stride - padding + di, j * stride - padding + dj
                        if 0 <= y < h and 0 <= x < w:
                            layer[channel, i, j, channel, y, x] = 1 / kernel**2
    return state.then(layer.reshape(c * oh * ow, -1)), (c, oh, ow)


def batch_norm(state, shape, weights: State, name: str):
    """Evaluation mode, uncentered."""
    scale = weights[name + ".weight"] / np.sqrt(weights[name + ".running_var"] + 1e-5)
    return state.then(np.diag(np.repeat(scale, shape[1] * shape[2])))


def dense_backbone(image: np.ndarray, weights: State, flavor: str, layers, growth: int):
    """A B-cos DenseNet's features after dense block ``len(layers)``, before its transition."""
    m, v1 = (2, True) if flavor == "v1" else (1, False)

    def conv(state, shape, name, stride=1, padding=0):
        weight = weights[name + ".weight"]
        gamma = 100 / np.sqrt(weight[0].size) if v1 else 1.0
        return bcos_conv(
            state, shape, weight, stride=stride, padding=padding, b=2, m=m, gamma=gamma
        )

    def norm(state, shape, name):
        return state if v1 else batch_norm(state, shape, weights, name)

    state, shape = conv(Image(image), image.shape, "conv0", 2, 3)
    state = norm(state, shape, "norm0")
    state, shape = average_pool(state, shape, kernel=3, stride=2, padding=1)
    for block, count in enumerate(layers, start=1):
        for layer in range(1, count + 1):
            name = f"denseblock{block}.denselayer{layer}."
            inner = norm(state, shape, name + "norm1")
            inner, inner_shape = conv(inner, shape, name + "conv1")
            inner = norm(inner, inner_shape, name + "norm2")
            inner, inner_shape = conv(inner, inner_shape, name + "conv2", padding=1)
            assert inner_shape == (growth, *shape[1:])
            state = Affine(
                np.concatenate([state.matrix, inner.matrix]),
                np.concatenate([state.offset, inner.offset]),
                np.concatenate([state.value, inner.value]),
            )
            shape = (shape[0] + growth, *shape[1:])
        if block < len(layers):
            state = norm(state, shape, f"transition{block}.norm")
            state, shape = conv(state, shape, f"transition{block}.conv")
            state, shape = average_pool(state, shape, kernel=2, stride=2, padding=0)
    return state, shape


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def layer_norm_parts(tokens: np.ndarray, weight: np.ndarray, eps: float = 1e-5):
    """Per token: the matrix diag(g/σ)·(I − 11ᵀ/d) of a LayerNorm with its scale held."""
    d = tokens.shape[1]
    center = np.eye(d) - np.ones((d, d)) / d
    return [np.diag(weight / np.sqrt(token.var() + eps)) @ center for token in tokens]


def block_diagonal(blocks) -> np.ndarray:
    """One matrix per token, as a matrix on all tokens."""
    rows, columns = blocks[0].shape
    out = np.zeros((len(blocks) * rows, len(blocks) * columns))
    for i, block in enumerate(blocks):
        out[i * rows : (i + 1) * rows, i * columns : (i + 1) * columns] = block
    return out


def attention_block(state, n, d, weights: State, name: str, options) -> Affine:
    """Shifted or standard attention with its skip connection (the paper's Eq. 14)."""
    tokens = state.value.reshape(n, d)
    w = {key.removeprefix(name): v for key, v in weights.items() if key.startswith(name)}
    inner = len(w["query.weight"])
    heads, per = options["num_heads"], inner // options["num_heads"]
    norms = layer_norm_parts(tokens, w["norm.weight"])
    normed = np.stack([part @ token for part, token in zip(norms, tokens, strict=True)])
    normed = normed + w["norm.bias"]
    query = normed @ w["query.weight"].T + w["query.bias"]
    key = normed @ w["key.weight"].T + w["key.bias"]

    mix = np.zeros((n * inner, n * inner))
    for h in range(heads):
        part = slice(h * per, (h + 1) * per)
        scores = query[:, part] @ key[:, part].T / np.sqrt(per)
        if options["position"] == "add":
            a = softmax(scores + w["prior.logits"][h])
        elif options["position"] == "mul":
            a = softmax(scores) * softmax(w["prior.logits"][h])
        else:
            a = softmax(scores)
        for i in range(n):
            for j in range(n):
                for c in range(h * per, (h + 1) * per):
                    mix[i * inner + c, j * inner + c] = a[i, j]

    if options["attention"] == "shifted":
        f, m, b = options["f"], options["maxout"], options["attention_b"]
        value = block_diagonal(
            [bcos_rows(token, w["value.weight"], b, m, f / np.sqrt(d), 1e-6) for token in tokens]
        )
        branch = state.then(value).then(mix)
        project = block_diagonal(
            [
                bcos_rows(token, w["project.weight"], b, m, f / np.sqrt(inner), 1e-6)
                for token in branch.value.reshape(n, inner)
            ]
        )
        return state.plus(scaled(branch.then(project), n, weights, name))
    branch = state.then(block_diagonal(norms), np.tile(w["norm.bias"], n))
    branch = branch.then(block_diagonal([w["value.weight"]] * n), np.tile(w["value.bias"], n))
    branch = branch.then(mix)
    branch = branch.then(block_diagonal([w["project.weight"]] * n), np.tile(w["project.bias"], n))
    return state.plus(scaled(branch, n, weights, name))


def scaled(branch: Affine, n: int, weights: State, name: str) -> Affine:
    """What a block adds to its tokens, times the learned factors where there are any."""
    factors = weights.get(name.removesuffix(".") + "_scale.weight")
    return branch if factors is None else branch.then(np.diag(np.tile(factors, n)))


def mlp_block(state, n, d, weights: State, name: str, options) -> Affine:
    branch, width = state, d
    for part in ("0", "1"):
        weight = weights[f"{name}{part}.weight"]
        gamma = options["f"] / np.sqrt(weight.shape[1])
        rows = [
            bcos_rows(token, weight, 2, options["maxout"], gamma, 1e-6)
            for token in branch.value.reshape(n, width)
        ]
        branch, width = branch.then(block_diagonal(rows)), rows[0].shape[0]
    return state.plus(scaled(branch, n, weights, name))


def transformer(state, shape, weights: State, options) -> Affine:
    """From backbone features to logits without their bias (the paper's Eq. 6)."""
    state = state.then(options["feature_scale"] * np.eye(state.value.size))
    patch = weights["tokenizer.patches.weight"]
    state, (d, gh, gw) = bcos_conv(
        state,
        shape,
        patch,
        stride=patch.shape[-1],
        padding=0,
        b=2,
        m=options["maxout"],
        gamma=options["f"] / np.sqrt(patch[0].size),
    )
    n = gh * gw
    order = np.arange(d * n).reshape(d, n).T.reshape(-1)
    state = state.then(np.eye(d * n)[order])
    if options["position"] == "emb":
        state = state.then(np.eye(d * n), weights["position.weight"].reshape(-1))
    for block in range(options["depth"]):
        state = attention_block(state, n, d, weights, f"blocks.{block}.attention.", options)
        state = mlp_block(state, n, d, weights, f"blocks.{block}.mlp.", options)
    state = state.then(np.concatenate([np.eye(d)] * n, axis=1) / n)
    head = bcos_rows(state.value, weights["head.weight"], 2, 1, options["f"] / np.sqrt(d), 1e-6)
    return state.then(options["logit_scale"] * head)
