"""Training-time test: a head trained on its own outputs, as it will be used (EAGLE-3, MTP).

Owns the steps and their attention pattern (Li et al. 2025, section 3.2). Step 0 runs over all rows
of a sequence on the target's states, as drafting takes in true rows. At step k row t takes token
t + 1 + k, stands at position t + k, reads the state that step k - 1 fed back at row t, and predicts
token t + 2 + k: the k-th node of a chain that is drafted behind true row t, all rows at once. It
sees what such a node sees::

    step 0        rows 0 .. t of its sequence       the committed prefix
    steps 1 .. k  row t alone, one entry each       the chain's nodes before it, and itself

Only rows that still have a loss, now or at a later step, are computed: a long prompt costs one
step. The recipes say what a row reads and what comes out; see :class:`RecursiveHead`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from outrider.training.packing import Batch
from outrider.training.recipes.layers import Rotation, TrainableLayer, causal_attention

AHEAD = 2  # row t of a head has seen token t + 1 and predicts the one behind
QUERY_ROWS = 256  # rows that attend at once: bounds the scores that exist at the same time


class RecursiveHead(Protocol):
    """A head with one layer that can read its own output."""

    @property
    def layer(self) -> TrainableLayer:
        """The layer that is applied at every step."""
        ...

    def embed(self, token_R: Tensor) -> Tensor:
        """Embeddings ``[R, D]``."""
        ...

    def read_target(self, batch: Batch, row_R: Tensor) -> Tensor:
        """Step 0's features ``[R, D]``, from the target's states."""
        ...

    def join(self, embedded_RD: Tensor, feature_RD: Tensor) -> tuple[Tensor, Tensor]:
        """What q, k and v read, and the residual that attention is added to."""
        ...

    def leave(self, x_RD: Tensor) -> tuple[Tensor, Tensor]:
        """What the output head reads, and the feature that is fed back."""
        ...


@dataclass(frozen=True, slots=True)
class StepRows:
    """The rows that run at one step, ascending.

    ``row_R`` are packed rows, ``position_R`` their places in their sequences, ``counts`` how many
    each sequence has; ``kept_R`` their places among the rows of the step before (None at step 0).
    ``scored_R`` are the places, among these rows, of those that have a loss at this step.
    """

    row_R: Tensor
    position_R: Tensor
    counts: tuple[int, ...]
    kept_R: Tensor | None
    scored_R: Tensor


def plan_steps(batch: Batch, num_steps: int, *, only_response: bool) -> list[StepRows]:
    """Which rows run at each step."""
    is_scored_SP = torch.stack(
        [batch.has_ahead(AHEAD + k, only_response=only_response) for k in range(num_steps)]
    )
    # A row runs as long as it has a loss now or later; at step 0 also where a later row sees it.
    runs_SP = is_scored_SP.flip(0).cumsum(0).flip(0) > 0
    runs_SP[0] = _up_to_last(runs_SP[0], batch)
    steps: list[StepRows] = []
    for k in range(num_steps):
        row_R = runs_SP[k].nonzero().squeeze(1)
        num_sequences = len(batch.lengths)
        counts = batch.sequence_P[row_R].bincount(minlength=num_sequences).tolist()
        kept_R = None
        if k:
            kept_R = runs_SP[k][steps[-1].row_R].nonzero().squeeze(1)
        scored_R = is_scored_SP[k][row_R].nonzero().squeeze(1)
        steps.append(StepRows(row_R, batch.position_P[row_R], tuple(counts), kept_R, scored_R))
    return steps


def run_steps(head: RecursiveHead, batch: Batch, steps: Sequence[StepRows]) -> list[Tensor]:
    """Run the steps; for each, what the output head reads, ``[R, D]`` over the step's rows."""
    layer, memory = head.layer, _Memory(steps[0].counts)
    feature_RD = head.read_target(batch, steps[0].row_R)
    students: list[Tensor] = []
    for k, step in enumerate(steps):
        if step.kept_R is not None:
            feature_RD = feature_RD[step.kept_R]
        embedded_RD = head.embed(batch.token_P[step.row_R + 1 + k])
        normed_RX, residual_RD = head.join(embedded_RD, feature_RD)
        rotation = Rotation(layer.config, step.position_R + k)
        heads_RHK = memory.attend(*layer.project(normed_RX, rotation), step)
        student_RD, feature_RD = head.leave(layer.finish(heads_RHK, residual_RD))
        students.append(student_RD)
    return students


def scored_steps(
    head: RecursiveHead, batch: Batch, num_steps: int, *, only_response: bool
) -> tuple[list[Tensor], list[Tensor]]:
    """The training-time test over a batch: by step, the scored outputs and their packed rows."""
    steps = plan_steps(batch, num_steps, only_response=only_response)
    pairs = zip(run_steps(head, batch, steps), steps, strict=True)
    return (
        [output_RD[step.scored_R] for output_RD, step in pairs],
        [step.row_R[step.scored_R] for step in steps],
    )


