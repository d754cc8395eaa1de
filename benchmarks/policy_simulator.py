"""Replays traces of acceptance against tables of costs, under any load policy.

A closed loop: so many users, each with an answer under way, and the next text as soon as one ends.
Each round the policy says whether to draft and what to verify, the world says what that took, and
the trace which nodes were right. What a policy gets to see is what the engine would show it.

Policies are :class:`~outrider.budget.Budget` and what stands in for it here: fixed settings, and
the rule of tiers by a moving average that other engines use.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Protocol

import numpy as np
from policy_trace import Answer, Node, Trace

from outrider.costs import CostTable
from outrider.tree import DraftTree
from outrider.types import StepRecord

HIT = 1  # the token of a node that is on the answer's path


class Policy(Protocol):
    """What a budget does for the engine."""

    def min_score(self, contexts: Sequence[int]) -> float | None:
        """None to draft nothing, else what a node must promise to be extended."""
        ...

    def prune(
        self, trees: Sequence[DraftTree], contexts: Sequence[int], num_silent: int = 0
    ) -> list[DraftTree]:
        """The nodes that are verified."""
        ...

    def observe(self, record: StepRecord, contexts: Sequence[int], num_silent: int = 0) -> None:
        """What the round took and brought."""
        ...


class Fixed:
    """The same setting in every round: so deep, so many nodes per request; 0 is plain decoding."""

    def __init__(self, depth: int, num_nodes: int) -> None:
        self.depth, self._num_nodes = depth, num_nodes

    def min_score(self, contexts: Sequence[int]) -> float | None:
        """Draft as deep as the setting says."""
        return 0.0 if self._num_nodes else None

    def prune(
        self, trees: Sequence[DraftTree], contexts: Sequence[int], num_silent: int = 0
    ) -> list[DraftTree]:
        """The best nodes of each."""
        return [tree.best(self._num_nodes, self.depth) for tree in trees]

    def observe(self, record: StepRecord, contexts: Sequence[int], num_silent: int = 0) -> None:
        """A fixed setting learns nothing."""


class Tiers:
    """What SGLang's adaptive mode does: a moving average of accepted tokens picks the depth.

    The depth is the average rounded up and one more, of as many nodes; from 64 requests on, off.
    """

    def __init__(self, max_depth: int) -> None:
        self._accepted: dict[int, float] = {}
        self._max_depth = max_depth
        self.depth = max_depth

    def min_score(self, contexts: Sequence[int]) -> float | None:
        """Always drafts, below 64 requests."""
        average = self._accepted.get(len(contexts), self._max_depth / 2)
        self.depth = min(self._max_depth, math.ceil(average) + 1)
        return None if len(contexts) >= 64 else 0.0

    def prune(
        self, trees: Sequence[DraftTree], contexts: Sequence[int], num_silent: int = 0
    ) -> list[DraftTree]:
        """A chain's worth of nodes."""
        return [tree.best(self.depth, self.depth) for tree in trees]

    def observe(self, record: StepRecord, contexts: Sequence[int], num_silent: int = 0) -> None:
        """Follow the accepted tokens per request."""
        if record.was_asked:
            accepted = record.num_tokens / record.num_requests - 1
            before = self._accepted.setdefault(len(contexts), accepted)
            self._accepted[len(contexts)] = before + 0.2 * (accepted - before)


@dataclass(frozen=True)
class World:
    """What rounds take.

    Attributes:
        table: the target's pass alone, which is all a policy is told at the start.
        round_s: (users, rows, context) to seconds, as served, drafting left out.
        draft_s: (users, passes) to seconds; of n-gram passes are 0.
        noise: relative spread of each round.
        slowdown: by the time on the clock, for a machine whose speed changes.
    """

    name: str
    table: CostTable
    round_s: Callable[[int, int, float], float]
    draft_s: Callable[[int, int], float]
    noise: float = 0.0
    slowdown: Callable[[float], float] = field(default=lambda now: 1.0)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Tokens and seconds of a run, and in how many of its rounds the drafter was asked."""

    tokens: int
    seconds: float
    rounds: int
    asked: int
    rows: int

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


@cache
def tree_of(nodes: tuple[Node, ...]) -> DraftTree:
    """A recorded tree; the answer's own nodes hold ``HIT``."""
    tree = DraftTree.root(0)
    for place, (parent, score, is_hit) in enumerate(nodes):
        tree.add(parent, HIT if is_hit else 2 + place, max(1e-6, score / 1000))
    return tree


@dataclass(slots=True)
class _User:
    answer: Answer
    place: int = 0


