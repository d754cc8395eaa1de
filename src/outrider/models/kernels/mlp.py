"""SwiGLU of rows that hold gate and up side by side; called by :mod:`outrider.models.layers`."""

from __future__ import annotations

import numpy as np
from numba import prange

from outrider.models.kernels.compiler import helper, kernel, parallel_kernel
from outrider.models.kernels.vector import (
    LANES,
    add,
    divide,
    exp,
    load,
    multiply,
    narrowed,
    splat,
    store,
    widened,
)


@helper
def _silu_times(gate, up):
    """``gate / (1 + e ** -gate) * up``."""
    one = splat(np.float32(1.0))
    below = add(one, exp(multiply(gate, splat(np.float32(-1.0)))))
    return multiply(divide(gate, below), up)


@helper
def _row(row, gate_up, size, out):
    gate, up, to = 2 * row * size, (2 * row + 1) * size, row * size
    whole = size // LANES * LANES
    for i in range(0, whole, LANES):
        store(out, to + i, _silu_times(load(gate_up, gate + i), load(gate_up, up + i)))
    if whole == size:
        return
    rest = np.zeros(3 * LANES, np.float32)
    for i in range(size - whole):
        rest[i] = widened(gate_up[gate + whole + i])
        rest[LANES + i] = widened(gate_up[up + whole + i])
    store(rest, 2 * LANES, _silu_times(load(rest, 0), load(rest, LANES)))
    for i in range(size - whole):
        out[to + whole + i] = narrowed(rest[2 * LANES + i], out[0])


@kernel
def swiglu(gate_up, size, out):
    """``silu(gate) * up`` (Shazeer 2020) of each row of ``size`` gates and ``size`` ups."""
    for row in range(len(out) // size):
        _row(row, gate_up, size, out)


@parallel_kernel
def swiglu_in_threads(gate_up, size, out):
    """:func:`swiglu` by several threads."""
    for row in prange(len(out) // size):
        _row(row, gate_up, size, out)
