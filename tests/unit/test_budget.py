"""The load policy: whether the drafter is asked, and which nodes are verified."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.accounts import ALLOWANCE, CEILING
from outrider.budget import PLAIN_ROUNDS, YIELD, Budget
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


@given(st.lists(trees(), min_size=1, max_size=4), st.integers(0, 80))
def test_a_prompts_rows_leave_the_fewer_for_guesses(
    batch: list[DraftTree], num_silent: int
) -> None:
    """Beyond the table's last row a pass seems to cost no more, which it does."""
    kept = Budget(FLAT, max_rows=64).prune(batch, [10] * len(batch), num_silent)

    room = max(0, 64 - len(batch) - num_silent)
    assert min(room, sum(tree.num_drafted for tree in batch)) == sum(t.num_drafted for t in kept)


def test_pinned_settings_ask_always_and_for_everything() -> None:
    budget = Budget(None, max_rows=64)
    for _ in range(100):
        budget.observe(drafted(0.02, 1), [10], 0, [()])

    assert 0.0 == budget.min_score([10])


def test_a_faster_load_makes_time_dearer() -> None:
    """What a second is worth is what is decoded in one: a slow row pays only while little is."""
    tree = DraftTree.root(1)
    tree.add(0, 2, 0.5)
    costs = CostTable((1, 2), (64,), ((1.0, 1.3),))
    budget = Budget(costs, max_rows=8)

    assert 1 == budget.prune([tree], [10])[0].num_drafted
    for _ in range(100):  # four tokens a second
        record = StepRecord(1, 2, 0.0, 1.3, 0.0, num_tokens=5, was_asked=True)
        budget.observe(record, [10], 0, [()])
    assert 0 == budget.prune([tree], [10])[0].num_drafted


@pytest.mark.parametrize("row_s", [0.0, 0.001])
def test_a_pass_must_promise_what_its_time_and_its_childs_row_are_worth(row_s: float) -> None:
    table = CostTable((1, 64), (64,), ((0.02, 0.02 + 63 * row_s),))
    budget = begun(table)
    for _ in range(90):
        budget.prune([certain_chain()], [10])
        seconds = 0.02 + 2 * row_s
        budget.observe(drafted(seconds, 3, draft_s=0.004, passes=2, rows=3), [10], 0, [(1, 2)])

    # 3 tokens in 24 ms and two rows; a pass takes 2 ms; a child is half as likely as its parent.
    rate = 3 / (0.024 + 2 * row_s)
    assert rate * (0.002 + row_s) / YIELD == pytest.approx(budget.min_score([10]) or 0, rel=0.05)