class _Memory:
    """Keys and values of step 0 by sequence, and of the later steps by row."""

    def __init__(self, counts: tuple[int, ...]) -> None:
        self._counts = list(counts)
        self._first: list[tuple[Tensor, Tensor]] = []
        self._own: list[tuple[Tensor, Tensor]] = []

    def attend(
        self, query_RHK: Tensor, key_RGK: Tensor, value_RGK: Tensor, step: StepRows
    ) -> Tensor:
        """Attention ``[R, H, K]`` of the next step's rows, which join the memory."""
        if step.kept_R is None:
            keys, values = key_RGK.split(self._counts), value_RGK.split(self._counts)
            self._first = [
                (key_TGK.transpose(0, 1), value_TGK.transpose(0, 1))
                for key_TGK, value_TGK in zip(keys, values, strict=True)
            ]
            return causal_attention(query_RHK, key_RGK, value_RGK, step.counts)
        kept_R = step.kept_R
        self._own = [(key[kept_R], value[kept_R]) for key, value in self._own]
        self._own.append((key_RGK, value_RGK))
        own_key_JRGK, own_value_JRGK = (
            torch.stack(tensors) for tensors in zip(*self._own, strict=True)
        )
        outputs, start = [], 0
        positions = step.position_R.tolist()
        for (key_GTK, value_GTK), count in zip(self._first, step.counts, strict=True):
            for first in range(start, start + count, QUERY_ROWS):
                rows = slice(first, min(first + QUERY_ROWS, start + count))
                end = positions[rows.stop - 1] + 1  # no row of the block sees further
                outputs.append(
                    _attend_block(
                        query_RHK[rows],
                        step.position_R[rows],
                        (key_GTK[:, :end], value_GTK[:, :end]),
                        (own_key_JRGK[:, rows], own_value_JRGK[:, rows]),
                    )
                )
            start += count
        return torch.cat(outputs) if outputs else query_RHK


def _attend_block(
    query_RHK: Tensor,
    position_R: Tensor,
    first: tuple[Tensor, Tensor],
    own: tuple[Tensor, Tensor],
) -> Tensor:
    """Rows of one sequence over step 0's keys up to their own, and J entries of their own.

    ``first`` are keys and values ``[G, T, K]``, ``own`` are ``[J, R, G, K]``.
    """
    (key_GTK, value_GTK), (own_key_JRGK, own_value_JRGK) = first, own
    num_rows, num_heads, head_dim = query_RHK.shape
    num_groups, length, _ = key_GTK.shape
    # Heads of one group stand side by side, so that one product per group serves them all.
    query_RGgK = query_RHK.unflatten(1, (num_groups, num_heads // num_groups))
    query_GXK = query_RGgK.permute(1, 2, 0, 3).reshape(num_groups, -1, head_dim)
    sums = torch.promote_types(query_RHK.dtype, torch.float32)
    first_GgRT = (query_GXK @ key_GTK.transpose(1, 2)).to(sums).unflatten(1, (-1, num_rows))
    is_later_RT = torch.arange(length, device=position_R.device) > position_R.unsqueeze(1)
    first_GgRT = first_GgRT.masked_fill(is_later_RT, float("-inf"))
    own_JRGg = (query_RGgK.to(sums) * own_key_JRGK.unsqueeze(3).to(sums)).sum(-1)
    own_GgRJ = own_JRGg.permute(2, 3, 1, 0)
    scores = torch.cat([first_GgRT, own_GgRJ], dim=-1) * head_dim**-0.5
    probs_GgRT, probs_GgRJ = scores.softmax(-1).split([length, len(own_key_JRGK)], dim=-1)
    mixed_GXK = probs_GgRT.to(value_GTK.dtype).flatten(1, 2) @ value_GTK
    mixed_RGgK = mixed_GXK.unflatten(1, (-1, num_rows)).permute(2, 0, 1, 3)
    probs_JRGg = probs_GgRJ.permute(3, 2, 0, 1)
    own_RGgK = (probs_JRGg.unsqueeze(-1) * own_value_JRGK.unsqueeze(3).to(sums)).sum(0)
    return (mixed_RGgK + own_RGgK).flatten(1, 2).to(query_RHK.dtype)


def _up_to_last(is_needed_P: Tensor, batch: Batch) -> Tensor:
    """Bool ``[P]``: a row at or after this one, of the same sequence, is needed."""
    position_P = batch.position_P
    last_B = position_P.new_full((len(batch.lengths),), -1)
    needed_P = torch.where(is_needed_P, position_P, -1)
    last_B = last_B.scatter_reduce(0, batch.sequence_P, needed_P, "amax")
    return position_P <= last_B[batch.sequence_P]