def replay(
    policy: Policy, trace: Trace, world: World, users: int, *, tokens: int, seed: int = 0
) -> Outcome:
    """Serve until so many tokens are out; texts come in the same order for every policy."""
    dice = random.Random(seed)
    order: list[Answer] = []

    def next_answer() -> Answer:
        if not order:
            order.extend(dice.sample(trace.answers, len(trace.answers)))
        return order.pop()

    running = [_User(next_answer()) for _ in range(users)]
    for user in running:  # not all begin at once
        user.place = dice.randrange(len(user.answer.places))
    noise = random.Random(seed + 1)
    total, now, rounds, asked, rows = 0, 0.0, 0, 0, 0
    while total < tokens:
        contexts = [user.answer.prompt_len + user.place for user in running]
        min_score = policy.min_score(contexts)
        trees, num_passes = _draft(policy, running, min_score)
        kept = policy.prune(trees, contexts)
        emitted = 0
        for user, tree in zip(running, kept, strict=True):
            room = len(user.answer.places) - user.place
            emitted += (new := min(room, 1 + _num_accepted(tree)))
            user.place += new
            if user.place >= len(user.answer.places):
                user.answer, user.place = next_answer(), 0
        num_rows = sum(map(len, kept))
        was_asked = min_score is not None
        passes = num_passes if trace.makes_passes else 0
        factor = world.slowdown(now) * math.exp(noise.gauss(0.0, world.noise))
        if world.noise and noise.random() < 0.01:
            factor *= 3.0  # somebody else took the processor
        record = StepRecord(
            num_requests=users,
            num_rows=num_rows,
            draft_s=factor * world.draft_s(users, passes) if was_asked else 0.0,
            verify_s=factor * world.round_s(users, num_rows, sum(contexts) / users),
            rest_s=0.0,
            draft_passes=passes,
            num_tokens=emitted,
            was_asked=was_asked,
        )
        policy.observe(record, contexts)
        now += record.draft_s + record.verify_s
        total, rounds, rows = total + emitted, rounds + 1, rows + num_rows
        asked += was_asked
    return Outcome(total, now, rounds, asked, rows)


def _draft(
    policy: Policy, running: Sequence[_User], min_score: float | None
) -> tuple[list[DraftTree], int]:
    """The trees as the drafter would grow them, and its passes."""
    if min_score is None:
        return [DraftTree.root(0) for _ in running], 0
    limit = getattr(policy, "depth", 10**6)
    trees, passes = [], 0
    for user in running:
        tree = tree_of(user.answer.places[user.place])
        depth = 1
        while depth < limit and any(
            at == depth and score >= min_score
            for at, score in zip(tree.depth, tree.score, strict=True)
        ):
            depth += 1
        if tree.depth and max(tree.depth) > depth:
            tree = tree.best(len(tree), depth)
        trees.append(tree)
        passes = max(passes, min(depth, max(1, *tree.depth)))
    return trees, passes


def _num_accepted(tree: DraftTree) -> int:
    children, node, count = tree.children(), 0, 0
    while HIT in children[node]:
        node = children[node][HIT]
        count += 1
    return count


def fixed_settings(max_depth: int, max_nodes: int) -> dict[str, Callable[[], Policy]]:
    """Plain decoding, and the chains and trees that a user might pin."""
    found: dict[str, Callable[[], Policy]] = {"plain": lambda: Fixed(0, 0)}
    for depth in range(1, max_depth + 1):
        for num_nodes in sorted({depth, max_nodes}):
            if depth <= num_nodes <= max_nodes:
                name = f"depth {depth}, {num_nodes} nodes"
                found[name] = lambda d=depth, n=num_nodes: Fixed(d, n)
    return found


def measured_world(costs: Mapping[str, Any], drafter: str, table: CostTable) -> World:
    """The world that ``policy.py costs`` measured; a load that it did not is an error."""
    served: dict[int, list[tuple[int, float]]] = {}
    for cell in costs["rounds"]:
        served.setdefault(cell["users"], []).append((cell["rows"], cell["seconds"]))
    drafting = {
        (cell["method"], cell["users"], cell["depth"]): (cell["passes"], cell["seconds"])
        for cell in costs["drafting"]
    }

    def round_s(users: int, rows: int, context: float) -> float:
        known = sorted(served[users])
        seconds = float(np.interp(rows, [at for at, _ in known], [s for _, s in known]))
        return seconds * table.at(rows, context) / table.at(rows, costs["context"])

    def draft_s(users: int, passes: int) -> float:
        seconds = 0.0
        if drafter != "ngram":
            (few, short), (many, long) = (drafting["eagle3", users, depth] for depth in (1, 5))
            seconds += short + (passes - few) * (long - short) / (many - few)
        if drafter != "eagle3":
            seconds += drafting["ngram", users, 5][1]
        return seconds

    return World("measured", table, round_s, draft_s)


def gpu_world(drafter: str) -> World:
    """A made-up accelerator: 8 ms a round, flat up to 96 rows, then each row costs its share."""

    def round_s(users: int, rows: int, context: float) -> float:
        return 0.007 * max(1.0, rows / 96) + 0.001 + 2e-5 * users + 1e-9 * users * context

    def draft_s(users: int, passes: int) -> float:
        return 0.0002 + passes * (0.0005 + 2e-6 * users) + (drafter != "eagle3") * 1e-5 * users

    rows = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512)
    column = tuple(0.0065 * max(1.0, count / 96) for count in rows)
    return World("accelerator", CostTable(rows, (64,), (column,)), round_s, draft_s)


def busy_hours(now: float) -> float:
    """A machine that is half as fast for 5 of every 20 seconds."""
    return 2.0 if now % 20.0 > 15.0 else 1.0
