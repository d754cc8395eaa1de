"""Compile all kernels for one precision, or read them from the user cache, before the first token.

Called by :mod:`outrider.llm`, so that the seconds this takes on a machine's first start are seen as
what they are and are no part of anything that is timed.
"""

from __future__ import annotations

import numpy as np
import torch

from outrider.kv_cache import KEY_BLOCK
from outrider.models.kernels.attention import attend, attend_in_threads
from outrider.models.kernels.compiler import THREADED_WORK_NS, use_threads
from outrider.models.kernels.mlp import swiglu, swiglu_in_threads
from outrider.models.kernels.norm import rms_norm, rms_norm_in_threads
from outrider.models.kernels.vector import LANES
from outrider.types import ProgressCallback


def compile_kernels(dtype: torch.dtype, on_progress: ProgressCallback | None = None) -> None:
    """Run every kernel once on a few zeros in ``dtype``: bfloat16 or float32."""
    stored = np.uint16 if dtype == torch.bfloat16 else np.float32
    size, block = LANES, KEY_BLOCK
    row, floats, nothing = np.zeros(1, np.int64), np.zeros(size // 2, np.float32), np.empty(0)
    no_norm = nothing.astype(np.float32)

    def run_attention(kernel) -> None:
        kernel(
            np.zeros(3 * size, stored),
            (floats, floats),
            (no_norm, no_norm),
            np.float32(1.0),
            np.zeros(size * block, stored),
            np.zeros(size * block, stored),
            (1, 1, size, size, 1),
            row,
            row,
            (row, row + 1, np.zeros(2, np.int64), nothing.astype(np.int64)),
            np.array([[0, 1, 0, 1]]),
            np.empty(size, np.float32),
            np.empty(size, stored),
        )

    def run_norm(kernel) -> None:
        kernel(
            np.zeros(size, stored), np.zeros(size, stored), np.float32(1.0), np.empty(size, stored)
        )

    def run_swiglu(kernel) -> None:
        kernel(np.zeros(2 * size, stored), size, np.empty(size, stored))

    steps = [
        lambda: run_norm(rms_norm),
        lambda: run_swiglu(swiglu),
        lambda: run_attention(attend),
    ]
    if use_threads(THREADED_WORK_NS) > 1:
        steps += [
            lambda: run_norm(rms_norm_in_threads),
            lambda: run_swiglu(swiglu_in_threads),
            lambda: run_attention(attend_in_threads),
        ]
    for done, step in enumerate(steps):
        if on_progress is not None:
            on_progress("compiling kernels", done / len(steps))
        step()