def drafted(
    seconds: float,
    tokens: int,
    *,
    draft_s: float = 0.01,
    passes: int = 1,
    users: int = 1,
    rows: int | None = None,
) -> StepRecord:
    """A round that drafted."""
    return StepRecord(
        num_requests=users,
        num_rows=users if rows is None else rows,
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


def begun(table: CostTable, users: int = 1) -> Budget:
    """A policy that has seen as many plain rounds of this load as it wants to at first."""
    budget = Budget(table, max_rows=64)
    for _ in range(PLAIN_ROUNDS):
        budget.observe(plain(0.02, users), [10] * users)
    return budget


def certain_chain() -> DraftTree:
    """Two tokens, each promised for sure."""
    chain = DraftTree.root(1)
    chain.add(chain.add(0, 2, 1.0), 3, 1.0)
    return chain


def play(budget: Budget, num_rounds: int, accepted: int, users: int = 1) -> list[bool]:
    """Rounds of a drafter that promises two tokens per request; whether each was asked.

    Asking takes half as long as the target's pass.
    """
    asked = []
    for _ in range(num_rounds):
        asked.append(budget.min_score([10] * users) is not None)
        if asked[-1]:
            budget.prune([certain_chain()] * users, [10] * users)
            record = drafted(0.02, users * (1 + accepted), users=users)
            budget.observe(record, [10] * users, 0, [range(1, accepted + 1)] * users)
        else:
            budget.observe(plain(0.02, users), [10] * users)
    return asked


def test_a_load_begins_with_plain_rounds() -> None:
    asked = play(Budget(FLAT, max_rows=64), 20, accepted=2)

    assert [False] * PLAIN_ROUNDS + [True] * (20 - PLAIN_ROUNDS) == asked


def test_a_drafter_that_pays_is_asked_but_for_a_look_at_plain_rounds() -> None:
    asked = play(begun(FLAT), 1000, accepted=2)

    assert 1000 // (1 + round(1 / ALLOWANCE)) == asked.count(False)


def test_a_drafter_that_is_never_right_is_left_out_and_costs_little() -> None:
    """Half a round lost each time: closed within a few, and 1 % from then on."""
    budget = begun(FLAT)
    first, later = play(budget, 1000, accepted=0), play(budget, 3000, accepted=0)

    assert first[0]
    assert 0.5 * sum(first) < 40
    assert 0 < 0.5 * sum(later) <= 2 * ALLOWANCE * len(later)  # it is still looked at


def test_a_drafter_that_becomes_right_is_asked_again() -> None:
    budget = begun(FLAT)
    wrong, right = play(budget, 1000, accepted=0), play(budget, 3000, accepted=2)

    assert sum(wrong[500:]) < 20
    assert sum(right[1500:]) > 1400


def test_loads_are_judged_apart() -> None:
    """At 16 requests drafting loses, alone it gains."""
    budget = begun(FLAT)
    for _ in range(20):
        play(budget, 20, accepted=2)
        play(budget, 20, accepted=0, users=16)

    assert sum(play(budget, 20, accepted=2)) > 18
    assert sum(play(budget, 20, accepted=0, users=16)) < 5


def test_a_good_past_does_not_pay_for_a_bad_present() -> None:
    budget = begun(FLAT)
    play(budget, 10_000, accepted=2)
    at_first, later = play(budget, 400, accepted=0), play(budget, 400, accepted=0)

    assert 0.5 * sum(at_first) < 10 * CEILING
    assert sum(later) < 40


def merged(looked_up: float, of_passes: float) -> DraftTree:
    """One token that was looked up, and one that a pass found."""
    tree = DraftTree.root(1)
    tree.looked_up[tree.add(0, 2, looked_up)] = looked_up
    if of_passes:
        tree.add(0, 3, of_passes)
    return tree


def play_merged(budget: Budget, num_rounds: int, right: int, users: int = 8) -> list[str]:
    """Rounds in which the node that was looked up (1), or that of the pass (2), is right.

    A pass takes a quarter of the target's.
    """
    done = []
    for _ in range(num_rounds):
        min_score = budget.min_score([10] * users)
        if min_score is None:
            done.append("plain")
            budget.observe(plain(0.02, users), [10] * users)
            continue
        makes_passes = min_score <= 1
        done.append("passes" if makes_passes else "lookups")
        trees = [merged(0.6, 0.3 if makes_passes else 0.0)] * users
        kept = budget.prune(trees, [10] * users)
        hits = [(right,) if len(tree) > right else () for tree in kept]
        tokens = users + sum(map(len, hits))
        passes = int(makes_passes)
        record = drafted(0.02, tokens, draft_s=0.005 * passes, passes=passes, users=users)
        budget.observe(record, [10] * users, 0, hits)
    return done


def test_passes_that_add_nothing_to_what_is_looked_up_are_left_out() -> None:
    done = play_merged(begun(FLAT, 8), 1000, right=1)

    assert done.count("lookups") > 900
    assert 0 < done.count("passes") < 40
    assert done.count("plain") < 20


def test_passes_that_find_what_cannot_be_looked_up_are_made() -> None:
    done = play_merged(begun(FLAT, 8), 1000, right=2)

    assert done.count("passes") > 900


def test_a_load_beyond_one_at_which_drafting_was_given_up_begins_without() -> None:
    budget = begun(FLAT, 4)
    play(budget, 200, accepted=0, users=4)
    more = play(budget, 60, accepted=0, users=16)

    assert [False] * 60 == more
    assert any(play(budget, 1000, accepted=2, users=16))


def test_catching_up_before_a_look_is_paid_for_by_a_longer_wait() -> None:
    """A look that is preceded by two rounds' worth of rows comes less often."""

    def looks(late_s: float) -> int:
        budget, count, was_asked = begun(FLAT), 0, True
        play(budget, 200, accepted=0)
        for _ in range(4000):
            is_asked = budget.min_score([10]) is not None
            if is_asked:
                budget.prune([certain_chain()], [10])
                draft_s = 0.01 if was_asked else 0.01 + late_s
                budget.observe(drafted(0.02, 1, draft_s=draft_s), [10], 0, [()])
                count += not was_asked
            else:
                budget.observe(plain(0.02), [10])
            was_asked = is_asked
        return count

    assert 0 < looks(0.04) < 0.6 * looks(0.0)
