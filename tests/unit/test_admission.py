"""Who gets a row next, on what, and what an admission that fails or is interrupted leaves."""

from __future__ import annotations

from typing import Any, NoReturn

import pytest

from outrider.config import AdmissionLimits
from outrider.errors import OverloadedError
from outrider.request import Request
from outrider.types import FinishReason
from tests.serving import MAX_LEN, NAN, Server, answer, talkative

FAMILY = [1 + (7 * place + place * place) % 9 for place in range(60)]


def emitted(request: Request) -> list[int]:
    return request.token_ids[request.prompt_len :]


def raise_once(owner: Any, name: str, error: BaseException) -> None:
    """Make a method of an object raise when it is called next."""

    def broken(*_: object, **__: object) -> NoReturn:
        delattr(owner, name)
        raise error

    setattr(owner, name, broken)


# --- interrupted admissions -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "speculates"), [("adopt", True), ("release", True), ("release", False)]
)
def test_ctrl_c_while_a_row_is_taken_over_leaves_nothing_behind(
    call: str, speculates: bool
) -> None:
    server = Server(max_batch_size=1, max_slots=None)
    first = server.submit(FAMILY[:30], 4)
    server.run()
    raise_once(server.drafter, call, KeyboardInterrupt())
    hit = server.submit([*first.token_ids, 4], 4, speculates=speculates)
    with pytest.raises(KeyboardInterrupt):
        server.engine.step()
    server.check()
    later = [server.submit(FAMILY[place:], 4) for place in (5, 20)]
    server.run()

    assert FinishReason.ABORT == hit.finish_reason
    assert [answer(FAMILY[place:], 4) for place in (5, 20)] == [*map(emitted, later)]
    assert sum(request.stats.drafted for request in later) > 0
    assert 0 == server.engine.stats().faults == server.engine.stats().failed


def test_ctrl_c_while_a_prefix_is_copied_loses_no_row_and_no_request() -> None:
    server = Server(max_batch_size=2, max_slots=None)
    server.submit(FAMILY, 3)
    server.run()
    raise_once(server.cache, "copy_prefix", KeyboardInterrupt())
    hit = server.submit([*FAMILY[:20], 4], 4)
    with pytest.raises(KeyboardInterrupt):
        server.engine.step()
    server.check()

    assert FinishReason.ABORT == hit.finish_reason
    assert 2 == server.cache.num_free_rows
    assert 1 == server.engine.stats().aborted
    again = server.submit([*FAMILY[:20], 4], 4)
    server.run()

    assert answer([*FAMILY[:20], 4], 4) == emitted(again)
    assert 20 == again.num_reused


def test_a_copy_that_fails_ends_its_own_request_and_no_other() -> None:
    server = Server(max_batch_size=3, max_slots=None)
    server.submit(FAMILY, 3)
    server.run()
    raise_once(server.cache, "copy_prefix", MemoryError())
    neighbour = server.submit([7, 2], 12)
    hit = server.submit([*FAMILY[:20], 4], 4)
    server.tickets[-1].may_fail = True
    changed = server.step()
    server.check()
    server.run()

    assert hit in changed
    assert FinishReason.ERROR == hit.finish_reason
    assert "an internal fault ended this request (MemoryError)" == hit.error
    assert answer([7, 2], 12) == emitted(neighbour)
    assert (1, 1) == (server.engine.stats().faults, server.engine.stats().failed)


# --- the queue ------------------------------------------------------------------------------------


def test_a_request_that_waits_for_its_twin_lets_those_behind_it_pass() -> None:
    server = Server(max_batch_size=3, max_slots=None, prefill_chunk=4)
    first, twin, other = (server.submit(prompt, 4) for prompt in (FAMILY, FAMILY, [2, 3]))
    server.step()
    server.check()

    assert 1 <= other.num_output
    assert [twin] == server.scheduler.waiting
    server.run()

    assert 59 == twin.num_reused
    assert answer(FAMILY, 4) == emitted(first) == emitted(twin)
    assert answer([2, 3], 4) == emitted(other)


def test_nobody_passes_onto_the_row_that_a_twin_will_need() -> None:
    server = Server(max_batch_size=2, max_slots=None, prefill_chunk=4)
    _, twin, other = (server.submit(prompt, 3) for prompt in (FAMILY, FAMILY, [2, 3]))
    server.step()

    assert [twin, other] == server.scheduler.waiting
    server.run()


