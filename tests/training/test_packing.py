"""Sequences packed into rows, and epochs planned into batches."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outrider.errors import ParameterError
from outrider.training.packing import TrainingSequence, pack, plan_batches

LENGTHS = [37 + (71 * i) % 301 for i in range(600)]


def sequence(tokens: list[int], prompt_len: int, *, captured: bool = True) -> TrainingSequence:
    value_T1 = torch.tensor(tokens).unsqueeze(1)
    states_TC = value_T1.repeat(1, 4).bfloat16() if captured else None
    return TrainingSequence(tokens, prompt_len, states_TC, value_T1.repeat(1, 2).bfloat16())


def test_sequences_lie_end_to_end() -> None:
    batch = pack([sequence([5, 6, 7, 8, 9], 2), sequence([1, 2, 3], 1)])

    assert (5, 3) == batch.lengths
    assert [5, 6, 7, 8, 9, 1, 2, 3] == batch.token_P.tolist()
    assert [0, 0, 0, 0, 0, 1, 1, 1] == batch.sequence_P.tolist()
    assert [0, 1, 2, 3, 4, 0, 1, 2] == batch.position_P.tolist()
    assert [False, False, True, True, True, False, True, True] == batch.is_response_P.tolist()
    assert batch.states_PC is not None
    assert [5, 6, 7, 8, 9, 1, 2, 3] == batch.states_PC[:, 3].tolist()
    assert [5, 6, 7, 8, 9, 1, 2, 3] == batch.final_PD[:, 1].tolist()


def test_what_lies_ahead_ends_with_the_sequence() -> None:
    batch = pack([sequence([5, 6, 7, 8, 9], 3), sequence([1, 2, 3], 1)])

    anywhere = batch.has_ahead(2, only_response=False)
    assert [True, True, True, False, False, True, False, False] == anywhere.tolist()
    answered = batch.has_ahead(2, only_response=True)
    assert [False, True, True, False, False, True, False, False] == answered.tolist()


def test_a_batch_without_captured_states_moves_as_a_whole() -> None:
    batch = pack([sequence([5, 6], 1, captured=False)]).to("meta")

    assert batch.states_PC is None
    assert {"meta"} == {
        tensor.device.type
        for tensor in (batch.token_P, batch.sequence_P, batch.position_P, batch.final_PD)
    }


@given(
    lengths=st.lists(st.integers(1, 50), max_size=120),
    tokens_per_batch=st.integers(1, 200),
    seed=st.integers(0, 3),
    epoch=st.integers(0, 3),
)
def test_every_sequence_is_in_exactly_one_batch_within_the_budget(
    lengths: list[int], tokens_per_batch: int, seed: int, epoch: int
) -> None:
    plan = plan_batches(lengths, tokens_per_batch=tokens_per_batch, seed=seed, epoch=epoch)

    assert list(range(len(lengths))) == sorted(index for batch in plan for index in batch)
    for batch in plan:
        assert len(batch) == 1 or sum(lengths[i] for i in batch) <= tokens_per_batch


def test_batches_are_nearly_full() -> None:
    plan = plan_batches(LENGTHS, tokens_per_batch=2048, seed=0, epoch=0)

    assert len(plan) <= 1.03 * sum(LENGTHS) / 2048 + 1


def test_the_order_follows_from_seed_and_epoch_alone() -> None:
    def plan(seed: int, epoch: int) -> list[list[int]]:
        return plan_batches(LENGTHS, tokens_per_batch=2048, seed=seed, epoch=epoch)

    assert plan(1, 2) == plan(1, 2)
    assert plan(1, 2) != plan(1, 3)
    assert plan(1, 2) != plan(2, 2)
    # Pinned: a checkpoint's data position means the same in every process and version.
    assert [[0, 1, 4], [3, 2]] == plan_batches(
        [5, 6, 7, 8, 9], tokens_per_batch=20, seed=0, epoch=0
    )


def test_long_and_short_sequences_are_mixed_over_an_epoch() -> None:
    """The mean length of the first half of an epoch's sequences is that of the second."""
    plan = plan_batches(LENGTHS, tokens_per_batch=1024, seed=0, epoch=0)
    order = [LENGTHS[index] for batch in plan for index in batch]
    first, second = order[:300], order[300:]

    assert 0 == pytest.approx(sum(first) / 300 - sum(second) / 300, abs=20)


def test_a_budget_below_one_token_is_refused() -> None:
    with pytest.raises(ParameterError, match=r"tokens_per_batch: 0 .* 2048"):
        plan_batches([3], tokens_per_batch=0, seed=0, epoch=0)
