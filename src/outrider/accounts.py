"""What drafting has brought so far: accounts that open and close it, and how far to trust hopes.

Owned by :mod:`outrider.budget`, which has one account per kind of guess and number of requests.
Pure bookkeeping in plain rounds and tokens; knows no costs and no trees.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

CEILING = 8.0  # most that an account holds, in plain rounds, so that a good past is soon forgotten
OPENING = 1.0  # what a closed account must hold before it opens again
ALLOWANCE = 0.01  # what a round pays in that goes without
LEAST_ALLOWANCE = ALLOWANCE / 4  # after looks that found nothing
MEMORY = 60.0  # tokens hoped for after which most of what came of earlier hopes is forgotten
TRUST = 5.0  # tokens, hoped for and accepted, that a beginner is taken to have seen


@dataclass(slots=True)
class Account:
    """Whether something has paid for its time lately, in plain rounds.

    What is done pays in what it gains, and pays out what it loses. Empty, the account closes, and a
    small allowance per round fills it for the next look. Each look that finds nothing halves the
    allowance, down to a quarter. What it took to begin a look is no loss of what was looked at: it
    is owed, and paid only if the account closes before it was earned.

    Attributes:
        balance: plain rounds.
        is_open: whether what it stands for is to be done.
        owed: plain rounds that are due when it closes.
    """

    balance: float
    is_open: bool = True
    owed: float = 0.0
    _allowance: float = ALLOWANCE

    def pay(self, rounds: float) -> None:
        """Pay in what a round gained, or out if negative."""
        self.balance = min(CEILING, self.balance + rounds)
        if self.balance >= CEILING / 2:
            self._allowance, self.owed = ALLOWANCE, 0.0
        elif self.is_open and self.balance <= 0:
            self.is_open = False
            self.balance -= self.owed
            self.owed = 0.0
            self._allowance = max(LEAST_ALLOWANCE, self._allowance / 2)

    def allow(self) -> bool:
        """Pay in for a round that went without; whether that opens it."""
        if self.is_open:
            return False
        self.balance += self._allowance
        self.is_open = self.balance > OPENING
        return self.is_open


@dataclass(slots=True)
class Hopes:
    """Tokens hoped for and what became of them: fading sums."""

    hoped: float = TRUST
    accepted: float = TRUST

    def observe(self, hoped: float, accepted: float) -> None:
        """Take in a round's."""
        fading = math.exp(-hoped / MEMORY)
        self.hoped = fading * self.hoped + hoped
        self.accepted = fading * self.accepted + accepted

    def begin_again(self) -> None:
        """Half forgive what was: it may be long ago."""
        self.hoped, self.accepted = 2 * TRUST, TRUST * (1 + self.share)

    @property
    def share(self) -> float:
        """Tokens that come of one that is hoped for."""
        return self.accepted / self.hoped if self.hoped else 1.0


@dataclass(slots=True)
class Average:
    """A plain mean at first, then a moving average; 0 while nothing is known."""

    weight: float
    value: float = 0.0
    _num: int = 0

    def follow(self, value: float) -> None:
        """Take in a new value."""
        self._num += 1
        self.value += max(self.weight, 1 / self._num) * (value - self.value)
