"""A drafter that fails costs guesses and nothing else.

Contract: whichever of its calls raises or is not finite, at whichever step, every text is its own;
the request that it failed on goes on without drafts, its neighbours keep theirs, and what failed is
counted.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

import pytest

from outrider.drafters.guarded import MAX_DRY, GuardedDrafter
from outrider.request import Request
from outrider.tree import DraftTree
from outrider.types import FinishReason
from tests.serving import VOCAB, FakeDrafter, Server, answer, talkative

pytestmark = pytest.mark.draft_faults
PROMPTS = talkative(40, 3)


def begun(server: Server, num_steps: int = 3) -> list[Request]:
    """Three requests that have decoded a little, with drafts."""
    requests = [server.submit(prompt, 40) for prompt in PROMPTS]
    for _ in range(num_steps):
        server.step()
    assert all(request.stats.drafted for request in requests)
    assert all(request.finish_reason is None for request in requests)
    return requests


def check_texts(requests: list[Request]) -> None:
    for prompt, request in zip(PROMPTS, requests, strict=True):
        assert FinishReason.LENGTH == request.finish_reason
        assert answer(prompt, 40) == request.token_ids[2:]


def drafted_later(server: Server, requests: list[Request]) -> list[int]:
    """Tokens drafted for each from here to the end."""
    before = [request.stats.drafted for request in requests]
    server.run()
    return [request.stats.drafted - count for request, count in zip(requests, before, strict=True)]


@pytest.mark.parametrize("kind", ["fails_on", "spoils"])
def test_a_request_that_the_drafter_fails_on_goes_on_plainly_and_the_others_draft(
    kind: str,
) -> None:
    server = Server(max_slots=None)
    requests = begun(server)
    getattr(server.drafter, kind).add(requests[1].request_id)
    first, second, third = drafted_later(server, requests)
    stats = server.engine.stats()

    check_texts(requests)
    assert 0 == second
    assert min(first, third) > 0
    assert stats.speculation.drafted > stats.speculation.accepted > 0
    assert {"fails_on": 2, "spoils": 1}[kind] == stats.draft_faults  # in company, then alone
    assert 0 == stats.faults == stats.failed
    assert not stats.drafting_off


def long_winded(beginning: list[int]) -> list[int]:
    """The beginning with a last token behind which the answer is as long as it may be."""
    prompts = ([*beginning, last] for last in range(1, 10))
    return next(prompt for prompt in prompts if 20 == len(answer(prompt, 20)))


@pytest.mark.parametrize("where", ["admit", "adopt", "prefill"])
def test_a_call_about_one_request_costs_that_ones_drafts(where: str) -> None:
    server = Server(max_slots=None)
    beginning = [7, 3] * 20
    server.submit(beginning, 2)  # the first of the two starts on what it leaves
    server.run()
    server.drafter.fails_at = {where}
    prompts = [long_winded(beginning), long_winded([2, 5] * 20)]
    requests = [server.submit(prompt, 20) for prompt in prompts]
    server.run()
    few, many = sorted(request.stats.drafted for request in requests)

    assert [answer(prompt, 20) for prompt in prompts] == [
        request.token_ids[41:] for request in requests
    ]
    assert 1 == server.engine.stats().draft_faults
    assert few <= 4  # what was out when it failed
    assert many > 8


def test_a_fault_that_does_not_come_again_costs_a_step_of_drafts() -> None:
    server = Server(max_slots=None)
    requests = begun(server)
    server.drafter.fails_at = {"propose"}
    before = server.engine.stats().speculation.drafted
    server.step()
    after = server.engine.stats().speculation.drafted

    assert before == after
    assert min(drafted_later(server, requests)) > 0
    assert 1 == server.engine.stats().draft_faults
    check_texts(requests)


def test_a_fault_of_observing_all_at_once_costs_nothing() -> None:
    """Each is observed for itself then, and nothing is counted or taken in twice."""
    server = Server(max_slots=None)
    requests = begun(server)
    server.drafter.fails_at = {"observe"}
    server.step()

    assert min(drafted_later(server, requests)) > 0
    assert 1 == server.engine.stats().draft_faults
    check_texts(requests)


def test_all_requests_are_observed_in_one_call_and_one_by_one_after_a_fault() -> None:
    server = Server(max_slots=None)
    requests = begun(server)
    observe, calls = server.drafter.observe, []

    def listen(members: list[Request], *told: Any) -> None:
        calls.append(len(members))
        if requests[1] in members and len(calls) > 1:
            server.drafter.num_faults += 1
            raise RuntimeError("on one")
        observe(members, *told)

    server.drafter.observe = listen  # type: ignore[method-assign]
    server.step()
    server.step()
    first, second, third = drafted_later(server, requests)

    assert [3, 3, 1, 1, 1, 2] == calls[:6]
    assert 0 == second
    assert min(first, third) > 0
    assert 2 == server.engine.stats().draft_faults  # in company, then alone
    check_texts(requests)


def test_a_drafter_that_always_fails_is_asked_no_more_and_texts_stay() -> None:
    server = Server(max_slots=None)
    requests = begun(server)
    calls = []

    def broken(members: list[Request], *_: object) -> list[DraftTree]:
        calls.append(len(members))
        server.drafter.num_faults += 1
        raise RuntimeError("always")

    server.drafter.propose = broken  # type: ignore[method-assign]
    later = drafted_later(server, requests)
    again = [server.submit(prompt, 40) for prompt in PROMPTS]
    server.run()

    assert [0, 0, 0] == later
    # All together, each alone; then the first step of the next three together.
    assert [3, 1, 1, 1, 3] == calls
    assert MAX_DRY == 3
    assert server.engine.stats().drafting_off
    check_texts(requests)
    check_texts(again)


def test_only_faults_in_a_row_turn_drafting_off() -> None:
    server = Server(max_slots=None)
    for place in range(2 * MAX_DRY):
        request = server.submit(PROMPTS[0], 40)
        if place % 2:
            server.drafter.fails_on.add(request.request_id)
        server.run()

    assert MAX_DRY == server.engine.stats().draft_faults
    assert not server.engine.stats().drafting_off


def test_a_request_that_waits_again_stays_without_drafts_on_what_it_left() -> None:
    server = Server(max_slots=64)
    requests = [server.submit(PROMPTS[place], 40, speculates=place == 1) for place in (0, 1)]
    server.drafter.fails_on.add(requests[1].request_id)
    server.run()

    assert 1 == server.engine.stats().draft_faults  # it is not asked for again
    assert 0 == requests[1].stats.drafted
    assert requests[1].num_admissions > 1
    assert [answer(prompt, 40) for prompt in PROMPTS[:2]] == [
        request.token_ids[2:] for request in requests
    ]


def test_a_wrong_guard_that_lets_a_request_without_states_draft_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The inverse test: a request that is not kept apart meets a drafter that has forgotten it."""
    monkeypatch.setattr(GuardedDrafter, "_may_draft", lambda self, request: not self.is_off)
    server = Server(max_slots=None)
    requests = begun(server)
    server.drafter.spoils.add(requests[1].request_id)

    with pytest.raises(AssertionError):
        drafted_later(server, requests)


