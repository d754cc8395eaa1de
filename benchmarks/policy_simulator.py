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
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Protocol

import numpy as np
from policy_trace import Answer, Node, Trace, path_of

from outrider.budget import NO_PASSES
from outrider.costs import CostTable
from outrider.drafters.autoregressive import MAX_WAITING
from outrider.tree import DraftTree
from outrider.types import StepRecord

HEAD_DEPTH, NUM_CHILDREN, MAX_NODES = 5, 3, 12  # of the recorded trees
MAX_TOKENS = HEAD_DEPTH + 1  # of a round: so many states more or less are part of a first pass
TAKE_IN_S = 1e-4  # a guess: a fifth of what a row costs that is to guess


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

    def observe(
        self,
        record: StepRecord,
        contexts: Sequence[int],
        num_silent: int = 0,
        paths: Sequence[Sequence[int]] = (),
    ) -> None:
        """What the round took and brought."""
        ...


class Fixed:
    """The same setting in every round: so deep, so many nodes per request; 0 is plain decoding.

    Without ``makes_passes`` only what can be looked up is asked for.
    """

    def __init__(self, depth: int, num_nodes: int, *, makes_passes: bool = True) -> None:
        self.depth, self._num_nodes, self._makes_passes = depth, num_nodes, makes_passes
        self._best: dict[int, tuple[DraftTree, DraftTree]] = {}  # trees come again and again

    def min_score(self, contexts: Sequence[int]) -> float | None:
        """Draft as deep as the setting says."""
        if not self._num_nodes:
            return None
        return 0.0 if self._makes_passes else NO_PASSES

    def prune(
        self, trees: Sequence[DraftTree], contexts: Sequence[int], num_silent: int = 0
    ) -> list[DraftTree]:
        """The best nodes of each."""
        for tree in trees:
            if id(tree) not in self._best:
                self._best[id(tree)] = tree, tree.best(self._num_nodes, self.depth)
        return [self._best[id(tree)][1] for tree in trees]

    def observe(
        self,
        record: StepRecord,
        contexts: Sequence[int],
        num_silent: int = 0,
        paths: Sequence[Sequence[int]] = (),
    ) -> None:
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

    def observe(
        self,
        record: StepRecord,
        contexts: Sequence[int],
        num_silent: int = 0,
        paths: Sequence[Sequence[int]] = (),
    ) -> None:
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
        pass_s: rows of a head's pass to seconds.
        lookup_s: users to seconds of n-gram's lookups.
        take_in_s: seconds of a row that a head takes in beside those of a pass, since it was not
            asked when the row came.
        noise: relative spread of each round.
        slowdown: by the time on the clock, for a machine whose speed changes.
    """

    name: str
    table: CostTable
    round_s: Callable[[int, int, float], float]
    pass_s: Callable[[int], float]
    lookup_s: Callable[[int], float]
    take_in_s: float = 0.0
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
def tree_of(nodes: tuple[Node, ...], is_looked_up: bool) -> DraftTree:
    """A recorded tree; like all trees here it is shared and not to be changed."""
    tree = DraftTree.root(0)
    for parent, token, score in nodes:
        node = tree.add(parent, token, max(1e-6, score / 1000))
        if is_looked_up:
            tree.looked_up[node] = tree.score[node]
    return tree


@cache
def grown_tree(nodes: tuple[Node, ...], inner: frozenset[int]) -> DraftTree:
    """A head's tree of which only these nodes, and the root, were grown on."""
    tree = tree_of(nodes, False)
    return tree.keep([node for node in range(1, len(tree)) if tree.parent[node] in inner])


@cache
def merged_tree(
    head: tuple[Node, ...], inner: frozenset[int], ngram: tuple[Node, ...]
) -> DraftTree:
    """The same in one tree with n-gram's, as the product merges them."""
    return grown_tree(head, inner).merged(tree_of(ngram, True)).best(MAX_NODES)


