"""What a draft module hands back, and how its input rows are laid out.

Shared by the heads beside this module and by the draft model; knows no drafter and no request. A
row stands for one drafted or known token; its *feature* is the state that the row is conditioned
on: the target's, where the target has computed it, else the module's own from the row before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.models.decoder import Decoder
from outrider.models.layers import Segment


@dataclass(frozen=True, slots=True)
class DraftOutput:
    """Rows that are not silent, in segment order.

    ``logits_RW`` is float32 over the draft vocabulary; ``feature_RD`` is what the children of a row
    are conditioned on, None for a module that reads tokens only.
    """

    logits_RW: Tensor
    feature_RD: Tensor | None


class Embedding:
    """Token embeddings of a pass: the head's own table, or the target's."""

    def __init__(self, table_VD: Tensor | None, target: Decoder) -> None:
        self._table_VD = table_VD
        self._target = target

    def __call__(self, segments: Sequence[Segment], min_rows: int) -> Tensor:
        """Rows ``[R, D]``, padded with token 0 to at least ``min_rows``."""
        if self._table_VD is None:
            return self._target.embed(segments, min_rows)
        tokens = [token for segment in segments for token in segment.tokens]
        tokens += [0] * (min_rows - len(tokens))
        return F.embedding(torch.tensor(tokens), self._table_VD)


def pad_rows(x_RD: Tensor, num_rows: int) -> Tensor:
    """Rows followed by zeros, as many as asked for in all."""
    missing = num_rows - x_RD.shape[0]
    return F.pad(x_RD, (0, 0, 0, missing)) if missing > 0 else x_RD
