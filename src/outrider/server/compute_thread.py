"""The one thread of a process that computes: steps every engine in turn.

Owns the thread and whose turn it is. Engines on one target's weights need one thread between them,
and not only because of the weights: every thread that computes keeps a team of OpenMP workers, and
where two teams are more than there are cores, libgomp lets them sleep between any two kernels,
which doubles a step. An engine has its place here by a *seat*, which is
:class:`~outrider.server.engine_desk.EngineDesk`::

    join ──> turn, turn, turn, ... ──> a turn that says it was the last

A turn is at most one step, so while several engines have work, each waits for one step of each
other one.
"""

from __future__ import annotations

import contextvars
import threading
import time
from enum import Enum, auto
from typing import Protocol


class Turn(Enum):
    """What a seat wants after its turn."""

    AGAIN = auto()  # there is more to do
    REST = auto()  # nothing to do until somebody wakes the thread
    LAST = auto()  # no further turn, ever


class Seat(Protocol):
    """One engine's place at the thread."""

    def turn(self) -> Turn:
        """Do what is next, one step at most; never raises."""
        ...


class ComputeThread:
    """Runs from the first seat's joining to the last one's end; any thread may call its methods."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Guarded by the lock, and replaced, never changed: the thread goes through it without.
        self._seats: tuple[tuple[Seat, contextvars.Context], ...] = ()
        self._thread: threading.Thread | None = None
        self._is_woken = threading.Event()
        self._turn_started_s: float | None = None

    def join(self, seat: Seat) -> None:
        """Give a seat its turns, in the caller's context, so that logs can say whose they are."""
        with self._lock:
            self._seats = (*self._seats, (seat, contextvars.copy_context()))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
                self._thread.start()
        self.wake()

    def wake(self) -> None:
        """See to it that every seat has a turn soon."""
        self._is_woken.set()

    def stalled_s(self) -> float:
        """How long the turn in progress has been running; 0 while all rest."""
        started_s = self._turn_started_s
        return 0.0 if started_s is None else time.monotonic() - started_s

    def _run(self) -> None:
        while True:
            self._is_woken.clear()
            wants_more = False
            for place in self._seats:
                seat, context = place
                self._turn_started_s = time.monotonic()
                turn = context.run(seat.turn)
                wants_more = wants_more or turn is Turn.AGAIN
                if turn is Turn.LAST and self._is_empty_without(place):
                    return
            self._turn_started_s = None
            if not wants_more:
                self._is_woken.wait()

    def _is_empty_without(self, place: tuple[Seat, contextvars.Context]) -> bool:
        """Take a seat away; whether it was the last, with which the thread ends."""
        with self._lock:
            self._seats = tuple(other for other in self._seats if other is not place)
            if self._seats:
                return False
            self._thread = self._turn_started_s = None
            return True
