"""The load policy on replayed acceptance: near the best fixed setting, and never behind plain.

The traces were recorded from the embedded model with its shipped EAGLE-3 head, with n-gram, and
with both; the costs on the machine that docs/load-policy.md names (``benchmarks/policy.py``).
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import policy
import pytest
from policy_simulator import Fixed, World, busy_hours, measured_world, replay
from policy_trace import Trace, read_traces

from outrider import accounts
from outrider.budget import Budget
from outrider.costs import CostTable

DATA = Path(__file__).parent.parent / "data"
COSTS = json.loads((DATA / "round_costs.json").read_text())
TABLE = CostTable.from_json(COSTS["table"])
TOKENS = 800  # per two users


@cache
def trace(drafter: str, text: str = "greedy") -> Trace:
    name = {"greedy": "acceptance.json.gz", "sampled": "acceptance_sampled.json.gz"}[text]
    (found,) = (t for t in read_traces(DATA / name) if t.drafter == drafter)
    return found


def world(name: str) -> World:
    measured = measured_world(COSTS, TABLE)

    def steeper(users: int, rows: int, context: float) -> float:
        plain_s = measured.round_s(users, users, context)
        return plain_s + 1.5 * (measured.round_s(users, rows, context) - plain_s)

    return {
        "measured": measured,
        "noisy": replace(measured, noise=0.15),
        "drifting": replace(measured, noise=0.05, slowdown=busy_hours),
        "steeper": replace(measured, round_s=steeper),
        "dear passes": replace(measured, pass_s=lambda rows: 2 * measured.pass_s(rows)),
    }[name]


@pytest.mark.parametrize("users", [1, 4, 32])
@pytest.mark.parametrize(
    ("text", "drafter"),
    [
        *(("greedy", name) for name in ("eagle3", "ngram", "eagle3+ngram")),
        *(("sampled", name) for name in ("ngram", "mtp+ngram")),
    ],
)
def test_ours_is_near_the_best_fixed_setting_and_not_behind_plain(
    text: str, drafter: str, users: int
) -> None:
    tokens = TOKENS * max(1, users // 2)
    cell = policy.compare(world("measured"), trace(drafter, text), users, tokens)

    assert 0.95 < cell.of_best
    assert 0.98 < cell.ours


@pytest.mark.parametrize("users", [1, 32])
@pytest.mark.parametrize("name", ["noisy", "drifting", "steeper", "dear passes"])
def test_it_holds_where_costs_are_not_what_they_were(name: str, users: int) -> None:
    tokens = TOKENS * max(1, users // 2)
    cell = policy.compare(world(name), trace("eagle3+ngram"), users, tokens)

    assert 0.95 < cell.of_best
    assert 0.98 < cell.ours


def changing(first: str, then: str) -> Trace:
    """A drafter whose text turns from one kind to the other: half of its answers each."""
    halves = [trace("eagle3+ngram", text).answers[:8] for text in (first, then)]
    return Trace("eagle3+ngram", True, True, (*halves[0], *halves[1]))


@pytest.mark.parametrize("users", [1, 8])
def test_it_follows_a_text_that_changes(users: int) -> None:
    cell = policy.compare(world("noisy"), changing("greedy", "sampled"), users, 1000 * users)

    assert 0.95 < cell.of_best
    assert 0.98 < cell.ours


def test_passes_are_left_out_where_looking_up_alone_pays_and_made_where_they_add() -> None:
    """The merged drafter at many users reached .88 of the best setting while it had to do both."""

    def passes(users: int) -> float:
        class Counting(Budget):
            num_passes = num_rounds = 0

            def observe(self, record, contexts, num_silent=0, paths=()) -> None:
                super().observe(record, contexts, num_silent, paths)
                self.num_rounds += 1
                self.num_passes += record.draft_passes > 0

        counting = Counting(TABLE, max_rows=64)
        where = world("measured")
        replay(counting, trace("eagle3+ngram"), where, users, tokens=1000 * users)
        return counting.num_passes / counting.num_rounds

    assert passes(32) < 0.1
    assert passes(1) > 0.5


def never_right(drafter: str) -> Trace:
    """The same trees along answers of other tokens."""
    answers = tuple(
        replace(answer, tokens=(-1,) * len(answer.tokens)) for answer in trace(drafter).answers
    )
    return replace(trace(drafter), answers=answers)


@pytest.mark.parametrize("users", [1, 16])
def test_a_head_that_lies_is_left_out(users: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its scores promise much, and nothing comes of it; without the account it would go on."""
    lies, where = never_right("eagle3"), world("noisy")

    def rate(new: Budget | Fixed) -> float:
        return replay(new, lies, where, users, tokens=3000 * users).rate

    plain = rate(Fixed(0, 0))
    ours = rate(Budget(where.table, max_rows=64))
    monkeypatch.setattr(accounts.Account, "pay", lambda account, rounds: None)
    without_account = rate(Budget(where.table, max_rows=64))

    assert 0.95 * plain < ours
    assert without_account < 0.9 * plain