def test_nobody_passes_onto_the_slots_that_a_twin_will_need() -> None:
    server = Server(max_batch_size=3, max_slots=2 * MAX_LEN, prefill_chunk=4)
    _, twin, other = (server.submit(prompt, 4) for prompt in (FAMILY, FAMILY, [2, 3]))
    server.step()

    assert [twin, other] == server.scheduler.waiting
    server.run()


def test_requests_without_slots_count_as_waiting_whatever_rows_are_free() -> None:
    server = Server(
        max_batch_size=8,
        max_slots=MAX_LEN,
        limits=AdmissionLimits(max_waiting=1),
        prefix_cache=False,
    )
    prompts = [[*pair, *[1] * 20] for pair in talkative(40, 3)]
    server.submit(prompts[0], 40)
    server.step()
    server.submit(prompts[1], 40)
    with pytest.raises(OverloadedError, match="2 requests would wait, at most 1 may"):
        server.engine.submit(server.new(prompts[2], 40))
    server.run()


def test_a_request_is_queued_once() -> None:
    server = Server()
    queued, ended = server.submit([1, 2]), server.new([1, 2])
    server.engine.abort(ended)
    for requests in ([queued], [ended], [server.new([3])] * 2):
        with pytest.raises(AssertionError, match="queued once"):
            server.engine.submit_all(requests)
    server.step()
    with pytest.raises(AssertionError, match="queued once"):
        server.engine.submit(queued)
    server.run()

    assert 1 == server.engine.stats().submitted


# --- what waits again in the middle of its prompt -------------------------------------------------


def preempted_in_prefill(server: Server, prompt: list[int]) -> Request:
    """A request that has to wait again after 20 tokens of its prompt."""
    running = server.submit(talkative(30, 1)[0], 30)
    while running.num_output < 2:
        server.step()
    late = server.submit(prompt, 3)
    for _ in range(4):
        server.step()
    assert 20 == server.cache.committed(late.row)
    server.engine._preempt(late, keeps=True)
    server.check()
    return late


@pytest.mark.parametrize("speculates", [True, False])
def test_what_was_computed_of_a_prompt_is_still_there_when_its_turn_comes(
    speculates: bool,
) -> None:
    server = Server(max_slots=None, prefill_chunk=5, speculates=speculates)
    late = preempted_in_prefill(server, FAMILY)
    before = server.engine.stats().prefilled_tokens
    server.run()

    assert 2 == late.num_admissions
    assert answer(FAMILY, 3) == emitted(late)
    assert 20 == before
    assert len(FAMILY) - 24 == server.engine.stats().prefilled_tokens


def test_nobody_else_starts_on_a_prompt_that_no_step_has_seen() -> None:
    server = Server(max_slots=None, prefill_chunk=5)
    late = preempted_in_prefill(server, [NAN, *FAMILY[:50]])
    (kept,) = server.engine._prefixes.rows

    assert kept.is_private
    assert server.engine._prefixes.find(late.token_ids, "") is None
    server.run()

    assert FinishReason.ERROR == late.finish_reason


@pytest.mark.parametrize("goes", ["cancelled", "row needed"])
def test_what_no_step_has_seen_is_scrubbed_when_nobody_can_go_on_from_it(goes: str) -> None:
    server = Server(max_batch_size=2, max_slots=None, prefill_chunk=5)
    late = preempted_in_prefill(server, FAMILY)
    (kept,) = server.engine._prefixes.rows
    server.cache._keys[0, kept.row, 0, 0, :, 10] = float("nan")
    if goes == "cancelled":
        server.engine.abort(late)
    else:
        server.scheduler._take_row(None)

    assert not server.cache._keys[:, kept.row].any()
    assert not server.engine._prefixes.rows
    assert (goes == "cancelled") == (late.request_id not in server.drafter.states)


@pytest.mark.parametrize("end", ["cancelled", "failed", "too short to keep"])
def test_a_row_that_may_hold_what_is_not_finite_is_scrubbed_when_it_is_left(end: str) -> None:
    server = Server(max_slots=None, prefill_chunk=5)
    server.submit(talkative(30, 1)[0], 30)
    late = server.submit(FAMILY, 3)
    server.step()
    row = late.row
    server.cache._keys[0, row, 0, 0, :, 2] = float("nan")
    if end == "cancelled":
        server.engine.abort(late)
    elif end == "failed":
        server.tickets[-1].may_fail = True
        server.engine._fail(late, RuntimeError("broken"))
    else:
        server.engine._preempt(late, keeps=True)

    assert not server.cache._keys[:, row].any()
    assert not server.engine._prefixes.rows
    server.run()
