"""Exact enumeration of programs that draw shared Gumbel noise: no sampling, no tolerance.

The pick of one position is ``argmax_v(log w_v + g_v)`` with Gumbel noise g. With ``g_v = -log T_v``
the T_v are independent exponentials and the pick is the winner of a race, ``argmin_v(T_v / w_v)``.
It does not change when all T are scaled, and exponentials divided by their sum are uniform on the
simplex. So one position's noise *is* a uniform point of a simplex, "a beats b" is a half-space
through rational points, and every event that any number of picks from that one point can make is
a union of simplices with rational volumes.

:func:`enumerate_law` runs a program again and again. Whenever it asks who wins a race, the region
where that position's point can still lie is cut along the answers; one is followed and the others
are left for later runs. The volumes of the regions at the end of a run multiply to the run's
probability.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TypeAlias, TypeVar

Point: TypeAlias = tuple[Fraction, ...]
Weights: TypeAlias = tuple[int, ...]
Outcome = TypeVar("Outcome", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Simplex:
    """A simplex by its corners; ``volume`` is its share of the whole."""

    volume: Fraction
    corners: tuple[Point, ...]


Region: TypeAlias = tuple[Simplex, ...]


def whole(vocab_size: int) -> Region:
    """All points: the simplex with the unit vectors as corners."""
    corners = tuple(
        tuple(Fraction(int(row == column)) for column in range(vocab_size))
        for row in range(vocab_size)
    )
    return (Simplex(Fraction(1), corners),)


def volume(region: Region) -> Fraction:
    """Probability that the point lies in the region."""
    return sum((simplex.volume for simplex in region), Fraction(0))


def winners(region: Region, weights: Weights) -> list[tuple[int, Region]]:
    """Cut a region by who wins the race; empty parts are left out, a zero weight never wins."""
    racers = [token for token, weight in enumerate(weights) if weight > 0]
    leading: dict[int, Region] = {racers[0]: region}
    for racer in racers[1:]:
        ahead: dict[int, Region] = {racer: ()}
        for leader, part in leading.items():
            won, lost = _cut(part, leader, racer, weights)
            ahead[racer] += lost
            if won:
                ahead[leader] = won
        leading = ahead
    return [(token, part) for token, part in sorted(leading.items()) if part]


def _cut(region: Region, a: int, b: int, weights: Weights) -> tuple[Region, Region]:
    """The parts where a beats b, that is T_a w_b < T_b w_a, and where it does not."""
    won: list[Simplex] = []
    lost: list[Simplex] = []
    for simplex in region:
        lead = [corner[b] * weights[a] - corner[a] * weights[b] for corner in simplex.corners]
        _split(simplex, lead, won, lost)
    return tuple(won), tuple(lost)


def _split(
    simplex: Simplex, lead: Sequence[Fraction], won: list[Simplex], lost: list[Simplex]
) -> None:
    """Halve a simplex across one edge that the plane crosses, until none is crossed.

    With the crossing point in place of either end, the two halves share the volume as the point
    shares the edge.
    """
    high = next((i for i, value in enumerate(lead) if value > 0), None)
    low = next((i for i, value in enumerate(lead) if value < 0), None)
    if high is None or low is None:
        (lost if high is None else won).append(simplex)
        return
    share = lead[low] / (lead[low] - lead[high])  # of the way from low to high
    start, end = simplex.corners[low], simplex.corners[high]
    crossing = tuple(x + share * (y - x) for x, y in zip(start, end, strict=True))
    for replaced, part in ((high, share), (low, 1 - share)):
        corners, values = list(simplex.corners), list(lead)
        corners[replaced], values[replaced] = crossing, Fraction(0)
        _split(Simplex(simplex.volume * part, tuple(corners)), values, won, lost)


@dataclass(frozen=True, slots=True)
class _Answer:
    """Who won a race, and where its point can still lie."""

    token: int
    key: Hashable
    region: Region


class World:
    """One way in which all noise may fall, decided as far as a program has asked."""

    def __init__(self, script: Sequence[_Answer]) -> None:
        self.left_for_later: list[list[_Answer]] = []
        self._script = list(script)
        self._num_replayed = 0
        self._region: dict[Hashable, Region] = {}
        self._known: dict[tuple[Hashable, Weights], int] = {}

    @property
    def probability(self) -> Fraction:
        """Of everything that was answered."""
        return math.prod((volume(region) for region in self._region.values()), start=Fraction(1))

    def winner(self, key: Hashable, weights: Weights) -> int:
        """The token that wins with these weights under the noise of this key."""
        if (key, weights) not in self._known:
            answer = self._next_answer(key, weights)
            self._region[key] = answer.region
            self._known[key, weights] = answer.token
        return self._known[key, weights]

    def ranking(self, key: Hashable, weights: Weights) -> Iterator[int]:
        """Tokens in the order in which they come in (Gumbel top-k); asks as far as it is read."""
        while any(weights):
            token = self.winner(key, weights)
            yield token
            weights = (*weights[:token], 0, *weights[token + 1 :])

    def _next_answer(self, key: Hashable, weights: Weights) -> _Answer:
        if self._num_replayed == len(self._script):
            region = self._region.get(key) or whole(len(weights))
            first, *others = (_Answer(token, key, part) for token, part in winners(region, weights))
            self.left_for_later += [[*self._script, other] for other in others]
            self._script.append(first)
        answer = self._script[self._num_replayed]
        assert answer.key == key, (
            "a program must ask the same questions when it gets the same answers"
        )
        self._num_replayed += 1
        return answer


def enumerate_law(program: Callable[[World], Outcome]) -> dict[Outcome, Fraction]:
    """The exact law of what a program returns over all noise it may ask for."""
    law: dict[Outcome, Fraction] = {}
    scripts: list[list[_Answer]] = [[]]
    while scripts:
        world = World(scripts.pop())
        outcome = program(world)
        law[outcome] = law.get(outcome, Fraction(0)) + world.probability
        scripts += world.left_for_later
    assert sum(law.values()) == 1, "the enumeration must cover all noise"
    return law


def distance(law: dict[Outcome, Fraction], other: dict[Outcome, Fraction]) -> Fraction:
    """Total variation distance of two laws."""
    outcomes = law.keys() | other.keys()
    none = Fraction(0)
    return sum((abs(law.get(o, none) - other.get(o, none)) for o in outcomes), none) / 2