class Handing(FakeDrafter):
    """Hands over the same trees whatever is asked for."""

    def __init__(self, make: Callable[[DraftTree], object]) -> None:
        super().__init__(3)
        self._make = make

    def propose(self, requests, max_depth, min_score: float = 0.0) -> list[DraftTree]:
        trees = [DraftTree.root(request.token_ids[-1]) for request in requests]
        for tree in trees:
            self._make(tree)
        return trees


def _add(tree: DraftTree, depth: int) -> None:
    node = 0
    for _ in range(depth):
        node = tree.add(node, 1, 0.5)


BAD: dict[str, tuple[Callable[[DraftTree], object], str]] = {
    "no number": (lambda tree: tree.add(0, 1, math.nan), "its logits are not finite"),
    "spoilt": (lambda tree: setattr(tree, "is_finite", False), "its logits are not finite"),
    "no token": (
        lambda tree: tree.add(0, VOCAB, 0.5),
        "it drafted a token outside 0 .. 11: 12",
    ),
    "negative": (lambda tree: tree.add(0, -1, 0.5), "it drafted a token outside 0 .. 11"),
    "too deep": (lambda tree: _add(tree, 5), "its tree is 5 deep, and 4 were allowed"),
    "other root": (lambda tree: tree.token.__setitem__(0, 5), "its root is token 5"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_can_be_no_draft_is_none(name: str, caplog: pytest.LogCaptureFixture) -> None:
    make, words = BAD[name]
    server = Server(max_slots=None)
    guard = GuardedDrafter(Handing(make), VOCAB)
    request = server.new([1, 2])
    guard.admit(request)
    with caplog.at_level(logging.WARNING, logger="outrider.drafters.guarded"):
        (tree,) = guard.propose([request], [4])

    assert [2] == tree.token
    assert 1 == guard.num_faults
    assert words in caplog.text


def test_only_the_first_fault_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    server = Server(max_slots=None)
    requests = begun(server)
    server.drafter.spoils = {request.request_id for request in requests[:2]}
    with caplog.at_level(logging.INFO, logger="outrider.drafters.guarded"):
        server.run()

    assert 2 == server.engine.stats().draft_faults
    assert 1 == len(caplog.records)
