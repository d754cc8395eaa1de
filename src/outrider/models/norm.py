"""Root-mean-square normalisation with a weight.

Each row is computed on its own, whatever the number of rows. Used by
:mod:`outrider.models.layers`; ``F.rms_norm`` is the plain twin in the tests.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from outrider.kv_cache import flat
from outrider.models.kernels.compiler import use_threads
from outrider.models.kernels.norm import rms_norm, rms_norm_in_threads


class RMSNorm:
    """``x / sqrt(mean(x ** 2) + eps) * weight`` over the last dimension (Zhang, Sennrich 2019)."""

    __slots__ = ("_eps", "_weight")

    def __init__(self, weight_D: Tensor, eps: float) -> None:
        self._weight = flat(weight_D.contiguous())
        self._eps = np.float32(eps)

    def __call__(self, x_RD: Tensor, out_RD: Tensor | None = None) -> Tensor:
        """Normalised rows, in the type of ``x``; written to ``out`` where it is given."""
        if out_RD is None:
            out_RD = torch.empty_like(x_RD)
        function = rms_norm if use_threads(x_RD.numel()) == 1 else rms_norm_in_threads
        function(flat(x_RD), self._weight, self._eps, flat(out_RD))
        return out_RD
