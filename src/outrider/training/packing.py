"""Sequences end to end: which ones make up a batch, and what a batch holds.

Owns the order of the data and the packed layout. A batch is several sequences in consecutive rows,
no padding: linears see all rows in one block, attention runs sequence by sequence. Features come
from :mod:`outrider.training.features`, :mod:`outrider.training.recipes` reads the batches::

    row           0  1  2  3  4 | 5  6  7
    token_P       p  p  r  r  r | p  r  r        p: prompt, r: response
    position_P    0  1  2  3  4 | 0  1  2

The order of an epoch is a pure function of lengths, seed and epoch, so a run that was interrupted
finds its place again.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from outrider.errors import ParameterError

# Batches that are filled at once: with more, the last few of an epoch stay half empty; with fewer,
# all of them do.
OPEN_BATCHES = 32


@dataclass(frozen=True, slots=True)
class TrainingSequence:
    """A prompt with the target's answer, and the target's states over both.

    Attributes:
        token_ids: T tokens.
        prompt_len: how many of them are the prompt.
        states_TC: bfloat16, the captured states side by side; None where a recipe needs none.
        final_TD: bfloat16, the state behind the target's final norm.
    """

    token_ids: Sequence[int]
    prompt_len: int
    states_TC: Tensor | None
    final_TD: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Sequences packed into P rows.

    Attributes:
        token_P: int64.
        lengths: of the sequences; they sum to P.
        sequence_P: int64, which sequence a row belongs to.
        position_P: int64, its place there.
        is_response_P: bool, whether its token was written by the target.
        states_PC: captured states side by side, or None.
        final_PD: the state behind the target's final norm.
    """

    token_P: Tensor
    lengths: tuple[int, ...]
    sequence_P: Tensor
    position_P: Tensor
    is_response_P: Tensor
    states_PC: Tensor | None
    final_PD: Tensor

    def to(self, device: torch.device | str) -> Batch:
        """The same on another device."""
        tensors = {
            name: tensor.to(device, non_blocking=True)
            for name in Batch.__slots__
            if isinstance(tensor := getattr(self, name), Tensor)
        }
        return replace(self, **tensors)

    def has_ahead(self, distance: int, *, only_response: bool) -> Tensor:
        """Bool ``[P]``: the token ``distance`` rows ahead is of the same sequence.

        With ``only_response``, also that the target wrote it.
        """
        length_P = torch.tensor(self.lengths, device=self.token_P.device)[self.sequence_P]
        is_there_P = self.position_P + distance < length_P
        if only_response:
            is_there_P = is_there_P & self.is_response_P.roll(-distance)
        return is_there_P


def pack(sequences: Sequence[TrainingSequence]) -> Batch:
    """Lay sequences end to end; at least one, all with captured states or all without."""
    assert sequences
    lengths = tuple(len(sequence.token_ids) for sequence in sequences)
    states: list[Tensor] = []
    for sequence, length in zip(sequences, lengths, strict=True):
        assert sequence.final_TD.shape[0] == length
        if sequence.states_TC is not None:
            assert sequence.states_TC.shape[0] == length
            states.append(sequence.states_TC)
    assert len(states) in (0, len(sequences))
    position_P = torch.cat([torch.arange(length) for length in lengths])
    sequence_P = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    prompt_len_P = torch.tensor([sequence.prompt_len for sequence in sequences])[sequence_P]
    return Batch(
        token_P=torch.cat([torch.as_tensor(s.token_ids, dtype=torch.int64) for s in sequences]),
        lengths=lengths,
        sequence_P=sequence_P,
        position_P=position_P,
        is_response_P=position_P >= prompt_len_P,
        states_PC=torch.cat(states) if states else None,
        final_PD=torch.cat([sequence.final_TD for sequence in sequences]),
    )


def plan_batches(
    lengths: Sequence[int], *, tokens_per_batch: int, seed: int, epoch: int
) -> list[list[int]]:
    """Which sequences make up each batch of an epoch, in order; each sequence is in exactly one.

    Sequences are taken in a shuffled order, and each goes into the first of ``OPEN_BATCHES`` that
    it fits into; where it fits into none, the fullest is closed. One that is longer than a whole
    batch is alone in its own.

    Raises:
        ParameterError: ``tokens_per_batch`` is below 1.
    """
    if tokens_per_batch < 1:
        raise ParameterError(
            f"tokens_per_batch: {tokens_per_batch} is below 1; give about 2048 or more"
        )
    rng = random.Random(f"{seed}/{epoch}")  # text is hashed by its bytes, the same everywhere
    order = list(range(len(lengths)))
    rng.shuffle(order)
    closed: list[list[int]] = []
    batches: list[list[int]] = []  # open ones, and how full they are
    sizes: list[int] = []
    for index in order:
        length = lengths[index]
        fits = (i for i, size in enumerate(sizes) if size + length <= tokens_per_batch)
        place = next(fits, None)
        if place is None:
            if len(batches) == OPEN_BATCHES:
                fullest = sizes.index(max(sizes))
                closed.append(batches.pop(fullest))
                sizes.pop(fullest)
            batches.append([])
            sizes.append(0)
            place = len(batches) - 1
        batches[place].append(index)
        sizes[place] += length
    closed += batches
    rng.shuffle(closed)  # so that the emptier ones, closed last, come anywhere
    return closed
