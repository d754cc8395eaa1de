"""How a pass groups its requests for attention; what it computes is tests/exactness' business."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.models.layers import SIMILAR_LENGTH, similar_requests


@given(st.lists(st.integers(1, 4000), min_size=1, max_size=64), st.integers(1, 20_000))
def test_every_request_is_in_one_group_and_padding_stays_small(
    lengths: list[int], max_slots: int
) -> None:
    groups = similar_requests(lengths, max_slots)

    assert list(range(len(lengths))) == sorted(b for group in groups for b in group)
    assert all(group == sorted(group) for group in groups)
    for group in groups:
        longest = max(lengths[b] for b in group)

        assert all(lengths[b] >= SIMILAR_LENGTH * longest for b in group)
        assert len(group) == 1 or len(group) * longest <= max_slots
    # No group could have joined the one before: few groups are few kernel calls.
    for before, after in pairwise(groups):
        longest = max(lengths[b] for b in before)
        is_full = longest * (len(before) + 1) > max_slots

        assert is_full or all(lengths[b] < SIMILAR_LENGTH * longest for b in after)


@pytest.mark.parametrize(
    ("lengths", "max_slots", "groups"),
    [
        ([100], 4000, [[0]]),
        ([100, 100, 100], 4000, [[0, 1, 2]]),
        ([100, 100, 100], 200, [[0, 1], [2]]),
        ([100, 100, 100], 10, [[0], [1], [2]]),
        ([70, 100], 4000, [[0, 1]]),
        ([69, 100], 4000, [[1], [0]]),
        ([10, 1000, 900, 11], 4000, [[1, 2], [0, 3]]),
    ],
)
def test_groups_of_known_lengths(
    lengths: list[int], max_slots: int, groups: list[list[int]]
) -> None:
    assert groups == similar_requests(lengths, max_slots)
