"""Root-mean-square normalisation of rows; called by :mod:`outrider.models.norm`."""

from __future__ import annotations

import numpy as np

from outrider.models.kernels.compiler import kernel
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


@kernel
def rms_norm(x, weight, eps, out):
    """``x / sqrt(mean(x ** 2) + eps) * weight`` of each row of ``len(weight)`` elements."""
    size = len(weight)
    whole = size // LANES * LANES
    for start in range(0, len(x), size):
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