@dataclass(slots=True)
class _User:
    """Who waits for an answer; the head has not taken in ``waiting`` of its states."""

    answer: Answer
    place: int = 0
    waiting: int = 0

    @property
    def future(self) -> tuple[int, ...]:
        """The tokens that come."""
        return self.answer.tokens[self.place :]


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
        user.place = dice.randrange(len(user.answer.tokens))
    noise = random.Random(seed + 1)
    total, now, rounds, asked, rows = 0, 0.0, 0, 0, 0
    while total < tokens:
        contexts = [user.answer.prompt_len + user.place for user in running]
        min_score = policy.min_score(contexts)
        was_asked = min_score is not None
        trees, passes, draft_s = _draft(policy, trace, world, running, min_score)
        kept = policy.prune(trees, contexts)
        paths = [path_of(tree, user.future) for tree, user in zip(kept, running, strict=True)]
        emitted = 0
        for user, path in zip(running, paths, strict=True):
            emitted += (new := min(len(user.future), 1 + len(path)))
            user.place += new
            user.waiting += new
            if not user.future:
                user.answer, user.place, user.waiting = next_answer(), 0, 0
        num_rows = sum(map(len, kept))
        factor = world.slowdown(now) * math.exp(noise.gauss(0.0, world.noise))
        if world.noise and noise.random() < 0.01:
            factor *= 3.0  # somebody else took the processor
        record = StepRecord(
            num_requests=users,
            num_rows=num_rows,
            draft_s=factor * draft_s,
            verify_s=factor * world.round_s(users, num_rows, sum(contexts) / users),
            rest_s=factor * _keep_up(trace, world, running),
            draft_passes=passes,
            num_tokens=emitted,
            was_asked=was_asked,
        )
        policy.observe(record, contexts, 0, paths)
        now += record.draft_s + record.verify_s + record.rest_s
        total, rounds, rows = total + emitted, rounds + 1, rows + num_rows
        asked += was_asked
    return Outcome(total, now, rounds, asked, rows)


def _draft(
    policy: Policy,
    trace: Trace,
    world: World,
    running: Sequence[_User],
    min_score: float | None,
) -> tuple[list[DraftTree], int, float]:
    """The trees as the drafter would grow them, the head's passes, and what all of it takes."""
    if min_score is None:
        return [tree_of((), False)] * len(running), 0, 0.0
    passes, seconds = 0, 0.0
    grown = [frozenset[int]()] * len(running)
    if trace.has_head and min_score <= 1:
        depth = getattr(policy, "depth", 10**6)
        grown, passes, seconds = _head(world, running, min_score, depth)
    heads = [user.answer.head[user.place] if trace.has_head else () for user in running]
    if not trace.has_ngram:
        return list(map(grown_tree, heads, grown)), passes, seconds
    found = [user.answer.ngram[user.place] for user in running]
    seconds += world.lookup_s(len(running))
    return list(map(merged_tree, heads, grown, found)), passes, seconds


def _head(
    world: World, running: Sequence[_User], min_score: float, max_depth: int
) -> tuple[list[frozenset[int]], int, float]:
    """The nodes that a head grows on, layer by layer, with its passes and their time."""
    whole = [tree_of(user.answer.head[user.place], False) for user in running]
    late = sum(max(0, user.waiting - MAX_TOKENS) for user in running)
    seconds = world.pass_s(len(running)) + world.take_in_s * late
    for user in running:
        user.waiting = 0
    grown = [{0} for _ in running]
    depth = 1
    while True:
        layers = [
            [n for n in range(1, len(tree)) if tree.depth[n] == depth and tree.parent[n] in inner]
            for tree, inner in zip(whole, grown, strict=True)
        ]
        if depth in (max_depth, HEAD_DEPTH) or not any(layers):
            break
        growing = [
            sorted(layer, key=lambda node: -tree.score[node])[:NUM_CHILDREN]
            for tree, layer in zip(whole, layers, strict=True)
        ]
        promised = [
            tree.score[best[0]] if best and tree.score[best[0]] >= min_score else 0.0
            for tree, best in zip(whole, growing, strict=True)
        ]
        if not any(promised) or sum(promised) < min_score * len(running):
            break
        rows = 0
        for inner, best, score in zip(grown, growing, promised, strict=True):
            if score:
                inner.update(best)
                rows += len(best)
        seconds += world.pass_s(rows)
        depth += 1
    return list(map(frozenset, grown)), depth, seconds


