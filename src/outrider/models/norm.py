"""Root-mean-square normalisation through torch's fused layer-norm kernel.

torch has no fused RMSNorm on the CPU: ``F.rms_norm`` is eight small kernels, which for a few rows
cost more than the arithmetic. Layer norm is one. Over ``[x, -x]`` the mean is zero and the variance
is the mean square of x, so its first half is exactly the RMSNorm of x. Each row is computed on its
own, whatever the number of rows.

Used by :mod:`outrider.models.layers`; ``F.rms_norm`` is the plain twin in the tests.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


class RMSNorm:
    """``x / sqrt(mean(x ** 2) + eps) * weight`` over the last dimension (Zhang, Sennrich 2019)."""

    __slots__ = ("_eps", "_size", "_weight")

    def __init__(self, weight_D: Tensor, eps: float) -> None:
        self._size = weight_D.shape[0]
        self._weight = torch.cat([weight_D, weight_D])
        self._eps = eps

    def __call__(self, x_RD: Tensor) -> Tensor:
        """Normalised rows, in the type of ``x``; a view of a wider block."""
        mirrored = torch.cat((x_RD, -x_RD), dim=1)
        normed = F.layer_norm(mirrored, (2 * self._size,), self._weight, None, self._eps)
        return normed[:, : self._size]
