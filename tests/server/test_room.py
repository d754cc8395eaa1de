"""Whether there is room, as the event loop knows it: the engine's own rule, a step early.

Contract: what the loop lets through the engine takes, and what it refuses the engine would refuse;
what could not even be taken by an idle engine is the client's mistake, not a full queue.
"""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest

from outrider.config import AdmissionLimits
from outrider.errors import OverloadedError
from outrider.request import Request
from outrider.server.compute_thread import ComputeThread
from outrider.server.engine_desk import EngineDesk
from outrider.server.errors import ApiError
from tests.serving import MAX_LEN, Server, talkative


def build(
    max_batch_size: int, *, max_slots: int | None = None, **limits: int | None
) -> tuple[Server, EngineDesk]:
    """An engine on a fake model and its desk, which is not started: the test does its work."""
    admission = AdmissionLimits(**limits)
    server = Server(
        max_batch_size=max_batch_size, max_slots=max_slots, limits=admission, prefix_cache=False
    )
    llm = SimpleNamespace(
        engine=server.engine,
        engine_config=SimpleNamespace(max_batch_size=max_batch_size, admission=admission),
    )
    desk = EngineDesk(llm, ComputeThread(), model_name="fake", max_buffered_bytes=1 << 20)  # type: ignore[arg-type]
    desk._loop = SimpleNamespace(call_soon_threadsafe=lambda action: action())  # type: ignore[assignment]
    return server, desk


def hand_over(desk: EngineDesk, requests: list[Request]) -> None:
    """Past the loop's check into the engine, which must take them."""
    answers = desk.submit(requests, streams=False)
    desk._read_inbox()

    assert not answers.is_over


def refusal(desk: EngineDesk, requests: list[Request]) -> ApiError:
    with pytest.raises(ApiError) as caught:
        desk.submit(requests, streams=False)
    return caught.value


def test_an_idle_server_takes_what_runs_at_once_and_what_may_wait() -> None:
    server, desk = build(1, max_waiting=64, max_waiting_tokens=60)
    hand_over(desk, [server.new([1] * 40, 4) for _ in range(2)])
    refused = refusal(desk, [server.new([1] * 21, 4)])

    assert 429 == refused.status
    assert "Retry-After" in refused.headers
    assert (
        "2 would wait, with 61 prompt tokens, beside 0 that run; 1 run at once, at most 64 may "
        "wait with 60 tokens; try again later"
    ) == refused.message
    hand_over(desk, [server.new([1] * 20, 4)])


@pytest.mark.parametrize(
    ("num_answers", "length", "limits"),
    [
        (6, 4, {"max_waiting": 4}),
        (3, 40, {"max_waiting_tokens": 60}),
        (3, 30, {"max_waiting": 1, "max_slots": MAX_LEN}),
    ],
    ids=["answers", "tokens", "slots"],
)
def test_what_would_never_fit_is_the_clients_mistake(
    num_answers: int, length: int, limits: dict[str, int]
) -> None:
    """A client that is told to come back later would come back for ever."""
    server, desk = build(3 if "max_slots" in limits else 1, **limits)
    refused = refusal(desk, [server.new([1] * length, 30) for _ in range(num_answers)])

    assert (400, "n") == (refused.status, refused.param)
    assert f"n: of {num_answers} answers" in refused.message
    assert "Retry-After" not in refused.headers
    assert 0 == desk.metrics.num_refused()
    hand_over(desk, [server.new([1] * length, 30) for _ in range(num_answers - 1)])


def test_before_a_body_is_read_only_a_full_queue_refuses() -> None:
    server, desk = build(1, max_waiting=1)
    for prompt in talkative(30, 2):
        desk.check_room()
        hand_over(desk, [server.new(prompt, 30)])
    with pytest.raises(ApiError, match="2 would wait"):
        desk.check_room()
    server.engine.step()
    with pytest.raises(ApiError, match="2 would wait"):  # the other one is still there
        desk.check_room()
    while server.engine.stats().waiting:
        server.engine.step()
    desk.check_room()


@pytest.mark.parametrize("max_slots", [None, MAX_LEN], ids=["rows are short", "slots are short"])
def test_on_any_trace_the_loop_and_the_engine_are_of_one_mind(max_slots: int | None) -> None:
    draw = random.Random(3)
    server, desk = build(3, max_slots=max_slots, max_waiting=4, max_waiting_tokens=70)
    outcomes = {200: 0, 400: 0, 429: 0}
    for _ in range(300):
        prompt = [draw.randrange(1, 10) for _ in range(draw.choice([2, 10, 30]))]
        count = draw.choice([1, 1, 5, 9])
        requests = [server.new(prompt, draw.choice([2, 30])) for _ in range(count)]
        try:
            hand_over(desk, requests)
            outcomes[200] += 1
        except ApiError as refused:
            outcomes[refused.status] += 1
            with pytest.raises(OverloadedError):
                server.engine.submit_all(requests)
        for _ in range(draw.randrange(6)):
            server.engine.step()

    assert min(outcomes.values()) > 10
    assert (server.engine.stats().preemptions > 0) == (max_slots is not None)
