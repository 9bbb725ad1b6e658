"""Attention-based explanations with loops, from matrices [layer][head, query, key]."""

import numpy as np


def final_attention(matrices):
    heads, queries, keys = matrices[-1].shape
    out = np.zeros(keys)
    for h in range(heads):
        for q in range(queries):
            out += matrices[-1][h, q] / (heads * queries)
    return out


def rollout(matrices, start=0):
    n = matrices[0].shape[-1]
    joint = np.eye(n)
    for matrix in matrices[start:]:
        mean = sum(matrix) / len(matrix)
        rows = np.array([row / row.sum() for row in mean]) + np.eye(n)
        rows = np.array([row / row.sum() for row in rows])
        joint = rows @ joint
    return np.array([np.mean([joint[q, k] for q in range(n)]) for k in range(n)])


def rfem(matrices, k=1.0):
    n = matrices[0].shape[-1]
    out = np.zeros(n)
    for h in range(len(matrices[0])):
        joint = np.eye(n)
        for matrix in matrices:
            joint = (np.array([row / row.sum() for row in matrix[h]]) + np.eye(n)) @ joint
        least = joint.mean() + k * joint.std()
        for q in range(n):
            for key in range(n):
                if joint[q, key] >= least:
                    out[key] += joint.max() / n
    return out


def grad_sam(matrices, gradients):
    terms = []
    for matrix, gradient in zip(matrices, gradients, strict=True):
        for a, g in zip(matrix, gradient, strict=True):
            terms.extend(a[q] * np.maximum(g[q], 0) for q in range(len(a)))
    return np.mean(terms, axis=0)


def grad_cam(matrices, gradients):
    total = np.zeros(matrices[-1].shape[-1])
    for a, g in zip(matrices[-1], gradients[-1], strict=True):
        total += g.mean() * a.mean(0)
    return np.maximum(total / len(matrices[-1]), 0)


def chefer(relevances, gradients):
    n = relevances[0].shape[-1]
    joint = np.eye(n)
    for r, g in zip(relevances, gradients, strict=True):
        heads = [np.maximum(a * b, 0) for a, b in zip(r, g, strict=True)]
        joint = (np.mean(heads, 0) + np.eye(n)) @ joint
    # Where a class token's row is read, its own column, the end of the way past all attention, is
    # not: the same for every query.
    return (joint - np.eye(n)).mean(0)
