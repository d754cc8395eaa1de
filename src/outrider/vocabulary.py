"""The draft vocabulary: which of the target's tokens a drafter can propose, and under which ids.

Owns the two maps between a head's own ids ``0 .. W - 1`` and the target's ``0 .. V - 1``. Used by
the drafters, and by the sampler where it looks at a row of draft logits; pure numpy, knows no
checkpoint and no model.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from outrider.errors import CheckpointError


@dataclass(frozen=True, eq=False, slots=True)
class DraftVocabulary:
    """A choice of the target's tokens, in the order of the draft's ids.

    Attributes:
        ids_W: the target's id of each draft id; int64, distinct.
        target_size: the target's vocabulary.
        place_V: the draft's id of each target id, -1 where the draft has none; int64.

    Raises:
        CheckpointError: no ids at all, one outside the target's vocabulary, or one twice.
    """

    ids_W: NDArray[np.int64]
    target_size: int
    place_V: NDArray[np.int64] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        ids_W = np.array(self.ids_W, dtype=np.int64)
        _check(ids_W, self.target_size)
        place_V = np.full(self.target_size, -1, dtype=np.int64)
        place_V[ids_W] = np.arange(ids_W.size)
        for name, ids in (("ids_W", ids_W), ("place_V", place_V)):
            ids.setflags(write=False)
            object.__setattr__(self, name, ids)

    @classmethod
    def from_offsets(cls, d2t_W: ArrayLike, target_size: int) -> DraftVocabulary:
        """From EAGLE-3's ``d2t``: the target's id is the draft's id plus its offset.

        Raises:
            CheckpointError: the offsets lead outside the target's vocabulary or twice to one
                token, as those of another vocabulary or a list of absolute ids do.
        """
        offset_W = np.asarray(d2t_W)
        if offset_W.ndim != 1 or not np.issubdtype(offset_W.dtype, np.integer):
            raise CheckpointError(
                f"d2t: {offset_W.dtype} of shape {list(offset_W.shape)} is not a list of whole "
                "numbers; it holds one offset per draft token"
            )
        offset_W = offset_W.astype(np.int64)
        try:
            return cls(np.arange(offset_W.size) + offset_W, target_size)
        except CheckpointError as error:
            raise CheckpointError(f"d2t: {error}{_hint(offset_W, target_size)}") from None

    @classmethod
    def first(cls, size: int, target_size: int) -> DraftVocabulary:
        """The target's first ``size`` ids, as where the larger vocabulary is padded."""
        return cls(np.arange(size), target_size)

    @property
    def size(self) -> int:
        """Number of tokens the draft knows (W)."""
        return self.ids_W.size

    @property
    def coverage(self) -> float:
        """Share of the target's tokens that the draft knows, in (0, 1]."""
        return self.size / self.target_size

    def scatter(self, row_W: NDArray[Any], fill: float) -> NDArray[Any]:
        """A row over the draft's ids as one over the target's, ``fill`` where the draft has none.

        ``[W]`` to a fresh ``[V]`` of the same type.
        """
        assert row_W.shape == (self.size,)
        row_V = np.full(self.target_size, fill, dtype=row_W.dtype)
        row_V[self.ids_W] = row_W
        return row_V


def _check(ids_W: NDArray[np.int64], target_size: int) -> None:
    """Refuse ids that are not a choice of the target's."""
    if ids_W.ndim != 1 or not ids_W.size:
        raise CheckpointError(
            f"the draft vocabulary has shape {list(ids_W.shape)}; allowed: a list of at least one "
            "token id"
        )
    outside = np.flatnonzero((ids_W < 0) | (ids_W >= target_size))
    if outside.size:
        place = int(outside[0])
        raise CheckpointError(
            f"{outside.size} of {ids_W.size} draft tokens are outside the target's vocabulary, "
            f"draft id {place} as target id {ids_W[place]} first; allowed: 0 .. {target_size - 1}"
        )
    ids, counts = np.unique(ids_W, return_counts=True)
    if ids.size < ids_W.size:
        twice = int(ids[counts > 1][0])
        places = np.flatnonzero(ids_W == twice)[:2].tolist()
        raise CheckpointError(
            f"draft ids {places[0]} and {places[1]} both stand for target id {twice}; each draft "
            "token needs one of its own"
        )


def _hint(offset_W: NDArray[np.int64], target_size: int) -> str:
    """What may have happened to offsets that make no vocabulary."""
    is_choice = bool(offset_W.size) and np.unique(offset_W).size == offset_W.size
    if is_choice and offset_W.min() >= 0 and offset_W.max() < target_size:
        return " (the values look like target ids; d2t holds offsets: target id minus draft id)"
    return " (is this d2t from a head for another vocabulary?)"
