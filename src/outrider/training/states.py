"""The target's states along known tokens, as cheaply as its forward pass allows.

Owns how sequences share passes. :mod:`~outrider.training.features` stores what comes out or hands
it on as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from outrider.errors import CheckpointError, ParameterError
from outrider.models.decoder import Decoder
from outrider.models.layers import Segment

MAX_ROWS = 256  # of one pass: beyond that a row gets no cheaper


def target_states(
    target: Decoder,
    sequences: Sequence[Sequence[int]],
    capture: Sequence[int],
    max_rows: int = MAX_ROWS,
) -> Iterator[tuple[int, int, Tensor]]:
    """The target's states along known tokens, in passes of at most ``max_rows`` rows.

    Yields (sequence, first position, hidden_RC): every position of every sequence once, the
    pieces of one sequence in order, the sequences shortest first. Rows do not depend on what they
    share a pass with, so the grouping changes no bit (:mod:`outrider.models.layers`).

    Raises:
        CheckpointError: a state is not finite.
    """
    lengths = [len(tokens) for tokens in sequences]
    for group in _groups(lengths, max_rows):
        longest = max(lengths[i] for i in group)
        cache = target.new_cache(max_batch_size=len(group), num_slots=longest)
        rows = [cache.allocate() for _ in group]
        width = -(-longest // -(-longest // max_rows))  # equal chunks; several sequences have one
        for start in range(0, longest, width):
            chunks = [sequences[i][start : start + width] for i in group]
            segments = [
                Segment(row, chunk, range(len(chunk)), num_silent=len(chunk))
                for row, chunk in zip(rows, chunks, strict=True)
            ]
            hidden_RC = target.forward(segments, cache, capture=capture).hidden_RC
            assert hidden_RC is not None
            if not bool(torch.isfinite(hidden_RC).all()):
                raise CheckpointError(
                    "the target's states are not finite; its weights are damaged, or this "
                    "precision is too narrow for it: try float32"
                )
            sizes = [len(chunk) for chunk in chunks]
            for i, row, piece_RC in zip(group, rows, hidden_RC.split(sizes), strict=True):
                cache.extend(row, len(piece_RC))
                yield i, start, piece_RC


def states_of(target: Decoder, tokens: Sequence[int], capture: Sequence[int]) -> Tensor:
    """The target's states ``[T, C]`` along one sequence, in its compute dtype.

    Raises:
        CheckpointError: a state is not finite.
    """
    return torch.cat([piece_RC for _, _, piece_RC in target_states(target, [tokens], capture)])


def check_captures(captures: Sequence[int], num_layers: int) -> None:
    """Check a choice of layers.

    Raises:
        ParameterError: a layer that is none of ``0 .. num_layers``, or one twice.
    """
    wrong = [layer for layer in captures if not 0 <= layer <= num_layers]
    if wrong or len(set(captures)) < len(captures):
        raise ParameterError(
            f"captures: {list(captures)}: each must be one of 0 .. {num_layers}, once"
        )


def _groups(lengths: Sequence[int], max_rows: int) -> list[list[int]]:
    """Sequences that share a pass: several while they fit together, else one alone.

    Sorted by length, since attention pads the sequences of a pass to the longest.
    """
    groups: list[list[int]] = []
    room = 0
    for i in sorted(range(len(lengths)), key=lengths.__getitem__):
        if not groups or lengths[i] > room:
            groups.append([])
            room = max_rows
        groups[-1].append(i)
        room -= lengths[i]
    return groups