def _keep_up(trace: Trace, world: World, running: Sequence[_User]) -> float:
    """Seconds of what a head takes in unasked, since very much waits."""
    taken = 0
    for user in running:
        if trace.has_head and user.waiting > MAX_WAITING:
            user.waiting -= MAX_WAITING
            taken += MAX_WAITING
    return world.take_in_s * taken + (world.pass_s(1) if taken else 0.0)


def fixed_settings(trace: Trace) -> dict[str, Callable[[], Policy]]:
    """Plain decoding, and the chains and trees that a user might pin, of either kind of guess."""
    found: dict[str, Callable[[], Policy]] = {"plain": lambda: Fixed(0, 0)}
    kinds = [trace.has_head, False] if trace.has_ngram and trace.has_head else [trace.has_head]
    for makes_passes in kinds:
        kind = "" if makes_passes == trace.has_head else " n-gram"
        for depth in range(1, HEAD_DEPTH + 1):
            for num_nodes in sorted({depth, MAX_NODES}):
                name = f"depth {depth}, {num_nodes} nodes{kind}"
                found[name] = lambda d=depth, n=num_nodes, p=makes_passes: Fixed(
                    d, n, makes_passes=p
                )
    return found


def measured_world(costs: Mapping[str, Any], table: CostTable) -> World:
    """The world that ``policy.py costs`` measured; a load that it did not is an error.

    A head's pass is priced by its rows: one for each request at first, then as many as nodes grow.
    """
    served: dict[int, list[tuple[int, float]]] = {}
    for cell in costs["rounds"]:
        served.setdefault(cell["users"], []).append((cell["rows"], cell["seconds"]))
    head: dict[int, dict[int, float]] = {}
    lookups: dict[int, float] = {}
    for cell in costs["drafting"]:
        if cell["method"] == "ngram":
            lookups[cell["users"]] = cell["seconds"]
        else:
            head.setdefault(cell["users"], {})[cell["passes"]] = cell["seconds"]
    by_rows: dict[int, list[float]] = {}
    for users, taken in head.items():
        few, many = min(taken), max(taken)
        later_s = (taken[many] - taken[few]) / (many - few)
        by_rows.setdefault(users, []).append(taken[few] - (few - 1) * later_s)
        by_rows.setdefault(costs["children"] * users, []).append(later_s)
    pass_rows = sorted(by_rows)
    pass_times = np.maximum.accumulate([statistics.fmean(by_rows[rows]) for rows in pass_rows])

    def round_s(users: int, rows: int, context: float) -> float:
        known = sorted(served[users])
        seconds = float(np.interp(rows, [at for at, _ in known], [s for _, s in known]))
        return seconds * table.at(rows, context) / table.at(rows, costs["context"])

    def pass_s(rows: int) -> float:
        return float(np.interp(rows, pass_rows, pass_times)) * max(1.0, rows / pass_rows[-1])

    return World("measured", table, round_s, pass_s, lookups.__getitem__, TAKE_IN_S)


def gpu_world() -> World:
    """A made-up accelerator: 8 ms a round, flat up to 96 rows, then each row costs its share."""

    def round_s(users: int, rows: int, context: float) -> float:
        return 0.007 * max(1.0, rows / 96) + 0.001 + 2e-5 * users + 1e-9 * users * context

    def pass_s(rows: int) -> float:
        return 0.0005 + 1e-6 * rows

    rows = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512)
    column = tuple(0.0065 * max(1.0, count / 96) for count in rows)
    table = CostTable(rows, (64,), (column,))
    return World("accelerator", table, round_s, pass_s, lambda users: 1e-5 * users, 1e-6)


def busy_hours(now: float) -> float:
    """A machine that is half as fast for 5 of every 20 seconds."""
    return 2.0 if now % 20.0 > 15.0 else 1.0
