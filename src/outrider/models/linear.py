"""Matrix products whose rows do not depend on how many rows are computed together.

Owns the weights' packed form and the row counts at which the processor's kernels give bit-identical
rows. A stock ``linear`` picks another kernel for one row than for
many, so a draft verified in one pass could differ in the last bit from the same token decoded
alone, and a near tie would flip. Here every product runs in blocks of ``min_rows .. max_rows``
rows, a range inside which :func:`probe_rows` found all rows equal, whatever their number and place.

Used by :mod:`outrider.models.layers`; knows nothing of layers, caches or requests.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

# Row counts to try, in order: 4 is the least at which oneDNN's bfloat16 kernels run at full speed
# (one row takes a slower path), more only where a kernel changes between 4 and 16 rows.
MIN_ROWS = (4, 8, 16)
MAX_ROWS = (512, 256, 128, 64, 32, 16)
MAX_PROBED = 2**22  # elements of a product above 128 rows: an output head is never that tall


@dataclass(frozen=True, slots=True)
class RowPolicy:
    """The range of row counts inside which a linear's rows are bit-identical.

    ``max_rows`` is at least ``2 * min_rows - 1``, so that any number of rows from ``min_rows`` up
    can be cut into blocks inside the range. ``is_exact`` is False where no range was found; the
    engine then reports level L3.
    """

    min_rows: int
    max_rows: int
    is_exact: bool = True

    def __post_init__(self) -> None:
        assert self.max_rows >= 2 * self.min_rows - 1

    def blocks(self, num_rows: int) -> list[int]:
        """Block sizes, each at most ``max_rows``, as equal as possible, that cover the rows."""
        num_blocks = -(-num_rows // self.max_rows)
        size, rest = divmod(num_rows, num_blocks)
        return [size + (block < rest) for block in range(num_blocks)]


@cache
def has_packed_kernels(dtype: torch.dtype) -> bool:
    """Whether oneDNN's prepacked linear is there and works for this type on this processor."""
    if not torch.backends.mkldnn.is_available():
        return False
    try:
        weight = torch.ops.mkldnn._reorder_linear_weight(torch.zeros(16, 16, dtype=dtype), 16)
        x = torch.zeros(4, 16, dtype=dtype)
        torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
    except (AttributeError, RuntimeError):  # built without it, or a type the processor lacks
        return False
    return True


class ExactLinear:
    """``x @ weight.T + bias (+ residual)`` in row-independent blocks.

    Args:
        weight: ``[out, in]`` in the compute dtype; packed here, the caller may drop its copy.
        bias: ``[out]`` or None.
        policy: the row range; None for the probe itself, which must not block.
    """

    __slots__ = ("_bias", "_is_packed", "_weight", "policy")

    def __init__(self, weight: Tensor, bias: Tensor | None, policy: RowPolicy | None) -> None:
        self.policy = policy
        self._bias = bias
        self._is_packed = has_packed_kernels(weight.dtype)
        self._weight = (
            torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), MIN_ROWS[-1])
            if self._is_packed
            else weight.contiguous()
        )

    def __call__(self, x_RD: Tensor, residual_RD: Tensor | None = None) -> Tensor:
        """Rows of the product; the caller pads to at least ``policy.min_rows`` rows."""
        policy, num_rows = self.policy, x_RD.shape[0]
        if policy is None or num_rows <= policy.max_rows:
            return self._product(x_RD, residual_RD)
        sizes = policy.blocks(num_rows)
        residuals = [None] * len(sizes) if residual_RD is None else residual_RD.split(sizes)
        blocks = zip(x_RD.split(sizes), residuals, strict=True)
        return torch.cat([self._product(x, residual) for x, residual in blocks])

    def rows(self, index_W: Tensor) -> Tensor:
        """Rows of the weight, a copy in its own type; unpacks the whole weight for a moment."""
        weight = self._weight.to_dense() if self._is_packed else self._weight
        return weight[index_W]

    def _product(self, x_RD: Tensor, residual_RD: Tensor | None) -> Tensor:
        if not self._is_packed:
            product = F.linear(x_RD, self._weight, self._bias)
            return product if residual_RD is None else product + residual_RD
        if residual_RD is None:
            return torch.ops.mkldnn._linear_pointwise(
                x_RD, self._weight, self._bias, "none", [], ""
            )
        return torch.ops.mkldnn._linear_pointwise.binary(
            x_RD, residual_RD, self._weight, self._bias, "add"
        )


def probe_rows(out_size: int, in_size: int, dtype: torch.dtype, *, adds: bool) -> RowPolicy:
    """Find the widest row range in which this machine's kernel gives bit-identical rows.

    Tries every row count up to 64 and a sample above, with the rows at both ends of the block.
    Kernels choose by shape, type and thread count, never by values, so random weights stand for
    the model's. ``adds`` probes the product with a fused residual.
    """
    generator = torch.Generator().manual_seed(0)
    linear = ExactLinear(
        torch.randn(out_size, in_size, generator=generator).to(dtype), None, policy=None
    )
    candidates = [rows for rows in MAX_ROWS if rows <= 128 or rows * out_size <= MAX_PROBED]
    most = candidates[0]
    x_RD = torch.randn(most, in_size, generator=generator).to(dtype)
    residual_RD = torch.randn(most, out_size, generator=generator).to(dtype)

    def product(rows: slice) -> Tensor:
        return linear(x_RD[rows].contiguous(), residual_RD[rows].contiguous() if adds else None)

    for min_rows in MIN_ROWS:
        starts = range(0, most, min_rows)
        expected = torch.cat([product(slice(start, start + min_rows)) for start in starts])

        def rows_agree(num_rows: int, expected: Tensor = expected) -> bool:
            first, last = slice(0, num_rows), slice(most - num_rows, most)
            return torch.equal(product(first), expected[first]) and torch.equal(
                product(last), expected[last]
            )

        max_rows = min_rows - 1
        for candidate in reversed(candidates):
            stride = 1 if candidate <= 64 else 5 if candidate <= 128 else 37
            row_counts = [*range(max_rows + 1, candidate, stride), candidate]
            if not all(rows_agree(num_rows) for num_rows in row_counts):
                break
            max_rows = candidate
        if max_rows >= 2 * min_rows - 1:
            return RowPolicy(min_rows, max_rows)
    return RowPolicy(MIN_ROWS[0], MAX_ROWS[0], is_exact=False)
