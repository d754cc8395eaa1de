"""Root-mean-square normalisation of rows; called by :mod:`outrider.models.norm`."""

from __future__ import annotations

import numpy as np
from numba import prange

from outrider.models.kernels.compiler import helper, kernel, parallel_kernel
from outrider.models.kernels.vector import (
    LANES,
    fma,
    load,
    multiply,
    narrowed,
    splat,
    store,
    sum_of,
    widened,
)


@helper
def _row(start, x, weight, eps, out):
    size = len(weight)
    whole = size // LANES * LANES
    squares = splat(np.float32(0.0))
    for i in range(0, whole, LANES):
        lanes = load(x, start + i)
        squares = fma(lanes, lanes, squares)
    total = sum_of(squares)
    for i in range(whole, size):
        total += widened(x[start + i]) * widened(x[start + i])
    factor = np.float32(1.0) / np.sqrt(total / np.float32(size) + eps)
    for i in range(0, whole, LANES):
        scaled = multiply(load(x, start + i), splat(factor))
        store(out, start + i, multiply(scaled, load(weight, i)))
    for i in range(whole, size):
        scaled = widened(x[start + i]) * factor
        out[start + i] = narrowed(scaled * widened(weight[i]), out[0])


@kernel
def rms_norm(x, weight, eps, out):
    """``x / sqrt(mean(x ** 2) + eps) * weight`` of each row of ``len(weight)`` elements."""
    for start in range(0, len(x), len(weight)):
        _row(start, x, weight, eps, out)


@parallel_kernel
def rms_norm_in_threads(x, weight, eps, out):
    """:func:`rms_norm` by several threads."""
    for row in prange(len(x) // len(weight)):
        _row(row * len(weight), x, weight, eps, out)
