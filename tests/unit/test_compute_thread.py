"""The thread that computes: everybody has turns, and it ends with the last seat."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextvars import ContextVar

import pytest

from outrider.server.compute_thread import ComputeThread, Turn

BEFORE: set[threading.Thread] = set()
WHOSE: ContextVar[str] = ContextVar("whose", default="nobody")


class Script:
    """A seat whose turns are given; notes in which thread and context it had them."""

    def __init__(self, act: Callable[[int], Turn]) -> None:
        self._act = act
        self.threads: list[int] = []
        self.names: list[str] = []

    def turn(self) -> Turn:
        self.threads.append(threading.get_ident())
        self.names.append(WHOSE.get())
        return self._act(len(self.threads))


def wait_for(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.002)


@pytest.fixture
def computing() -> ComputeThread:
    BEFORE.clear()
    BEFORE.update(threading.enumerate())
    return ComputeThread()


def engine_threads() -> list[threading.Thread]:
    """Those of this test: a server that another one stopped may still be at its last step."""
    started = set(threading.enumerate()) - BEFORE
    return [thread for thread in started if thread.name == "engine"]


def test_two_busy_seats_have_a_turn_each_in_one_thread_of_their_own(computing: ComputeThread):
    order: list[str] = []
    gate = threading.Event()

    def busy(name: str) -> Callable[[int], Turn]:
        def act(number: int) -> Turn:
            gate.wait(20)
            order.append(name)
            return Turn.LAST if number == 6 else Turn.AGAIN

        return act

    seats = Script(busy("a")), Script(busy("b"))
    for seat in seats:
        computing.join(seat)
    gate.set()
    wait_for(lambda: len(order) == 12)

    # The first may have begun its turn before the second joined.
    assert ["a", "b"] * 5 in (order[:10], order[1:11])
    assert 1 == len({*seats[0].threads, *seats[1].threads} - {threading.get_ident()})


def test_a_seat_that_rests_has_no_turn_until_it_is_woken(computing: ComputeThread):
    is_over = threading.Event()
    seat = Script(lambda _: Turn.LAST if is_over.is_set() else Turn.REST)
    computing.join(seat)
    wait_for(lambda: len(seat.threads) >= 1)
    time.sleep(0.05)
    before = len(seat.threads)
    time.sleep(0.1)

    assert before == len(seat.threads)
    assert 0.0 == computing.stalled_s()
    is_over.set()
    computing.wake()
    wait_for(lambda: len(seat.threads) > before)


def test_a_seat_that_leaves_does_not_end_the_others(computing: ComputeThread):
    is_over = threading.Event()
    stays = Script(lambda _: Turn.LAST if is_over.is_set() else Turn.AGAIN)
    computing.join(stays)
    leaves = Script(lambda number: Turn.LAST if number == 2 else Turn.AGAIN)
    computing.join(leaves)
    wait_for(lambda: len(leaves.threads) == 2)
    reached = len(stays.threads)
    wait_for(lambda: len(stays.threads) > reached + 10)

    assert 2 == len(leaves.threads)
    is_over.set()
    wait_for(lambda: not engine_threads())


def test_the_thread_ends_with_the_last_seat_and_another_seat_gets_a_new_one(
    computing: ComputeThread,
):
    for _ in range(2):
        seat = Script(lambda _: Turn.LAST)
        computing.join(seat)
        wait_for(lambda seat=seat: len(seat.threads) == 1)
        wait_for(lambda: not engine_threads())

    assert 0.0 == computing.stalled_s()


def test_a_turn_has_the_context_in_which_its_seat_joined(computing: ComputeThread):
    seats = {}
    for name in ("off", "ngram"):
        WHOSE.set(name)
        seats[name] = Script(lambda number: Turn.LAST if number == 3 else Turn.AGAIN)
        computing.join(seats[name])
    wait_for(lambda: not engine_threads())

    assert {"off": ["off"] * 3, "ngram": ["ngram"] * 3} == {
        name: seat.names for name, seat in seats.items()
    }


def test_a_turn_that_does_not_end_shows_as_a_stall_for_everybody(computing: ComputeThread):
    release = threading.Event()

    def hang(_: int) -> Turn:
        release.wait(20)
        return Turn.LAST

    computing.join(Script(hang))
    wait_for(lambda: computing.stalled_s() > 0.1)
    release.set()
    wait_for(lambda: computing.stalled_s() == 0.0)
