"""SwiGLU of rows that hold gate and up side by side; called by :mod:`outrider.models.layers`."""

from __future__ import annotations

import numpy as np

from outrider.models.kernels.compiler import helper, kernel
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


@kernel
def swiglu(gate_up, size, out):
    """``silu(gate) * up`` (Shazeer 2020) of each row of ``size`` gates and ``size`` ups."""
    whole = size // LANES * LANES
    pair = np.empty(3 * LANES, np.float32)
    for row in range(len(out) // size):
        gate, up, to = 2 * row * size, (2 * row + 1) * size, row * size
        for i in range(0, whole, LANES):
            store(out, to + i, _silu_times(load(gate_up, gate + i), load(gate_up, up + i)))
        if whole == size:
            continue
        pair[:] = np.float32(0.0)
        for i in range(size - whole):
            pair[i] = widened(gate_up[gate + whole + i])
            pair[LANES + i] = widened(gate_up[up + whole + i])
        store(pair, 2 * LANES, _silu_times(load(pair, 0), load(pair, LANES)))
        for i in range(size - whole):
            out[to + whole + i] = narrowed(pair[2 * LANES + i], out[0])
