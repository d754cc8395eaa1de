"""The load policy: whether the drafter is asked, and which nodes are verified."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.budget import ALLOWANCE, CEILING, OPENING, Budget
from outrider.costs import CostTable
from outrider.tree import DraftTree
from outrider.types import StepRecord
from tests.strategies import trees

FLAT = CostTable(rows=(1, 64), contexts=(64,), seconds=((0.02, 0.02),))
STEEP = CostTable(rows=(1, 64), contexts=(64,), seconds=((0.02, 0.02 * 64),))


def test_free_rows_are_all_used_and_linear_rows_are_not() -> None:
    """Where rows cost nothing every node pays; where each costs a whole pass, none does."""
    tree = DraftTree.root(1)
    for token, score in ((2, 0.9), (3, 0.05), (4, 0.01)):
        tree.add(0, token, score)

    assert [3] == [t.num_drafted for t in Budget(FLAT, max_rows=64).prune([tree], [10])]
    assert [0] == [t.num_drafted for t in Budget(STEEP, max_rows=64).prune([tree], [10])]


@given(st.lists(trees(), min_size=1, max_size=3), st.floats(0.001, 2.0))
def test_the_kept_nodes_are_worth_the_most_beyond_their_time(
    batch: list[DraftTree], row_cost: float
) -> None:
    """Brute force over how many of the best nodes to keep."""
    costs = CostTable((1, 100), (64,), ((1.0, 1.0 + 99 * row_cost),))
    kept = Budget(costs, max_rows=100).prune(batch, [10] * len(batch))
    scores = sorted((s for tree in batch for s in tree.score[1:]), reverse=True)
    plain_rate = len(batch) / costs.at(len(batch), 10)

    def worth(count: int) -> float:
        seconds = costs.at(len(batch) + count, 10) - costs.at(len(batch), 10)
        return sum(scores[:count]) - plain_rate * seconds

    num_kept = sum(tree.num_drafted for tree in kept)
    best = max(worth(count) for count in range(len(scores) + 1))
    assert best == pytest.approx(worth(num_kept), abs=1e-9)
    for before, after in zip(batch, kept, strict=True):
        paths = {tuple(before.path_tokens(n)) for n in range(len(before))}
        assert {tuple(after.path_tokens(n)) for n in range(len(after))} <= paths


@given(st.lists(trees(), min_size=1, max_size=4), st.integers(1, 12))
def test_rows_never_exceed_the_pass(batch: list[DraftTree], max_rows: int) -> None:
    kept = Budget(None, max_rows=max_rows).prune(batch, [5] * len(batch))

    assert sum(len(tree) for tree in kept) <= max(max_rows, len(batch))


def test_pinned_settings_ask_always_and_for_everything() -> None:
    budget = Budget(None, max_rows=64)
    for _ in range(100):
        budget.observe(drafted(0.02, 1), [10])

    assert 0.0 == budget.min_score([10])


def test_a_faster_load_makes_time_dearer() -> None:
    """What a second is worth is what is decoded in one: a slow row pays only while little is."""
    tree = DraftTree.root(1)
    tree.add(0, 2, 0.5)
    costs = CostTable((1, 2), (64,), ((1.0, 1.3),))
    budget = Budget(costs, max_rows=8)

    assert 1 == budget.prune([tree], [10])[0].num_drafted
    for _ in range(100):  # four tokens a second
        budget.observe(StepRecord(1, 2, 0.0, 1.3, 0.0, num_tokens=5, was_asked=True), [10])
    assert 0 == budget.prune([tree], [10])[0].num_drafted


def test_a_pass_must_promise_what_its_time_is_worth() -> None:
    budget = Budget(FLAT, max_rows=64)
    for _ in range(100):
        budget.observe(drafted(0.02, 2, draft_s=0.004, passes=2), [10])

    # 2 tokens in 24 ms; a pass takes 2 ms.
    assert 2 / 0.024 * 0.002 == pytest.approx(budget.min_score([10]) or 0, rel=0.05)


def drafted(
    seconds: float, tokens: int, *, draft_s: float = 0.01, passes: int = 1, users: int = 1
) -> StepRecord:
    """A round that drafted."""
    return StepRecord(
        num_requests=users,
        num_rows=users,
        draft_s=draft_s,
        verify_s=seconds,
        rest_s=0.0,
        draft_passes=passes,
        num_tokens=tokens,
        was_asked=True,
    )


def plain(seconds: float, users: int = 1) -> StepRecord:
    """A round of plain decoding."""
    return StepRecord(users, users, 0.0, seconds, 0.0, num_tokens=users)


def test_a_drafter_that_is_never_right_is_left_out_and_costs_little() -> None:
    """A third of a round lost each time: closed after CEILING rounds' loss, 1 % from then on."""
    budget, lost, num_asked = Budget(FLAT, max_rows=64), 0.0, []
    for _ in range(4000):
        asked = budget.min_score([10]) is not None
        num_asked.append(asked)
        budget.observe(drafted(0.02, 1) if asked else plain(0.02), [10])
        lost += 0.5 * asked

    assert num_asked[0]
    assert sum(num_asked[:100]) <= 2 * CEILING + 1
    assert 0 < sum(num_asked[1000:]) < 0.03 * 3000  # it is still looked at now and then
    assert lost <= CEILING + ALLOWANCE * 4000 + OPENING


def test_a_drafter_that_becomes_right_is_asked_again() -> None:
    budget = Budget(FLAT, max_rows=64)
    for _ in range(1000):
        asked = budget.min_score([10]) is not None
        budget.observe(drafted(0.02, 1) if asked else plain(0.02), [10])
    asked_since = []
    for _ in range(1000):
        asked = budget.min_score([10]) is not None
        asked_since.append(asked)
        budget.observe(drafted(0.02, 3) if asked else plain(0.02), [10])

    assert all(asked_since[200:])


def test_loads_are_judged_apart() -> None:
    """At 16 requests drafting loses, alone it gains."""
    budget = Budget(FLAT, max_rows=64)
    for _ in range(200):
        budget.observe(drafted(0.02, 2), [10])
        budget.observe(drafted(0.02, 16, users=16), [10] * 16)

    assert budget.min_score([10]) is not None
    assert budget.min_score([10] * 16) is None


def test_a_good_past_does_not_pay_for_a_bad_present() -> None:
    budget = Budget(FLAT, max_rows=64)
    for _ in range(10_000):
        budget.observe(drafted(0.02, 5), [10])
    count = 0
    while budget.min_score([10]) is not None:
        budget.observe(drafted(0.02, 1), [10])
        count += 1

    assert count <= 2 * CEILING + 1
