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
from policy_simulator import (
    Fixed,
    Policy,
    World,
    busy_hours,
    fixed_settings,
    measured_world,
    replay,
)
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


def never_right(drafter: str) -> Trace:
    """The same trees along answers of other tokens."""
    answers = tuple(
        replace(answer, tokens=(-1,) * len(answer.tokens)) for answer in trace(drafter).answers
    )
    return replace(trace(drafter), answers=answers)


@pytest.mark.parametrize("users", [1, 16])
@pytest.mark.parametrize("then", ["sampled", "never right", "greedy"])
def test_it_follows_a_text_that_changes_midway(then: str, users: int) -> None:
    """The best setting for both halves is chosen in hindsight; ours does not know of the change.

    Halves of 1,000 tokens per user: after a drafter that was never right, up to 400 rounds pass
    before it is looked at again.
    """
    drafter, where = "eagle3+ngram", world("noisy")
    others = {"sampled": trace(drafter, "sampled"), "never right": never_right(drafter)}
    halves = [trace(drafter), others.get(then, trace(drafter))]
    if then == "greedy":
        halves[0] = never_right(drafter)

    def rate(setting: Policy) -> float:
        outcomes = [replay(setting, half, where, users, tokens=1000 * users) for half in halves]
        return sum(o.tokens for o in outcomes) / sum(o.seconds for o in outcomes)

    ours = rate(Budget(where.table, max_rows=64))
    fixed = {name: rate(new()) for name, new in fixed_settings(halves[0]).items()}

    assert 0.95 * max(fixed.values()) < ours
    assert 0.98 * fixed["plain"] < ours


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
