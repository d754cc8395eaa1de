"""The reduced draft vocabulary's map: read at load, for a wrong one costs acceptance in silence.

EAGLE-3 heads carry ``d2t`` (int64 offsets: target id = draft id + offset) and mostly ``t2d`` (one
flag per target token: whether the draft has it). The two say the same thing twice, so they are
compared; a map that is left over from another training run does not survive that.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from outrider.errors import CheckpointError
from outrider.models.loading.fields import at_path
from outrider.models.loading.safetensors_file import StoredTensor
from outrider.models.loading.weights import listed
from outrider.vocabulary import DraftVocabulary

_OFFSETS = ("I64", "I32")
_FLAGS = ("BOOL", "U8", "I64")


def check_map(
    d2t: StoredTensor | None,
    t2d: StoredTensor | None,
    *,
    draft_size: int,
    target_size: int,
    path: Path,
) -> list[str]:
    """Check that the map leads from each draft token to a target token of its own.

    Returns:
        Sentences about what was found.

    Raises:
        CheckpointError: there is none though the vocabulary is reduced, it is none, or ``d2t`` and
            ``t2d`` disagree; names the ids.
    """
    sizes = f"{draft_size} of the target's {target_size} tokens"
    if d2t is None:
        if draft_size != target_size:
            raise CheckpointError(
                f"{path}: d2t is missing, so which {sizes} the head proposes is not known; "
                "it is never guessed: add d2t to the weights"
            )
        return []
    ids_W = _target_ids(d2t, draft_size, target_size)
    is_identity = bool((ids_W == torch.arange(draft_size)).all())
    if t2d is not None:
        _compare(ids_W, t2d, target_size)
    if draft_size == target_size:
        if not is_identity:
            raise CheckpointError(
                f"{path}: d2t reorders the whole vocabulary, but draft_vocab_size says that it is "
                "not reduced"
            )
        return []
    if is_identity:
        return [f"d2t is all zeros: the draft vocabulary is the first {sizes}"]
    checked = "agrees with t2d" if t2d is not None else "without a t2d to compare it with"
    return [f"draft vocabulary: {sizes} ({draft_size / target_size:.1%}), d2t {checked}"]


def offsets_reader(d2t: StoredTensor) -> Callable[[], Tensor]:
    """Reads ``d2t`` as int64."""
    return partial(_as_int64, d2t)


def kept_tokens(ids_W: Tensor, target_size: int) -> Tensor:
    """``t2d``, bool ``[V]``: which target tokens the draft has, given their ids."""
    t2d_V = torch.zeros(target_size, dtype=torch.bool)
    t2d_V[ids_W] = True
    return t2d_V


def _target_ids(d2t: StoredTensor, draft_size: int, target_size: int) -> Tensor:
    d2t.require_kind(_OFFSETS)
    if d2t.shape != (draft_size,):
        raise CheckpointError(
            f"{d2t.path}: {d2t.name} is {list(d2t.shape)}, the draft vocabulary is [{draft_size}]"
        )
    with at_path(d2t.path):
        vocabulary = DraftVocabulary.from_offsets(_as_int64(d2t).numpy(), target_size)
    return torch.tensor(vocabulary.ids_W)


def _compare(ids_W: Tensor, t2d: StoredTensor, target_size: int) -> None:
    t2d.require_kind(_FLAGS)
    if t2d.shape != (target_size,):
        raise CheckpointError(
            f"{t2d.path}: {t2d.name} is {list(t2d.shape)}, the target's vocabulary is "
            f"[{target_size}]"
        )
    says_V = t2d.read() != 0
    maps_V = kept_tokens(ids_W, target_size)
    only_d2t, only_t2d = maps_V & ~says_V, says_V & ~maps_V
    if not (only_d2t.any() or only_t2d.any()):
        return
    parts = [
        f"{what} {listed([str(token) for token in which.nonzero().flatten().tolist()])}"
        for what, which in (("only d2t has", only_d2t), ("only t2d has", only_t2d))
        if which.any()
    ]
    raise CheckpointError(
        f"{t2d.path}: d2t and t2d disagree about the draft vocabulary: {'; '.join(parts)}; one of "
        "them is left over from another head"
    )


def _as_int64(d2t: StoredTensor) -> Tensor:
    return d2t.read().to(torch.int64)
