"""What the rows of a pass see, against masks written out (arithmetic: tests/parity)."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outrider.models.attention import Sight, plan_sight


def sight_of(ends, counts, masks, depths, *, num_threads: int = 1, window: int | None = None):
    return plan_sight(
        ends,
        counts,
        masks,
        depths,
        num_groups=2,
        heads_per_group=3,
        num_threads=num_threads,
        window=window,
    )


def slots_seen(sight: Sight) -> list[list[int]]:
    return [sight.visible(row).tolist() for row in range(len(sight.low_R))]


def test_a_chain_sees_the_prefix_and_what_is_before_it() -> None:
    sight = sight_of([5, 3], [3, 1], [None, None], [range(3), range(1)])

    assert [[0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3, 4], [0, 1, 2]] == slots_seen(sight)


def test_a_node_sees_the_prefix_its_ancestors_and_itself() -> None:
    mask = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]]).bool()
    sight = sight_of([6], [4], [mask], [[0, 1, 1, 2]])

    assert [[0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 4], [0, 1, 2, 4, 5]] == slots_seen(sight)


def test_rows_of_earlier_passes_are_part_of_the_tree() -> None:
    mask = torch.tensor([[1, 0, 1, 0], [1, 1, 0, 1]]).bool()  # two rows written before
    sight = sight_of([6, 4], [2, 1], [mask, None], [[0, 1, 1, 2], range(3)])

    assert [[0, 1, 2, 4], [0, 1, 2, 3, 5], [0, 1, 2, 3]] == slots_seen(sight)


@pytest.mark.parametrize("window", [1, 2, 3, 5, 50])
def test_a_window_hides_what_is_too_old(window: int) -> None:
    mask = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 0, 0, 1]]).bool()
    depths = [0, 1, 2, 1]
    tree = sight_of([9], [4], [mask], [depths], window=window)
    chain = sight_of([9], [4], [None], [range(4)], window=window)
    positions = [*range(5), *(5 + depth for depth in depths)]
    for node, seen in enumerate(slots_seen(tree)):
        visible = [*range(5), *(5 + i for i in range(4) if mask[node, i])]
        oldest = 5 + depths[node] - window

        assert [slot for slot in visible if positions[slot] > oldest] == seen
    for row, seen in enumerate(slots_seen(chain)):
        assert list(range(max(0, 6 + row - window), 6 + row)) == seen


@given(
    st.lists(
        st.tuples(st.integers(0, 400), st.integers(1, 300), st.booleans()), min_size=1, max_size=9
    ),
    st.integers(1, 5),
)
def test_the_pieces_of_work_are_every_row_of_every_group_once(segments, num_threads: int) -> None:
    ends = [prefix + count for prefix, count, _ in segments]
    counts = [count for _, count, _ in segments]
    masks = [torch.eye(count).bool() if is_tree else None for _, count, is_tree in segments]
    depths = [[0] * count if is_tree else range(count) for _, count, is_tree in segments]
    sight = sight_of(ends, counts, masks, depths, num_threads=num_threads)
    done = np.zeros((sum(counts), 2), int)
    owner = np.repeat(np.arange(len(counts)), counts)
    for first, size, group, end in sight.item_I4:
        done[first : first + size, group] += 1

        assert owner[first] == owner[first + size - 1]
        assert all(sight.visible(row).max() < end for row in range(first, first + size))
        assert end <= ends[owner[first]]
    assert (done == 1).all()
